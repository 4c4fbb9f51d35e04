"""Whether an expression matches the packet, as far as can be known.

An answer is True, False, or a text: the reason why it cannot be known. A rule counts as not matching as soon as one of
its matches is False, whatever could not be known before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from narthex.model.net import IPFamily, contains, family_of
from narthex.model.packet import Host, Memory, Packet
from narthex.netfilter.ast import (
    AnyOf,
    Atom,
    Compare,
    CtState,
    CtStatus,
    Expression,
    Field,
    InSet,
    IpvsMatch,
    IsLocal,
    Key,
    MarkIs,
    MatchSet,
    PortRange,
    RecentCheck,
    Rule,
    Slot,
    Table,
    TcpReset,
    Unknown,
)
from narthex.netfilter.describe import describe, describe_rule
from narthex.netfilter.walk.foreign import foreign_answers
from narthex.netfilter.walk.lookup import ElementIndex, RulesetIndex, ipset_fields, ipset_index
from narthex.netfilter.walk.state import Branch, HookPoint, KernelObjects
from narthex.netfilter.xtables.values import TABLES

Answer = bool | str

_ORIGINAL = frozenset((Field.ORIG_SADDR, Field.ORIG_DADDR, Field.ORIG_SPORT, Field.ORIG_DPORT))
_PORTS = frozenset((Field.SPORT, Field.DPORT))
_NO_PORTS = "a packet without ports has a checksum, which is not known, where others have them"
_ADDRESSES = frozenset((Field.SADDR, Field.DADDR, Field.ORIG_SADDR, Field.ORIG_DADDR))
_ICMP = {IPFamily.IPV4: ("icmp", 1), IPFamily.IPV6: ("icmpv6", "ipv6-icmp", 58)}
_OWN_STATUS = ("dnat", "snat")
_NEVER_ON_FIRST_PACKET = {"seen-reply", "assured", "expected", "dying", "confirmed"}
_MAX_DRAW = 100_000


class ValueNotKnown(Exception):
    """The value of a field cannot be known; the message says why."""


class Matcher:
    """Answers for one packet on one host."""

    def __init__(
        self,
        packet: Packet,
        host: Host,
        index: RulesetIndex,
        memory: Memory | None,
        now: float,
        objects: KernelObjects,
        state: str = "new",
    ) -> None:
        self.packet = packet
        self.family = family_of(packet.destination)
        self._own = frozenset(host.addresses)
        self._own_in_order = host.addresses
        self._index = index
        self._memory = memory
        self._now = now
        self._objects = objects
        self._state = state
        ports = packet.protocol.value != "ICMP"
        self._protocol: tuple[Atom, ...] = (
            (packet.protocol.lower, packet.protocol.number) if ports else _ICMP[self.family]
        )
        self._has_ports = ports
        self.answers: dict[type, Callable[[Any, Branch, HookPoint, Table], Answer]] = {
            Compare: self._compare,
            PortRange: self._port_range,
            IsLocal: self._is_local,
            CtState: self._ct_state,
            CtStatus: self._ct_status,
            TcpReset: self._tcp_reset,
            MarkIs: self._mark_is,
            InSet: self._in_set,
            MatchSet: self._match_set,
            IpvsMatch: self._by_ipvs,
            RecentCheck: self._recent,
            Unknown: self._unknown,
            AnyOf: self._any_of,
            **foreign_answers(packet, self.family, self.local),
        }
        """By type of match; every other expression is a statement or a draw."""

    def all_of(self, matches: tuple[Expression, ...], branch: Branch, point: HookPoint, table: Table) -> Answer:
        """Whether all of the matches match."""
        doubt = ""
        for each in matches:
            answer = self.answers[type(each)](each, branch, point, table)
            if answer is False:
                return False
            if answer is not True:
                doubt = doubt or answer
        return doubt or True

    def local(self, address: str) -> bool:
        """Whether the address is one of the host's own, loopback included."""
        return address in self._own or address in self._objects.bound or contains(self.family.loopback, address)

    def own_address(self, hook: str) -> str:
        """Where a redirected packet goes: any of the host's own addresses, since rules cannot tell which one the input
        interface has; loopback for packets that were made here."""
        known = (own for own in self._own_in_order if family_of(own) is self.family)
        loopback = "127.0.0.1" if self.family is IPFamily.IPV4 else "::1"
        return loopback if hook == "output" else next(known, loopback)

    def key(self, key: Key, branch: Branch, point: HookPoint) -> tuple[Atom, ...] | None:
        """A key without random parts, None when the packet has no such field. Raises ValueNotKnown."""
        return next(self.draws(key, branch, point), (Fraction(1), None))[1]

    def draws(self, key: Key, branch: Branch, point: HookPoint) -> Iterator[tuple[Fraction, tuple[Atom, ...]]]:
        """All values that a key can have, each with its probability; none when the packet lacks a field. Raises
        ValueNotKnown."""
        if not self._has_ports and Field.L4PROTO in key:
            # What stands in the ports' point of other protocols is no element of a set that names the protocol.
            values: list[Atom | None] = [
                None if isinstance(part, Slot) else -1 if part in _PORTS else self._value(part, branch, point)
                for part in key
            ]
        else:
            values = [None if isinstance(part, Slot) else self._value(part, branch, point) for part in key]
        slots = [(position, part.mod) for position, part in enumerate(key) if isinstance(part, Slot)]
        if sum(value is None for value in values) > len(slots):
            return
        total = 1
        for _, mod in slots:
            total *= mod
        if total > _MAX_DRAW:
            raise ValueNotKnown(f"a draw of 1 in {total} is too wide to follow")
        for number in range(total):
            rest = number
            for position, mod in slots:
                values[position] = rest % mod
                rest //= mod
            yield Fraction(1, total), tuple(value for value in values if value is not None)

    def told(self, rule: Rule, branch: Branch, point: HookPoint, table: Table) -> str:
        """The rule in brief, with the elements of sets that the packet met. To be asked before the rule acts."""
        texts = (self._told(expression, branch, point, table) for expression in rule.expressions)
        return ", ".join(filter(None, texts)) or describe_rule(rule)

    def _told(self, expression: Expression, branch: Branch, point: HookPoint, table: Table) -> str:
        text = describe(expression)
        if isinstance(expression, (InSet, MatchSet)) and not expression.negate:
            with contextlib.suppress(ValueNotKnown):
                elements, fields = self._looked_up(expression, table)
                key = self.key(fields, branch, point)
                met = elements.find(key) if elements is not None and key is not None else None
                if met is not None:
                    return f"{text} {{ {' . '.join(map(str, met))} }}"
        return text

    def _looked_up(self, e: InSet | MatchSet, table: Table) -> tuple[ElementIndex | None, Key]:
        """The set that is asked, None when it is not there, and what is looked up in it. Raises ValueNotKnown."""
        if isinstance(e, InSet):
            return self._index.elements(table, e.name), e.key
        held = self._objects.sets.get(e.name)
        if held is None:
            return None, ()
        try:
            return ipset_index(held), ipset_fields(held, e.sides)
        except ValueError as error:
            raise ValueNotKnown(str(error)) from None

    def remembered(self, name: str, key: tuple[Atom, ...], branch: Branch, seconds: float) -> bool:
        """Whether an earlier packet, or this one further up, left the key in a list."""
        if (name, key) in branch.remembers:
            return True
        return self._memory is not None and self._memory.seen(name, key, self._now, seconds)

    def _value(self, field: Field, branch: Branch, point: HookPoint) -> Atom | None:
        if field is Field.DADDR:
            return branch.daddr
        if field is Field.DPORT:
            return branch.dport if self._has_ports else None
        if field is Field.L4PROTO:
            return self._protocol[0]
        if field is Field.SADDR:
            if branch.saddr:
                return branch.saddr
            if branch.masquerade:
                raise ValueNotKnown("the source after masquerading depends on the outgoing link")
            return self.packet.source
        if field is Field.IIFNAME:
            return point.iif
        if field is Field.OIFNAME:
            if point.oif is None:
                raise ValueNotKnown("the outgoing interface is decided by routing")
            return point.oif
        packet = self.packet
        if field is Field.NFPROTO:
            return "ipv4" if self.family is IPFamily.IPV4 else "ipv6"
        if field in _ORIGINAL and not branch.tracked:
            return None
        if field is Field.ORIG_SADDR:
            return packet.source
        if field is Field.ORIG_DADDR:
            return packet.destination
        if not self._has_ports:
            return None
        if field is Field.ORIG_DPORT:
            return packet.port
        if packet.source_port and (field is Field.ORIG_SPORT or not branch.masquerade):
            return packet.source_port
        raise ValueNotKnown("the client's own port is drawn by the client")

    def _compare(self, e: Compare, branch: Branch, point: HookPoint, _table: Table) -> Answer:
        field = e.field
        if field is Field.L4PROTO:
            return any(value in self._protocol for value in e.values) is not e.negate
        try:
            value = self._value(field, branch, point)
        except ValueNotKnown as error:
            # Routing never sends a packet for elsewhere out over loopback.
            return e.negate if field is Field.OIFNAME and e.values == ("lo",) else str(error)
        if value is None:
            return _NO_PORTS if field in _PORTS else False
        if field in _ADDRESSES:
            return self._address_in(str(value), e)
        if field is Field.IIFNAME or field is Field.OIFNAME:
            return any(_interface(str(pattern), str(value)) for pattern in e.values) is not e.negate
        return (value in e.values) is not e.negate

    def _address_in(self, address: str, e: Compare) -> bool:
        found = False
        foreign = True
        for held in e.values:
            text = str(held)
            if (":" in text) is not (":" in address):
                continue
            foreign = False
            if text == address or _holds(text, address):
                found = True
                break
        # In an inet table `ip saddr != …` asks for an IPv4 packet first.
        return not foreign and found is not e.negate

    def _port_range(self, e: PortRange, branch: Branch, point: HookPoint, _table: Table) -> Answer:
        try:
            value = self._value(e.field, branch, point)
        except ValueNotKnown as error:
            return str(error)
        if not isinstance(value, int):
            return _NO_PORTS if e.field in _PORTS else False
        return (e.first <= value <= e.last) is not e.negate

    def _is_local(self, e: IsLocal, branch: Branch, _place: HookPoint, _table: Table) -> Answer:
        if e.field is Field.SADDR:
            own = self.local(branch.saddr or self.packet.source) or (branch.masquerade and not branch.saddr)
            return own is not e.negate
        return self.local(branch.daddr) is not e.negate

    def _ct_state(self, e: CtState, branch: Branch, _place: HookPoint, _table: Table) -> Answer:
        return ((self._state if branch.tracked else "untracked") in e.states) is not e.negate

    def _ct_status(self, e: CtStatus, branch: Branch, _place: HookPoint, table: Table) -> Answer:
        if not branch.tracked:
            # For iptables these are states, which an untracked packet does not have; nft has nothing to look at.
            return e.negate and table.family is not None and table.name in TABLES
        strange = [bit for bit in e.bits if bit not in _OWN_STATUS and bit not in _NEVER_ON_FIRST_PACKET]
        if strange:
            return f"connection status {strange[0]} is not known here"
        source = branch.masquerade and branch.saddr != self.packet.source
        found = ("dnat" in e.bits and branch.rewritten) or ("snat" in e.bits and source)
        return found is not e.negate

    def _tcp_reset(self, _e: TcpReset, _branch: Branch, _place: HookPoint, _table: Table) -> Answer:
        return False  # a packet that begins a connection does not end one

    def _mark_is(self, e: MarkIs, branch: Branch, _place: HookPoint, _table: Table) -> Answer:
        return (branch.mark & e.mask == e.value) is not e.negate

    def _in_set(self, e: InSet, branch: Branch, point: HookPoint, table: Table) -> Answer:
        elements = self._index.elements(table, e.name)
        if elements is None:
            return f"the set {e.name} is not there"
        if elements.set.unsupported:
            return f"the set {e.name} is not understood: {elements.set.unsupported}"
        if any(isinstance(part, Slot) for part in e.key):
            return f"a random number is looked up in the set {e.name}"
        try:
            key = self.key(e.key, branch, point)
        except ValueNotKnown as error:
            return str(error)
        if key is None:
            return False
        found = elements.find(key) is not None
        if not found and elements.set.dynamic:
            found = self.remembered(e.name, key, branch, elements.set.timeout or float("inf"))
        return found is not e.negate

    def _match_set(self, e: MatchSet, branch: Branch, point: HookPoint, table: Table) -> Answer:
        try:
            elements, fields = self._looked_up(e, table)
            if elements is None:
                return f"the ipset {e.name} is not there"
            key = self.key(fields, branch, point)
        except ValueNotKnown as error:
            return str(error)
        # The kernel's sets with ports hold no packet that has none, and such a packet is in none of them.
        return (key is not None and elements.find(key) is not None) is not e.negate

    def _by_ipvs(self, e: IpvsMatch, branch: Branch, _place: HookPoint, _table: Table) -> Answer:
        if branch.served is None:
            # What is asked of a virtual server no other packet has; "not touched" every other packet is.
            return e.negate
        address, protocol, port = branch.served
        return (
            (e.address is None or e.address == address or _holds(e.address, address))
            and e.protocol in (None, protocol.lower, str(protocol.number))
            and e.port in (None, port)
        ) is not e.negate

    def _recent(self, e: RecentCheck, branch: Branch, _place: HookPoint, _table: Table) -> Answer:
        return self.remembered(e.name, (self.packet.source,), branch, e.seconds)

    def _any_of(self, e: AnyOf, branch: Branch, point: HookPoint, table: Table) -> Answer:
        doubt = ""
        for alternative in e.alternatives:
            answer = self.all_of(alternative, branch, point, table)
            if answer is True:
                return not e.negate
            if answer is not False:
                doubt = doubt or answer
        return doubt or e.negate

    def _unknown(self, e: Unknown, _branch: Branch, _place: HookPoint, _table: Table) -> Answer:
        return f"not understood: {e.text}"


def _holds(cidr: str, address: str) -> bool:
    base, slash, bits = cidr.partition("/")
    if not slash:
        return False
    # Most rules name one address; parsing 44,000 of those for each packet would be most of a walk's time.
    if bits == ("128" if ":" in address else "32"):
        return base == address
    return contains(cidr, address)


def _interface(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
