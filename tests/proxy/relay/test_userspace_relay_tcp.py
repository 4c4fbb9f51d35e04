"""TCP through the relay, on loopback."""

import asyncio
import errno
import hashlib
import os
import socket
from collections import Counter

import pytest
from tests.free_ports import free_port
from tests.proxy.relay.relay_stand import run, until

from narthex.proxy.relay.wire import RelayOrder, RelayPort


def clients_remembered(stand):
    return sum(map(len, stand.relay._affinities.values()))


@pytest.mark.row("25.3")
def test_endpoints_take_turns():
    async def test(stand):
        where = stand.listen(*await stand.named("a", "b", "c"))
        said = Counter([await stand.ask(where) for _ in range(12)])
        assert said == {"a": 4, "b": 4, "c": 4}

    run(test)


@pytest.mark.row("25.4")
def test_a_dead_endpoint_costs_a_retry_and_never_an_error():
    async def test(stand):
        live = await stand.named("a", "b")
        where = stand.listen(*live, stand.dead(), stand.dead())
        said = Counter([await stand.ask(where) for _ in range(20)])
        assert said.keys() == {"a", "b"}
        assert said.total() == 20
        assert stand.relay.counts.retries > 0
        assert stand.relay.counts.errors == 0

    run(test)


@pytest.mark.row("25.4")
def test_a_silent_endpoint_costs_a_retry_and_never_an_error():
    """A backlog that is full: the handshake is never answered."""

    async def test(stand):
        with socket.socket() as deaf:
            deaf.bind((stand.host, 0))
            deaf.listen(0)
            fillers = [socket.socket() for _ in range(3)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(deaf.getsockname())
            (live,) = await stand.named("live")
            where = stand.listen(deaf.getsockname(), live)
            assert {await stand.ask(where) for _ in range(6)} == {"live"}
            assert stand.relay.counts.errors == 0
            for filler in fillers:
                filler.close()

    run(test)


@pytest.mark.row("25.4")
def test_a_loop_that_was_held_up_takes_no_answer_for_silence():
    """The endpoint has answered, and nobody had the time to see it before patience ended."""

    async def test(stand):
        where = stand.listen(*await stand.named("live"))
        real = stand.loop.sock_connect

        async def unseen(sock, place):
            await real(sock, place)
            if place != where:
                await asyncio.sleep(60)

        stand.loop.sock_connect = unseen
        assert await stand.ask(where) == "live"
        assert (stand.relay.counts.retries, stand.relay.counts.errors) == (0, 0)

    run(test)


@pytest.mark.row("25.4")
def test_no_endpoint_that_lives_is_a_reset():
    async def test(stand):
        where = stand.listen(stand.dead())
        reader, writer = await asyncio.open_connection(*where)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert stand.relay.counts.errors == 1

    run(test)


@pytest.mark.row("25.12")
def test_each_direction_ends_by_itself():
    async def test(stand):
        async def sums_up(reader, writer):
            data = await reader.read()
            writer.write(hashlib.sha256(data).hexdigest().encode())
            writer.close()

        where = stand.listen(await stand.server(sums_up))
        reader, writer = await asyncio.open_connection(*where)
        sent = os.urandom(100_000)
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == hashlib.sha256(sent).hexdigest().encode()
        writer.close()
        await until(lambda: stand.relay.counts.open == 0)

    run(test)


@pytest.mark.row("25.12")
def test_the_endpoints_end_leaves_the_client_talking():
    async def test(stand):
        heard = asyncio.get_running_loop().create_future()

        async def ends_first(reader, writer):
            writer.write(b"done")
            writer.write_eof()
            heard.set_result(await reader.read())
            writer.close()

        where = stand.listen(await stand.server(ends_first))
        reader, writer = await asyncio.open_connection(*where)
        assert await reader.read() == b"done"
        writer.write(b"still here")
        writer.write_eof()
        assert await heard == b"still here"
        writer.close()

    run(test)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_bulk_passes_whole_both_ways_at_once(family):
    size = 20 << 20

    async def test(stand):
        async def echoes(reader, writer):
            while data := await reader.read(1 << 18):
                writer.write(data)
                await writer.drain()
            writer.close()

        where = stand.listen(await stand.server(echoes))
        reader, writer = await asyncio.open_connection(*where, limit=1 << 20)
        block = os.urandom(1 << 20)
        wanted = hashlib.sha256(block * (size // len(block))).digest()

        async def send():
            for _ in range(size // len(block)):
                writer.write(block)
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        got = hashlib.sha256()
        while data := await reader.read(1 << 18):
            got.update(data)
        await sending
        assert got.digest() == wanted
        writer.close()
        await until(lambda: stand.relay.counts.open == 0)
        assert stand.relay._shared.pipes.lent == 0

    run(test, family=family)


def test_a_slow_reader_slows_the_writer_down():
    """What is neither read nor taken stays with the sender: the relay keeps no more than sockets and a pipe hold."""

    async def test(stand):
        release = asyncio.Event()
        got = asyncio.get_running_loop().create_future()

        async def reads_late(reader, writer):
            await release.wait()
            count = 0
            while data := await reader.read(1 << 20):
                count += len(data)
            got.set_result(count)
            writer.close()

        where = stand.listen(await stand.server(reads_late))
        with socket.create_connection(where) as client:
            client.setblocking(False)
            block, sent, refused = bytes(1 << 20), 0, 0
            # Refused again and again over a while: the way is full up to the endpoint.
            while refused < 40:
                try:
                    sent += client.send(block)
                    refused = 0
                except BlockingIOError:
                    refused += 1
                    await asyncio.sleep(0.01)
                assert sent < 400 << 20, "nothing holds the sender back"
            release.set()
            client.shutdown(socket.SHUT_WR)
            assert await got == sent

    run(test)


def test_a_reset_by_one_side_reaches_the_other():
    async def test(stand):
        met = asyncio.get_running_loop().create_future()

        async def listens(reader, writer):
            try:
                met.set_result(await reader.read())
            except ConnectionResetError as error:
                met.set_result(error)
            writer.close()

        where = stand.listen(await stand.server(listens))
        client = socket.create_connection(where)
        await until(lambda: stand.relay.counts.open == 1 and len(stand.relay._listeners[("tcp", 0)]._connections) == 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        assert isinstance(await met, ConnectionResetError)
        await until(lambda: stand.relay.counts.open == 0)

    run(test)


def test_hundreds_at_once():
    count = 400

    async def test(stand):
        async def echoes(reader, writer):
            while data := await reader.read(1 << 16):
                writer.write(data)
            writer.close()

        where = stand.listen(await stand.server(echoes), await stand.server(echoes))
        pairs = await asyncio.gather(*(asyncio.open_connection(*where) for _ in range(count)))
        for number, (_, writer) in enumerate(pairs):
            writer.write(f"{number}\n".encode())
        said = [await reader.readline() for reader, _ in pairs]
        assert said == [f"{number}\n".encode() for number in range(count)]
        assert stand.relay.counts.open == count
        for _, writer in pairs:
            writer.close()
        await until(lambda: stand.relay.counts.open == 0)

    run(test)


def test_open_connections_live_through_changes():
    """Also one to an endpoint that leaves: it may end well (row 3.11)."""

    async def test(stand):
        async def echoes(reader, writer):
            while data := await reader.readline():
                writer.write(data)
            writer.close()

        stays, leaves = await stand.server(echoes), await stand.server(echoes)
        (joins,) = await stand.named("new")
        where = stand.listen(stays, leaves)
        pairs = [await asyncio.open_connection(*where) for _ in range(4)]
        stand.listen(joins)
        assert await stand.ask(where) == "new"
        stand.relay.obey(RelayOrder(close=(("tcp", 0),)))
        for reader, writer in pairs:
            writer.write(b"hello\n")
            assert await reader.readline() == b"hello\n"
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            await stand.ask(where)

    run(test)


def test_one_that_joins_while_a_client_looks_for_somebody():
    """All that were there at first are gone when the client has come to them."""

    async def test(stand):
        with socket.socket() as deaf:
            deaf.bind((stand.host, 0))
            deaf.listen(0)
            fillers = [socket.socket() for _ in range(3)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(deaf.getsockname())
            where = stand.listen(deaf.getsockname())
            asking = asyncio.create_task(stand.ask(where))
            await until(lambda: stand.relay.counts.connections == 1)
            stand.listen(*await stand.named("new"))
            assert await asking == "new"
            for filler in fillers:
                filler.close()

    run(test)


@pytest.mark.row("25.5")
def test_a_client_keeps_its_endpoint_until_it_dies():
    async def test(stand):
        a, b = await stand.named("a", "b")
        where = stand.listen(a, b, affinity=3600)
        had = {await stand.ask(where) for _ in range(6)}
        assert len(had) == 1
        (kept,) = had
        gone, left = (a, "b") if kept == "a" else (b, "a")
        stand.listen(stand.dead() if gone == a else a, stand.dead() if gone == b else b, affinity=3600)
        assert {await stand.ask(where) for _ in range(6)} == {left}
        assert clients_remembered(stand) == 1

    run(test)


@pytest.mark.row("25.5")
def test_ports_of_one_service_share_what_is_remembered():
    async def test(stand):
        ends = await stand.named("a", "b", "c", "d")
        entries = [
            RelayPort("tcp", port, ("shop", "web", ""), tuple(ends), 60)
            for port in (free_port(stand.host), free_port(stand.host))
        ]
        assert not stand.relay.obey(RelayOrder(listen=tuple(entries))).failed
        said = {await stand.ask((stand.host, entry.port)) for _ in range(4) for entry in entries}
        assert len(said) == 1

    run(test)


@pytest.mark.row("25.5")
def test_affinity_ends_with_its_time():
    now = [1000.0]

    async def test(stand):
        where = stand.listen(*await stand.named("a", "b"), affinity=100)
        first = await stand.ask(where)
        assert await stand.ask(where) == first
        now[0] += 99
        assert await stand.ask(where) == first
        now[0] += 101
        # It is the other one's turn.
        assert await stand.ask(where) != first

    run(test, now=lambda: now[0])


@pytest.mark.row("25.13")
def test_short_of_files_means_to_wait_and_not_to_end(monkeypatch):
    async def test(stand):
        where = stand.listen(*await stand.named("a"))
        real, refusals = socket.socket, [5]

        def scarce(*args, **kwargs):
            # The endpoint's side alone: made by the relay while a client waits.
            if len(args) == 2 and not kwargs and refusals[0]:
                refusals[0] -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return real(*args, **kwargs)

        monkeypatch.setattr("narthex.proxy.relay.tcp.socket.socket", scarce)
        reader, writer = await asyncio.open_connection(*where)
        assert await reader.read() == b"a"
        writer.close()
        assert stand.relay.counts.short_of_files == 5
        assert stand.relay.counts.errors == 0

    run(test)


@pytest.mark.row("25.13")
def test_no_more_are_taken_than_there_are_files_for():
    async def test(stand):
        async def echoes(reader, writer):
            while data := await reader.readline():
                writer.write(data)
            writer.close()

        where = stand.listen(await stand.server(echoes))
        stand.relay._shared.most_open = 3
        pairs = [await asyncio.open_connection(*where) for _ in range(5)]
        for _, writer in pairs:
            writer.write(b"x\n")
        for reader, _ in pairs[:3]:
            assert await reader.readline() == b"x\n"
        assert stand.relay.counts.open == 3
        assert stand.relay.counts.short_of_files >= 1
        for _, writer in pairs[:2]:
            writer.close()
        for reader, _ in pairs[3:]:
            assert await reader.readline() == b"x\n"
        for _, writer in pairs[2:]:
            writer.close()
        assert stand.relay.counts.errors == 0

    run(test)


@pytest.mark.row("25.9")
def test_a_port_that_somebody_has_is_named():
    async def test(stand):
        with socket.socket() as taken:
            taken.bind((stand.host, 0))
            taken.listen()
            port = taken.getsockname()[1]
            ends = tuple(await stand.named("a"))
            spare = free_port(stand.host)
            order = RelayOrder(
                listen=(
                    RelayPort("tcp", port, ("shop", "a", ""), ends),
                    RelayPort("tcp", spare, ("shop", "b", ""), ends),
                )
            )
            answer = stand.relay.obey(order)
            assert [(one.port, one.taken) for one in answer.failed] == [(port, True)]
            assert await stand.ask((stand.host, spare)) == "a"

    run(test)


def test_to_forget_is_to_end_everything():
    async def test(stand):
        async def echoes(reader, writer):
            await reader.read()
            writer.close()

        where = stand.listen(await stand.server(echoes), affinity=60)
        reader, writer = await asyncio.open_connection(*where)
        await until(lambda: clients_remembered(stand) == 1)
        stand.relay.obey(RelayOrder(forget=True))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert clients_remembered(stand) == 0
        with pytest.raises(ConnectionRefusedError):
            await stand.ask(where)

    run(test)
