"""Answers to matches that only other people's rules have.

The packet is the first of a connection: a TCP SYN, an ICMP echo request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narthex.model.net import IPFamily, contains
from narthex.model.packet import Packet
from narthex.netfilter.ast import (
    AddressType,
    ConnMarkIs,
    CtDirection,
    Field,
    IcmpType,
    Table,
    TcpFlags,
    UndecidableMatch,
)
from narthex.netfilter.walk.state import Branch, HookPoint

_SYN = 2
_ECHO = {IPFamily.IPV4: 8, IPFamily.IPV6: 128}
_MULTICAST = {IPFamily.IPV4: "224.0.0.0/4", IPFamily.IPV6: "ff00::/8"}
_TOLD_TYPES = frozenset(("local", "unicast", "broadcast", "multicast"))

Answers = dict[type, Callable[[Any, Branch, HookPoint, Table], "bool | str"]]


def foreign_answers(packet: Packet, family: IPFamily, local: Callable[[str], bool]) -> Answers:
    """What answers each match, for one packet; `local` says which addresses are the host's own."""
    foreign = _Foreign(packet, family, local)
    return {
        AddressType: foreign.address_type,
        TcpFlags: foreign.tcp_flags,
        IcmpType: foreign.icmp_type,
        ConnMarkIs: foreign.connection_mark,
        CtDirection: foreign.direction,
        UndecidableMatch: foreign.circumstance,
    }


class _Foreign:
    def __init__(self, packet: Packet, family: IPFamily, local: Callable[[str], bool]) -> None:
        self._packet = packet
        self._family = family
        self._local = local

    def address_type(self, e: AddressType, branch: Branch, _place: HookPoint, _table: Table) -> bool | str:
        """The type of the route to an address, as far as the address alone tells."""
        address = branch.daddr if e.field is Field.DADDR else branch.saddr or self._packet.source
        if (e.field is Field.SADDR and branch.masquerade and not branch.saddr) or self._local(address):
            kind = "local"
        elif contains(_MULTICAST[self._family], address):
            kind = "multicast"
        elif address == "255.255.255.255":
            kind = "broadcast"
        elif self._family is IPFamily.IPV4 and address.endswith((".255", ".0")):
            # The last address of a network that the host is in, perhaps: which those are is not told.
            asked = {"unicast", "broadcast"}
            if asked <= set(e.types):
                return not e.negate
            if asked.isdisjoint(e.types) and _TOLD_TYPES.issuperset(e.types):
                return e.negate
            return f"whether {address} is a broadcast address depends on the routes"
        else:
            kind = "unicast"
        if kind in e.types:
            return not e.negate
        strange = [word for word in e.types if word not in _TOLD_TYPES]
        if strange and kind == "unicast":
            return f"whether the route to {address} is of type {strange[0]} depends on the routes"
        return e.negate

    def tcp_flags(self, e: TcpFlags, _branch: Branch, _place: HookPoint, _table: Table) -> bool | str:
        """A connection begins with SYN alone; the bits for congestion (ECE, CWR) may be set too."""
        if self._packet.protocol.value != "TCP":
            return False
        if e.mask & 0xC0:
            return "whether the first packet asks for congestion notification is the client's choice"
        return (_SYN & e.mask == e.value) is not e.negate

    def icmp_type(self, e: IcmpType, _branch: Branch, _place: HookPoint, _table: Table) -> bool | str:
        """The packet asks for an echo."""
        if self._packet.protocol.value != "ICMP":
            return False
        found = _ECHO[self._family] in e.types and (e.codes is None or e.codes[0] <= 0 <= e.codes[1])
        return found is not e.negate

    def connection_mark(self, e: ConnMarkIs, branch: Branch, _place: HookPoint, _table: Table) -> bool | str:
        """A new connection's mark is 0 until somebody sets it. What is not tracked has none to compare."""
        return branch.tracked and (branch.connection_mark & e.mask == e.value) is not e.negate

    def direction(self, e: CtDirection, branch: Branch, _place: HookPoint, _table: Table) -> bool | str:
        """The first packet goes the connection's own way."""
        return branch.tracked and e.original

    def circumstance(self, e: UndecidableMatch, _branch: Branch, _place: HookPoint, _table: Table) -> bool | str:
        """Nobody knows, but for packets that cannot have it."""
        if not (e.sent_locally if self._packet.from_host else e.forwarded):
            return False
        return f"depends on {e.about}: {e.text}"
