"""Virtual servers of the kernel's IPVS as values."""

from __future__ import annotations

import msgspec

from narthex.model.net import Protocol, address_key

ServerKey = tuple[str, Protocol, int]
"""Address, protocol and port of a virtual server."""


class RealServer(msgspec.Struct, frozen=True):
    """Where connections are sent to, by masquerading (IPVS' word for rewriting the destination)."""

    address: str
    port: int
    weight: int = 1

    @property
    def sort_key(self) -> tuple[tuple[int, int], int]:
        """By address number, then port."""
        return address_key(self.address), self.port


class VirtualServer(msgspec.Struct, frozen=True, kw_only=True):
    """An address and port that IPVS answers for, and the real servers behind it."""

    address: str
    protocol: Protocol
    port: int
    scheduler: str
    """Name of the kernel module without `ip_vs_`: `rr`, `lc`, …"""
    persistence_seconds: int | None = None
    """A client keeps its real server while it returns within this time; None: each connection is scheduled anew."""
    hash_ports: bool = False
    """The hashing scheduler counts the client's port in (`mh-port`, flag IP_VS_SVC_F_SCHED_MH_PORT)."""
    reals: tuple[RealServer, ...] = ()
    """Sorted by address and port."""

    @property
    def key(self) -> ServerKey:
        """What the kernel knows it by."""
        return self.address, self.protocol, self.port

    @property
    def settings(self) -> tuple[str, int | None, bool]:
        """All but the real servers."""
        return self.scheduler, self.persistence_seconds, self.hash_ports
