"""The kernel's connection tracking table: list and remove entries."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence

from narthex.linux.netlink import DumpInterrupted, NetlinkError
from narthex.linux.nfnetlink import FAMILY_NUMBERS, NLM_F_CREATE, NLM_F_EXCL, NfNetlink
from narthex.model import IPFamily, Protocol
from narthex.netfilter.netlink import conntrack as ctnetlink
from narthex.netfilter.netlink.conntrack import ConntrackEntry, JoinedConnection, TcpSide

_FEW = 8
"""Up to this many listings filtered by the kernel can be faster than one full listing filtered here."""
_ENTRIES_PER_LISTING = 4_000
"""A listing walks the whole hash table, however few entries it holds. That takes as long as to list so many entries unfiltered."""
_JOIN_ATTEMPTS = 8


def load_module() -> None:
    """Make the kernel load connection tracking, as a request for its table does. Raises OSError."""
    ConntrackTable().entries(IPFamily.IPV4, [(Protocol.TCP, 1)])


class ConntrackTable:
    """The table of one network namespace. Opens its socket at the first use. Not thread-safe."""

    def __init__(self, namespace: str | None = None) -> None:
        self._namespace = namespace
        self._socket: NfNetlink | None = None

    def entries(self, family: IPFamily, towards: Collection[tuple[Protocol, int]]) -> list[ConntrackEntry]:
        """Return all entries of the family whose original destination is one of these protocols and ports.

        Raises OSError.

        An interrupted listing counts as complete: a missed entry is missed once (row 18.9).
        """
        found: dict[bytes, ConntrackEntry] = {}
        total = ctnetlink.entry_count(self._netlink.first(ctnetlink.SUBSYSTEM, ctnetlink.GET_STATISTICS))
        narrowed = len(towards) <= _FEW and total > (len(towards) - 1) * _ENTRIES_PER_LISTING
        requests = [ctnetlink.narrowed(*each) for each in towards] if narrowed else [b""] if total else []
        for request in requests:
            try:
                number = FAMILY_NUMBERS[family.value]
                for body in self._netlink.entries(ctnetlink.SUBSYSTEM, ctnetlink.GET, number, request):
                    entry = ctnetlink.read(body, towards)
                    if entry is not None:
                        found[entry.handle] = entry
            except DumpInterrupted:
                continue
        return list(found.values())

    def remove(self, family: IPFamily, entries: Sequence[ConntrackEntry]) -> list[bool]:
        """Remove entries; return for each whether it still existed. Raises OSError if the kernel refuses."""
        handles = [entry.handle for entry in entries]
        answers = self._netlink.every(ctnetlink.SUBSYSTEM, ctnetlink.DELETE, FAMILY_NUMBERS[family.value], handles)
        for error in answers:
            if error is not None and error.errno != errno.ENOENT:
                raise error
        return [error is None for error in answers]

    def join(self, family: IPFamily, connection: JoinedConnection) -> None:
        """Replace the entries of two relayed connections by one that rewrites each to the other.

        Raises OSError if the kernel refuses; the two entries are then gone.
        """
        handles = [
            ctnetlink.tcp_handle(connection.client, connection.destination),
            ctnetlink.tcp_handle(connection.relay, connection.endpoint),
        ]
        number = FAMILY_NUMBERS[family.value]
        body = ctnetlink.joined(connection)
        refused: NetlinkError | None = None
        for _ in range(_JOIN_ATTEMPTS):
            self._netlink.every(ctnetlink.SUBSYSTEM, ctnetlink.DELETE, number, handles)
            (refused,) = self._netlink.every(
                ctnetlink.SUBSYSTEM, ctnetlink.NEW, number, [body], NLM_F_CREATE | NLM_F_EXCL
            )
            # A packet that arrived in between has made an entry of its own.
            if refused is None or refused.errno != errno.EEXIST:
                break
        if refused is not None:
            raise refused

    def forget(self, family: IPFamily, source: TcpSide, destination: TcpSide) -> None:
        """Remove the entry of a TCP connection by its first packet, if there is one. Raises OSError."""
        handle = ctnetlink.tcp_handle(source, destination)
        self._netlink.every(ctnetlink.SUBSYSTEM, ctnetlink.DELETE, FAMILY_NUMBERS[family.value], [handle])

    @property
    def _netlink(self) -> NfNetlink:
        if self._socket is None:
            self._socket = NfNetlink(self._namespace)
        return self._socket
