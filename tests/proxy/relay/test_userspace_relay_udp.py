"""UDP through the relay, on loopback."""

import asyncio
import os
import socket
from contextlib import ExitStack

import pytest
from tests.proxy.relay.relay_stand import run, udp_socket, until

from narthex.proxy.relay.wire import RelayOrder

LARGEST = 65507
"""Bytes that a datagram over IPv4 can carry."""


class Echo(asyncio.DatagramProtocol):
    """Answers with its name and what came."""

    def __init__(self, name):
        self.name = name
        self.seen = []

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, address):
        self.seen.append(address)
        self.transport.sendto(data[: LARGEST - len(self.name)] if self.name else data, address)
        if self.name:
            self.transport.sendto(self.name.encode(), address)


async def echo(stand, name=""):
    transport, protocol = await stand.loop.create_datagram_endpoint(
        lambda: Echo(name), local_addr=(stand.host, 0), family=stand.family
    )
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    stand.servers.append(transport)
    return transport.get_extra_info("sockname")[:2], protocol


async def say(stand, sock, data=b"hello"):
    """Send and return the next answer."""
    sock.send(data)
    return await asyncio.wait_for(stand.loop.sock_recv(sock, 1 << 16), 20)


@pytest.mark.row("25.7")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("size", [1, 4097, LARGEST])
def test_datagrams_pass_whole(family, size):
    async def test(stand):
        end, _ = await echo(stand)
        where = stand.listen(end, protocol="udp")
        data = os.urandom(size)
        with udp_socket(where, family) as client:
            assert await say(stand, client, data) == data

    run(test, family=family)


def test_empty_datagrams_pass_too():
    async def test(stand):
        end, seen = await echo(stand)
        with udp_socket(stand.listen(end, protocol="udp")) as client:
            client.send(b"")
            await until(lambda: len(seen.seen) == 1)

    run(test)


@pytest.mark.row("25.7")
def test_each_client_has_a_socket_of_its_own_and_keeps_its_endpoint():
    async def test(stand):
        (a, seen_by_a), (b, seen_by_b) = await echo(stand), await echo(stand)
        where = stand.listen(a, b, protocol="udp")
        with ExitStack() as stack:
            clients = [stack.enter_context(udp_socket(where)) for _ in range(4)]
            for _ in range(3):
                for client in clients:
                    assert await say(stand, client) == b"hello"
        assert [len(seen_by_a.seen), len(seen_by_b.seen)] == [6, 6]
        assert len({*seen_by_a.seen, *seen_by_b.seen}) == 4
        assert stand.relay.counts.clients == stand.relay.counts.open == 4

    run(test)


@pytest.mark.row("25.7")
def test_idle_clients_are_forgotten():
    now = [1000.0]

    async def test(stand):
        end, seen = await echo(stand)
        where = stand.listen(end, protocol="udp")
        with udp_socket(where) as busy, udp_socket(where) as idle:
            await say(stand, busy)
            await say(stand, idle)
            now[0] += 20
            await say(stand, busy)
            now[0] += 15
            await until(lambda: stand.relay.counts.open == 1)
            assert await say(stand, busy) == b"hello"
            assert stand.relay.counts.clients == 2
            assert await say(stand, idle) == b"hello"
            assert stand.relay.counts.clients == 3
        assert len(set(seen.seen)) == 3

    run(test, now=lambda: now[0], udp_idle_seconds=30.0)


@pytest.mark.row("25.4")
def test_a_dead_endpoint_costs_nothing():
    """The datagram that was refused goes to the next one."""

    async def test(stand):
        end, _ = await echo(stand)
        where = stand.listen(stand.dead(socket.SOCK_DGRAM), end, stand.dead(socket.SOCK_DGRAM), protocol="udp")
        with ExitStack() as stack:
            for number in range(6):
                client = stack.enter_context(udp_socket(where))
                data = f"number {number}".encode()
                assert await say(stand, client, data) == data
        assert stand.relay.counts.retries >= 1
        assert stand.relay.counts.errors == 0

    run(test)


@pytest.mark.row("18.2")
def test_clients_of_an_endpoint_that_leaves_get_another():
    async def test(stand):
        (a, _), (b, _) = await echo(stand), await echo(stand, "b")
        where = stand.listen(a, protocol="udp")
        with udp_socket(where) as client:
            assert await say(stand, client) == b"hello"
            stand.listen(b, protocol="udp")
            assert await say(stand, client) == b"hello"
            assert await stand.loop.sock_recv(client, 100) == b"b"

    run(test)


def test_an_endpoint_that_stops_answering_is_left_with_the_next_datagram():
    async def test(stand):
        (a, first), (b, _) = await echo(stand), await echo(stand, "b")
        where = stand.listen(a, protocol="udp")
        with udp_socket(where) as client:
            assert await say(stand, client) == b"hello"
            stand.listen(a, b, protocol="udp")
            first.transport.close()
            await asyncio.sleep(0)
            # This one is refused, as the endpoint is gone; that makes it known.
            await stand.loop.sock_sendall(client, b"lost")
            await until(lambda: stand.relay.counts.open == 0)
            assert await say(stand, client) == b"hello"
            assert await stand.loop.sock_recv(client, 100) == b"b"

    run(test)


@pytest.mark.row("25.5")
def test_affinity_counts_for_addresses_not_for_sockets():
    async def test(stand):
        (a, seen_by_a), (b, seen_by_b) = await echo(stand), await echo(stand)
        where = stand.listen(a, b, protocol="udp", affinity=100)
        with ExitStack() as stack:
            for _ in range(4):
                assert await say(stand, stack.enter_context(udp_socket(where))) == b"hello"
        assert sorted([len(seen_by_a.seen), len(seen_by_b.seen)]) == [0, 4]

    run(test)


@pytest.mark.row("25.13")
def test_the_client_that_was_idle_longest_makes_room():
    async def test(stand):
        end, seen = await echo(stand)
        where = stand.listen(end, protocol="udp")
        stand.relay._shared.most_open = 2
        with ExitStack() as stack:
            for _ in range(5):
                assert await say(stand, stack.enter_context(udp_socket(where))) == b"hello"
        assert stand.relay.counts.open == 2
        assert stand.relay.counts.short_of_files == 3
        assert len(set(seen.seen)) == 5

    run(test)


def test_answers_come_from_the_address_that_was_asked():
    """On a node with several addresses connection tracking knows only that one."""

    async def test(stand):
        end, _ = await echo(stand)
        stand.relay._host = "0.0.0.0"
        _, port = stand.listen(end, protocol="udp")
        for address in ("127.0.0.1", "127.0.0.2", "127.1.2.3"):
            with udp_socket((address, port)) as client:
                assert await say(stand, client) == b"hello"

    run(test)


def test_a_closed_port_forgets_its_clients():
    async def test(stand):
        end, _ = await echo(stand)
        where = stand.listen(end, protocol="udp")
        with udp_socket(where) as client:
            assert await say(stand, client) == b"hello"
            stand.relay.obey(RelayOrder(close=(("udp", 0),)))
            assert stand.relay.counts.open == 0
            with pytest.raises(ConnectionRefusedError):
                await say(stand, client)

    run(test)
