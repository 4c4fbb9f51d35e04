"""The kernel's table of tracked connections: list a part of it, remove entries."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence

from narthex.linux.netlink import DumpInterrupted
from narthex.linux.nfnetlink import FAMILY_NUMBERS, NfNetlink
from narthex.model.net import IPFamily, Protocol
from narthex.netfilter.netlink import conntrack as ctnetlink
from narthex.netfilter.netlink.conntrack import ConntrackEntry

_FEW = 8
"""So many listings that the kernel narrows are quicker than a whole one that is narrowed here."""


def load_module() -> None:
    """Have the kernel load what tracks connections, as it does when somebody asks for some. Raises OSError."""
    ConntrackTable().entries(IPFamily.IPV4, [(Protocol.TCP, 1)])


class ConntrackTable:
    """The table of one network namespace. Opens its socket when it is first used. Not for several threads at once."""

    def __init__(self, namespace: str | None = None) -> None:
        self._namespace = namespace
        self._socket: NfNetlink | None = None

    def entries(self, family: IPFamily, towards: Collection[tuple[Protocol, int]]) -> list[ConntrackEntry]:
        """All entries of the family that were first sent to one of these protocols and ports. Raises OSError.

        A listing that the kernel broke off is as good as a whole one: what is missed is missed once (row 18.9).
        """
        found: dict[bytes, ConntrackEntry] = {}
        requests = [ctnetlink.narrowed(*each) for each in towards] if len(towards) <= _FEW else [b""]
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
        """Remove entries; for each whether it was still there. Raises OSError when the kernel refuses."""
        handles = [entry.handle for entry in entries]
        answers = self._netlink.every(ctnetlink.SUBSYSTEM, ctnetlink.DELETE, FAMILY_NUMBERS[family.value], handles)
        for error in answers:
            if error is not None and error.errno != errno.ENOENT:
                raise error
        return [error is None for error in answers]

    @property
    def _netlink(self) -> NfNetlink:
        if self._socket is None:
            self._socket = NfNetlink(self._namespace)
        return self._socket
