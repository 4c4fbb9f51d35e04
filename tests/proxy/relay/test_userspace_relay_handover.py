"""Which connections the relay may hand over, and what happens to those that it keeps. The kernel's part is in kernel/."""

import asyncio
import contextlib

import pytest
from tests.proxy.relay.relay_stand import run, until

from narthex.linux.tcp_state import TcpTraits
from narthex.netfilter.netlink.attributes import attributes
from narthex.netfilter.netlink.conntrack import JoinedConnection, joined, tcp_handle
from narthex.proxy.relay import tcp
from narthex.proxy.relay.handover import HandoverRefused, mismatch

SIDE = TcpTraits(True, False, True, 7, 7, 1460, 1460)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"established": False}, "has ended"),
        ({"timestamps": True}, "timestamps"),
        ({"selective": False}, "selective"),
        ({"peer_scale": 8}, "scale"),
        ({"own_scale": 8}, "scale"),
        ({"segment": 1410}, "larger segments"),
        ({"announced_segment": 1500}, "larger segments"),
    ],
)
def test_sides_that_differ_cannot_be_joined(change, reason):
    other = SIDE._replace(**change)
    assert reason in mismatch(SIDE, other)
    assert reason in mismatch(other, SIDE)


def test_sides_that_agree_can_be_joined():
    assert mismatch(SIDE, SIDE) == ""
    # What one side scales by, the other one knows.
    assert mismatch(SIDE._replace(peer_scale=8, own_scale=9), SIDE._replace(peer_scale=9, own_scale=8)) == ""


@pytest.mark.parametrize("net", ["192.0.2.", "2001:db8::"])
def test_the_entry_of_joined_connections_names_all_sides(net):
    client, destination, relay, endpoint = ((f"{net}{number}", number) for number in range(1, 5))
    found = dict_of(joined(JoinedConnection(client, destination, relay, endpoint, 5, 2**32 - 5)))
    (original,) = dict_of(tcp_handle(client, destination)).values()
    assert found[1] == original
    assert {1, 2, 3, 4, 6, 7, 13, 15, 16} == set(found)
    assert dict_of(found[15])[2] == dict_of(found[15])[3] == (5).to_bytes(4)
    assert dict_of(found[16])[2] == b"\xff\xff\xff\xfb"


def dict_of(body):
    return {kind: body[start:end] for kind, start, end in attributes(body)}


def bulk(monkeypatch, take, check, delays=(0.0, 0.01)):
    """A stream through a relay whose handover does this; `check` gets the relay's counters at the end."""
    monkeypatch.setattr(tcp, "HANDOVER_DELAYS", delays)
    data = bytes(range(256)) * 4096

    async def test(stand):
        async def pour(_reader, writer):
            writer.write(data)
            writer.close()

        where = stand.listen(await stand.server(pour))
        stand.relay._shared.handover.take = take
        reader, writer = await asyncio.open_connection(*where, limit=1 << 22)
        assert await reader.read() == data
        writer.close()
        await until(lambda: stand.relay.counts.open == 0)
        check(stand.relay.counts)

    run(test)


def test_a_refused_handover_leaves_the_stream_alone_and_is_counted_once(monkeypatch):
    async def take(*_):
        raise HandoverRefused("not today")

    def check(counts):
        assert (counts.kept, counts.handed_over) == ({"not today": 1}, 0)

    bulk(monkeypatch, take, check)


def test_a_busy_connection_is_asked_again(monkeypatch):
    asked = []

    async def take(*_):
        asked.append(1)
        raise HandoverRefused("busy", again=True)

    def check(counts):
        assert counts.kept in ({}, {"busy": 1})
        assert 1 <= len(asked) <= 2

    bulk(monkeypatch, take, check)


def test_a_connection_that_ends_meanwhile_cancels_the_handover(monkeypatch):
    ended = []

    async def take(*_):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(1)

    bulk(monkeypatch, take, lambda _: None)
    assert ended == [1]


def test_a_handover_that_fails_midway_resets_both_sides():
    async def take(*_):
        raise OSError(1, "no")

    async def test(stand):
        async def pour(reader, writer):
            writer.write(bytes(1 << 24))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

        where = stand.listen(await stand.server(pour))
        stand.relay._shared.handover.take = take
        reader, writer = await asyncio.open_connection(*where)
        with pytest.raises(ConnectionError):
            while True:
                assert await reader.read(1 << 20)
        writer.close()
        await until(lambda: stand.relay.counts.open == 0)

    run(test)


def test_loopback_is_never_handed_over():
    """Both sides are this machine: the relay copies, and says why."""

    async def test(stand):
        async def pour(_reader, writer):
            writer.write(bytes(1 << 22))
            writer.close()

        where = stand.listen(await stand.server(pour))
        reader, writer = await asyncio.open_connection(*where)
        assert len(await reader.read()) == 1 << 22
        writer.close()
        await until(lambda: stand.relay.counts.open == 0)
        assert stand.relay.counts.handed_over == 0

    run(test)
