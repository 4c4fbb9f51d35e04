"""The IPVS stage of a symbolic walk: virtual servers split a set of packets, and real servers share each part.

It means for each packet of a set what `narthex.netfilter.walk.ipvs` means for one packet. What a scheduler selects by its state, or by
a hash that only the kernel computes, is a free choice: each real server that can be selected counts alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from narthex.model import Disposition
from narthex.netfilter.ipvs import RealServer, VirtualServer
from narthex.netfilter.sets.branch import PacketEnd, SetBranch
from narthex.netfilter.sets.index import BoxIndex
from narthex.netfilter.sets.matches import choice_name
from narthex.netfilter.sets.probabilities import share
from narthex.netfilter.sets.space import PacketSpace
from narthex.netfilter.sets.values import ValueSet, span, values
from narthex.netfilter.walk.ipvs import record
from narthex.netfilter.walk.state import KernelObjects

Balanced = Iterator[tuple[PacketEnd | None, SetBranch]]

_BY_WEIGHT = frozenset(("rr", "wrr"))
"""Schedulers whose shares over many connections do not depend on what the connections do."""
_MATCHED = 3
"""Destination, protocol, and port are the first fields."""


class SetIpvs:
    """IPVS for sets of packets."""

    def __init__(self, space: PacketSpace, objects: KernelObjects) -> None:
        self._space = space
        self._marks = objects.marks
        self._addresses: dict[str, ValueSet] = {}
        # A virtual server for one port precedes the one for all ports of its address.
        ordered = sorted(objects.servers.values(), key=lambda server: server.port == 0)
        boxes = [
            ((self._at(server.address), values(server.protocol.number), _ports(server.port)), server)
            for server in ordered
            if self._at(server.address)
        ]
        self._index = BoxIndex(boxes, range(_MATCHED))
        self.serves = bool(objects.servers or objects.marks)
        """IPVS looks at packets."""

    def _at(self, address: str) -> ValueSet:
        known = self._addresses.get(address)
        if known is None:
            known = self._addresses[address] = self._space.network(address)
        return known

    def balance(self, hook: str, branch: SetBranch) -> Balanced:
        """Yield the parts of a branch, with another destination where a virtual server has selected one."""
        header = branch.header
        for matched, servers in self._index.split(header[:_MATCHED]):
            narrowed = any(part is not whole for part, whole in zip(matched, header, strict=False))
            part = branch.with_header((*matched, *header[_MATCHED:])) if narrowed else branch
            if servers and branch.is_vague:
                yield PacketEnd(Disposition.UNSUPPORTED, note=f"{hook} IPVS: it gets redirected packets"), part
            elif servers:
                yield from self._selected(hook, servers[0], part)
            elif part.mark and part.mark in self._marks:
                note = f"{hook} IPVS: a virtual server for the packet mark {part.mark:#x} handles it"
                yield PacketEnd(Disposition.UNSUPPORTED, note=note), part
            else:
                yield None, part

    def _selected(self, hook: str, server: VirtualServer, branch: SetBranch) -> Balanced:
        """Yield one branch for each real server that may be selected. Without any, the kernel rejects (ip_vs_leave)."""
        shares = _shares(server)
        if not shares:
            yield PacketEnd(Disposition.REJECTED), branch
            return
        missed = branch
        if server.persistence_seconds:
            for real, _ in shares:
                choice = choice_name(record(server.key, real), server.persistence_seconds)
                yield self._sent(hook, server, real, missed.choosing((choice, True)))
                missed = missed.choosing((choice, False))
        for real, part in shares:
            yield self._sent(hook, server, real, missed.taking(part))

    def _sent(
        self, hook: str, server: VirtualServer, real: RealServer, branch: SetBranch
    ) -> tuple[PacketEnd | None, SetBranch]:
        if real.forward != "masquerade":
            note = f"{hook} IPVS: a virtual server forwards by {real.forward}"
            return PacketEnd(Disposition.UNSUPPORTED, note=note), branch
        port = real.port or None
        made = branch.sent(self._at(real.address), span(port, port) if port else None, (real.address, real.port))
        made.served = True
        if server.persistence_seconds:
            made.remembers = (*branch.remembers, record(server.key, real))
        return None, made


def _ports(port: int) -> ValueSet:
    return span(port, port) if port else span(0, 0xFFFF)


def _shares(server: VirtualServer) -> tuple[tuple[RealServer, Fraction], ...]:
    if server.scheduler in _BY_WEIGHT:
        return server.shares()
    usable = [real for real in server.reals if real.weight > 0]
    return tuple((real, share(1, len(usable))) for real in usable)
