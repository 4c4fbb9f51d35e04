"""Sets of the kernel's ipset facility as values."""

from __future__ import annotations

import msgspec

from narthex.model.net import IPFamily

MAX_NAME = 31
"""Bytes that the kernel keeps of a set's name (IPSET_MAXNAMELEN without its end)."""
MAX_ENTRIES = 1_048_576
"""`maxelem` of the sets that we make: only a limit, no memory. ipset's default of 65536 is too few for large clusters."""


class IpSet(msgspec.Struct, frozen=True):
    """One set. Its entries are in the wording of `ipset save`: `10.110.0.7,tcp:80`, and no /32 or /128."""

    name: str
    kind: str
    """As ipset writes it: `hash:ip,port`, `bitmap:port`, …"""
    family: IPFamily
    """Of its addresses; a bitmap of ports has none, and says IPV4 in both families' rules."""
    entries: frozenset[str] = frozenset()

    @property
    def create(self) -> str:
        """The words behind `create` that make it, empty."""
        if self.kind == "bitmap:port":
            return f"{self.name} {self.kind} range 0-65535"
        family = "inet" if self.family is IPFamily.IPV4 else "inet6"
        return f"{self.name} {self.kind} family {family} maxelem {MAX_ENTRIES}"
