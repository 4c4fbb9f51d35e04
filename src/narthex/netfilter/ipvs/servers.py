"""Virtual servers of the kernel's IPVS as values, and how IPVS draws a real server."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import msgspec

from narthex.model.net import Protocol
from narthex.netfilter.ipset.sets import IpSet

ServerKey = tuple[str, Protocol, int]
"""Address, protocol and port of a virtual server."""


class RealServer(msgspec.Struct, frozen=True):
    """Where connections are sent to."""

    address: str
    port: int
    weight: int = 1
    forward: str = "masquerade"
    """IPVS' word for rewriting the destination, and the only way a Service needs. Other people's virtual servers may
    have `gateway` or `tunnel`."""

    @property
    def sort_key(self) -> tuple[str, int]:
        """By address text, then port, as endpoints of a plan are."""
        return self.address, self.port


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
    """Sorted by `RealServer.sort_key`."""

    @property
    def key(self) -> ServerKey:
        """What the kernel knows it by."""
        return self.address, self.protocol, self.port

    @property
    def settings(self) -> tuple[str, int | None, bool]:
        """All but the real servers."""
        return self.scheduler, self.persistence_seconds, self.hash_ports

    def shares(self) -> tuple[tuple[RealServer, Fraction], ...]:
        """The real servers that can be drawn, each with its share of the connections.

        A share is that of many connections: which one gets the next depends on the scheduler's own state, or on the
        client's address. Schedulers that know of weights share by weight. None with weight 0 is drawn by any.
        """
        able = [real for real in self.reals if real.weight > 0]
        if self.scheduler in _BLIND_TO_WEIGHTS:
            return tuple((real, Fraction(1, len(able))) for real in able)
        total = sum(real.weight for real in able)
        return tuple((real, Fraction(real.weight, total)) for real in able)


_BLIND_TO_WEIGHTS = frozenset(("rr", "lc", "dh"))


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """What acts on a packet beside the rules: the sets that rules name, IPVS, and the addresses bound for it."""

    sets: Mapping[str, IpSet] = {}
    servers: Mapping[ServerKey, VirtualServer] = {}
    bound: frozenset[str] = frozenset()
    """Own addresses that the node has for its Services alone (link kube-ipvs0)."""
    marks: frozenset[int] = frozenset()
    """Packet marks that other people's virtual servers answer for."""
