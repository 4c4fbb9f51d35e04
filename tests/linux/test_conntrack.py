"""The kernel's table with a socket that answers what it is told to."""

import errno

import pytest

from narthex.linux import conntrack
from narthex.linux.conntrack import ConntrackTable
from narthex.linux.netlink import DumpInterrupted, NetlinkError
from narthex.model.net import ConntrackFlow, IPFamily, Protocol
from narthex.netfilter.netlink import conntrack as ctnetlink
from narthex.netfilter.netlink.attributes import attribute
from narthex.netfilter.netlink.conntrack import ConntrackEntry

ENTRIES = [
    ConntrackEntry(
        ConntrackFlow(Protocol.UDP, "10.64.1.200", port, "10.110.0.1", 80, "10.64.1.5", 80), str(port).encode()
    )
    for port in (1, 2, 3)
]


def towards(count):
    return frozenset((Protocol.UDP, port) for port in range(count))


class FakeSocket:
    dumped = (b"a", b"b")
    broken_off = False
    answers: tuple = ()
    asked: list = []
    total = 1

    def __init__(self, namespace):
        assert namespace == "somewhere"

    def entries(self, subsystem, kind, family, payload):
        assert (subsystem, kind, family) == (1, 1, 2)
        self.asked.append(payload)
        yield from self.dumped
        if self.broken_off:
            raise DumpInterrupted

    def first(self, subsystem, kind):
        assert (subsystem, kind) == (1, 5)
        return attribute(2, b"\0\0\0\7") + attribute(1, self.total.to_bytes(4))

    def every(self, subsystem, kind, family, payloads):
        assert (subsystem, kind, family, payloads) == (1, 2, 2, [b"1", b"2", b"3"])
        return list(self.answers)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(conntrack, "NfNetlink", FakeSocket)
    monkeypatch.setattr(FakeSocket, "asked", [])
    monkeypatch.setattr(ctnetlink, "read", lambda body, _: ENTRIES[0] if body == b"a" else None)
    return ConntrackTable("somewhere")


@pytest.mark.row("18.9")
@pytest.mark.parametrize("broken_off", [False, True])
def test_a_listing_that_breaks_off_counts(table, monkeypatch, broken_off):
    monkeypatch.setattr(FakeSocket, "broken_off", broken_off)
    assert table.entries(IPFamily.IPV4, towards(9)) == [ENTRIES[0]]


def test_the_kernel_narrows_what_is_little(table, monkeypatch):
    """Each entry counts once, also where an old kernel narrows nothing."""
    monkeypatch.setattr(FakeSocket, "total", 100_000)
    assert table.entries(IPFamily.IPV4, towards(2)) == [ENTRIES[0]]
    assert sorted(FakeSocket.asked) == sorted(ctnetlink.narrowed(*each) for each in towards(2))
    FakeSocket.asked.clear()
    table.entries(IPFamily.IPV4, towards(9))
    assert FakeSocket.asked == [b""]


def test_a_small_table_is_listed_once(table):
    """Each listing walks the whole hash table, also an empty one."""
    table.entries(IPFamily.IPV4, towards(3))
    assert FakeSocket.asked == [b""]
    FakeSocket.asked.clear()
    table.entries(IPFamily.IPV4, towards(1))
    assert FakeSocket.asked == [ctnetlink.narrowed(Protocol.UDP, 0)]


def test_an_empty_table_is_not_listed(table, monkeypatch):
    monkeypatch.setattr(FakeSocket, "total", 0)
    assert table.entries(IPFamily.IPV4, towards(1)) == [] and not FakeSocket.asked


def test_what_was_removed_and_what_was_gone(table, monkeypatch):
    monkeypatch.setattr(FakeSocket, "answers", (None, NetlinkError(errno.ENOENT, ""), None))
    assert table.remove(IPFamily.IPV4, ENTRIES) == [True, False, True]


def test_a_refusal_is_an_error(table, monkeypatch):
    monkeypatch.setattr(FakeSocket, "answers", (None, NetlinkError(errno.EPERM, ""), None))
    with pytest.raises(OSError, match="Operation not permitted"):
        table.remove(IPFamily.IPV4, ENTRIES)
