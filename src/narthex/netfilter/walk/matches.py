"""Evaluation of matches for one packet, the first of a connection: a TCP SYN or an ICMP echo request, for instance.

An answer is True, False, or the reason why it cannot be determined. A rule does not match as soon as one of its matches is
False, even after matches that cannot be determined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from narthex.model import Host, IPFamily, Memory, Packet, contains, family_of
from narthex.netfilter import ast
from narthex.netfilter.describe import describe, describe_rule
from narthex.netfilter.walk.hashing import hashed_number
from narthex.netfilter.walk.lookup import ElementIndex, RulesetIndex, ipset_fields, ipset_index
from narthex.netfilter.walk.state import Branch, HookPoint, KernelObjects
from narthex.netfilter.xtables.values import TABLES

Answer = bool | str

_ORIGINAL = frozenset((ast.Field.ORIG_SADDR, ast.Field.ORIG_DADDR, ast.Field.ORIG_SPORT, ast.Field.ORIG_DPORT))
_PORTS = frozenset((ast.Field.SPORT, ast.Field.DPORT))
_NO_PORTS = "a packet without ports has a checksum, which is unknown, where others have them"
_ADDRESSES = frozenset((ast.Field.SADDR, ast.Field.DADDR, ast.Field.ORIG_SADDR, ast.Field.ORIG_DADDR))
_ICMP = {IPFamily.IPV4: ("icmp", 1), IPFamily.IPV6: ("icmpv6", "ipv6-icmp", 58)}
_OWN_STATUS = ("dnat", "snat")
_NEVER_ON_FIRST_PACKET = {"seen-reply", "assured", "expected", "dying", "confirmed"}
_MAX_DRAW = 100_000
_SYN = 2
_ECHO = {IPFamily.IPV4: 8, IPFamily.IPV6: 128}
_MULTICAST = {IPFamily.IPV4: "224.0.0.0/4", IPFamily.IPV6: "ff00::/8"}
_DECIDABLE_TYPES = frozenset(("local", "unicast", "broadcast", "multicast"))


class ValueNotKnown(Exception):
    """The value of a field cannot be determined. The message is the reason."""


class Matcher:
    """Evaluates matches for one packet on one host."""

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
        self._others = host.others
        self.asked_links: set[str] = set()
        """Names of links that rules compared with the unknown output link."""
        self.asked_addresses: set[str] = set()
        """Destinations of which rules asked whether they are local, and that the host may have without our knowledge."""
        self._own_in_order = host.addresses
        self._index = index
        self._memory = memory
        self._now = now
        self._objects = objects
        self._state = state
        ports = packet.protocol.value != "ICMP"
        self._protocol: tuple[ast.Atom, ...] = (
            (packet.protocol.lower, packet.protocol.number) if ports else _ICMP[self.family]
        )
        self._protocol_names = frozenset(self._protocol)
        self._has_ports = ports
        self.answers = self._answers()
        """By type of match. Every other expression is a statement or a random match."""

    def _answers(self) -> dict[type, Callable[[Any, Branch, HookPoint, ast.Table], Answer]]:
        return {
            ast.Compare: self._compare,
            ast.PortRange: self._port_range,
            ast.IsLocal: self._is_local,
            ast.CtState: self._ct_state,
            ast.CtStatus: self._ct_status,
            ast.TcpReset: self._tcp_reset,
            ast.MarkIs: self._mark_is,
            ast.InSet: self._in_set,
            ast.MatchSet: self._match_set,
            ast.IpvsMatch: self._by_ipvs,
            ast.RecentCheck: self._recent,
            ast.Unknown: self._unknown,
            ast.Undecoded: self._missing,
            ast.RuleGap: self._missing,
            ast.AnyOf: self._any_of,
            ast.AddressType: self._address_type,
            ast.TcpFlags: self._tcp_flags,
            ast.IcmpType: self._icmp_type,
            ast.ConnMarkIs: self._conn_mark_is,
            ast.CtDirection: self._ct_direction,
            ast.UndecidableMatch: self._undecidable,
        }

    def all_of(self, matches: tuple[ast.Expression, ...], branch: Branch, point: HookPoint, table: ast.Table) -> Answer:
        """Return True if all of the matches match."""
        doubt = ""
        for each in matches:
            answer = self.answers[type(each)](each, branch, point, table)
            if answer is False:
                return False
            if answer is not True:
                doubt = doubt or answer
        return doubt or True

    def local(self, address: str) -> bool:
        """Return True if the address is a local address of the host, including loopback."""
        return address in self._own or address in self._objects.bound or contains(self.family.loopback, address)

    def own_address(self, hook: str) -> str:
        """Return the destination of a redirected packet.

        For local packets it is loopback. For others it is any address of the host, since the address of the input interface
        is unknown.
        """
        known = (own for own in self._own_in_order if family_of(own) is self.family)
        loopback = "127.0.0.1" if self.family is IPFamily.IPV4 else "::1"
        return loopback if hook == "output" else next(known, loopback)

    def key(self, key: ast.Key, branch: Branch, point: HookPoint) -> tuple[ast.Atom, ...] | None:
        """Return a key without random parts, or None if the packet lacks a field. Raises ValueNotKnown."""
        return next(self.draws(key, branch, point), (Fraction(1), None))[1]

    def draws(self, key: ast.Key, branch: Branch, point: HookPoint) -> Iterator[tuple[Fraction, tuple[ast.Atom, ...]]]:
        """Yield all values of a key with their probabilities, none if the packet lacks a field. Raises ValueNotKnown."""
        if not self._has_ports and ast.Field.L4PROTO in key:
            # Other protocols have other data in place of the ports. A set that names the protocol has no such element.
            values: list[ast.Atom | None] = [-1 if part in _PORTS else self._part(part, branch, point) for part in key]
        elif not self._has_ports and not _PORTS.isdisjoint(key):
            raise ValueNotKnown(_NO_PORTS)
        else:
            values = [self._part(part, branch, point) for part in key]
        slots = [
            (position, part)
            for position, part in enumerate(key)
            if not isinstance(part, ast.Field) and values[position] is None
        ]
        if sum(value is None for value in values) > len(slots):
            return
        total = 1
        for _, part in slots:
            total *= part.mod
        if total > _MAX_DRAW:
            raise ValueNotKnown(f"a draw of 1 in {total} is too wide to follow")
        for number in range(total):
            rest = number
            for position, part in slots:
                values[position] = rest % part.mod + (part.offset if isinstance(part, ast.HashedFields) else 0)
                rest //= part.mod
            yield Fraction(1, total), tuple(value for value in values if value is not None)

    def _part(self, part: ast.KeyPart, branch: Branch, point: HookPoint) -> ast.Atom | None:
        """Return one part of a key; None if it is drawn, or if the packet lacks the field. Raises ValueNotKnown."""
        if isinstance(part, ast.HashedFields):
            return self.hashed(part, branch, point)
        return None if isinstance(part, ast.Slot) else self._value(part, branch, point)

    def hashed(self, part: ast.HashedFields, branch: Branch, point: HookPoint) -> int | None:
        """Return the number that the hash of the packet's fields selects; None if it is not known."""
        try:
            values = [self._value(field, branch, point) for field in part.fields]
        except ValueNotKnown:
            return None
        return hashed_number(part, values)

    def describe_match(self, rule: ast.Rule, branch: Branch, point: HookPoint, table: ast.Table) -> str:
        """Describe the rule with the set elements that matched. Must be called before the statements of the rule run."""
        texts = (self._describe(expression, branch, point, table) for expression in rule.expressions)
        return ", ".join(filter(None, texts)) or describe_rule(rule)

    def _describe(self, expression: ast.Expression, branch: Branch, point: HookPoint, table: ast.Table) -> str:
        text = describe(expression)
        if isinstance(expression, (ast.InSet, ast.MatchSet)) and not expression.negate:
            with contextlib.suppress(ValueNotKnown):
                elements, fields = self._lookup(expression, table)
                key = self.key(fields, branch, point)
                met = elements.find(key) if elements is not None and key is not None else None
                if met is not None:
                    return f"{text} {{ {' . '.join(map(str, met))} }}"
        return text

    def _lookup(self, e: ast.InSet | ast.MatchSet, table: ast.Table) -> tuple[ElementIndex | None, ast.Key]:
        """Return the set of a match, or None if it does not exist, and the key to look up. Raises ValueNotKnown."""
        if isinstance(e, ast.InSet):
            return self._index.elements(table, e.name), e.key
        ipset = self._objects.sets.get(e.name)
        if ipset is None:
            return None, ()
        try:
            return ipset_index(ipset), ipset_fields(ipset, e.sides)
        except ValueError as error:
            raise ValueNotKnown(str(error)) from None

    def remembered(self, name: str, key: tuple[ast.Atom, ...], branch: Branch, seconds: float) -> bool:
        """Return True if an earlier packet, or this packet in an earlier rule, added the key to a list."""
        if (name, key) in branch.remembers:
            return True
        return self._memory is not None and self._memory.seen(name, key, self._now, seconds)

    def _value(self, field: ast.Field, branch: Branch, point: HookPoint) -> ast.Atom | None:
        if field is ast.Field.DADDR:
            return branch.daddr
        if field is ast.Field.DPORT:
            return branch.dport if self._has_ports else None
        if field is ast.Field.L4PROTO:
            return self._protocol[0]
        if field is ast.Field.SADDR:
            if branch.saddr:
                return branch.saddr
            if branch.masquerade:
                raise ValueNotKnown("the source after masquerading depends on the outgoing link")
            return self.packet.source
        if field is ast.Field.IIFNAME:
            return point.iif
        if field is ast.Field.OIFNAME:
            if point.oif is None:
                raise ValueNotKnown("the outgoing interface is decided by routing")
            return point.oif
        packet = self.packet
        if field is ast.Field.NFPROTO:
            return "ipv4" if self.family is IPFamily.IPV4 else "ipv6"
        if field in _ORIGINAL and not branch.tracked:
            return None
        if field is ast.Field.ORIG_SADDR:
            return packet.source
        if field is ast.Field.ORIG_DADDR:
            return packet.destination
        if not self._has_ports:
            return None
        if field is ast.Field.ORIG_DPORT:
            return packet.port
        if packet.source_port and (field is ast.Field.ORIG_SPORT or not branch.masquerade):
            return packet.source_port
        raise ValueNotKnown("the client's own port is drawn by the client")

    def _compare(self, e: ast.Compare, branch: Branch, point: HookPoint, _table: ast.Table) -> Answer:
        field = e.field
        if field is ast.Field.L4PROTO:
            return self._protocol_names.isdisjoint(e.values) is e.negate
        try:
            value = self._value(field, branch, point)
        except ValueNotKnown as error:
            # Routing never sends a packet for another host to loopback.
            if field is ast.Field.OIFNAME and e.values == ("lo",):
                return e.negate
            if field is ast.Field.OIFNAME:
                self.asked_links.update(map(str, e.values))
            if field is ast.Field.SADDR and point.iif == "lo":
                # Over loopback, the new source is an address of this node.
                own = (each for each in self._own if family_of(each) is self.family)
                answers = {self._address_in(each, e) for each in own}
                if len(answers) == 1:
                    return answers.pop()
            return str(error)
        if value is None:
            return _NO_PORTS if field in _PORTS else False
        if field in _ADDRESSES:
            return self._address_in(str(value), e)
        if field is ast.Field.IIFNAME or field is ast.Field.OIFNAME:
            return any(_interface(str(pattern), str(value)) for pattern in e.values) is not e.negate
        return (value in e.values) is not e.negate

    def _address_in(self, address: str, e: ast.Compare) -> bool:
        found = False
        other_family = True
        for value in e.values:
            text = str(value)
            if (":" in text) is not (":" in address):
                continue
            other_family = False
            if text == address or _contains(text, address):
                found = True
                break
        # In an inet table `ip saddr != …` first requires an IPv4 packet.
        return not other_family and found is not e.negate

    def _port_range(self, e: ast.PortRange, branch: Branch, point: HookPoint, _table: ast.Table) -> Answer:
        try:
            value = self._value(e.field, branch, point)
        except ValueNotKnown as error:
            return str(error)
        if not isinstance(value, int):
            return _NO_PORTS if e.field in _PORTS else False
        return (e.first <= value <= e.last) is not e.negate

    def _is_local(self, e: ast.IsLocal, branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        if e.field is ast.Field.SADDR:
            own = self.local(branch.saddr or self.packet.source) or (branch.masquerade and not branch.saddr)
            return own is not e.negate
        return self._asked_local(branch.daddr) is not e.negate

    def _asked_local(self, address: str) -> bool:
        """Return True if a destination is local, and record the question if it may be so without our knowledge."""
        if self.local(address):
            return True
        if self._others:
            self.asked_addresses.add(address)
        return False

    def _address_type(self, e: ast.AddressType, branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        """Evaluate the route type of an address as far as it follows from the address alone."""
        address = branch.daddr if e.field is ast.Field.DADDR else branch.saddr or self.packet.source
        is_own = self._asked_local if e.field is ast.Field.DADDR else self.local
        if (e.field is ast.Field.SADDR and branch.masquerade and not branch.saddr) or is_own(address):
            kind = "local"
        elif contains(_MULTICAST[self.family], address):
            kind = "multicast"
        elif address == "255.255.255.255":
            kind = "broadcast"
        elif self.family is IPFamily.IPV4 and address.endswith((".255", ".0")):
            # Possibly the broadcast address of a network of the host, which is unknown.
            requested = {"unicast", "broadcast"}
            if requested <= set(e.types):
                return not e.negate
            if requested.isdisjoint(e.types) and _DECIDABLE_TYPES.issuperset(e.types):
                return e.negate
            return f"whether {address} is a broadcast address depends on the routes"
        else:
            kind = "unicast"
        if kind in e.types:
            return not e.negate
        unknown = [word for word in e.types if word not in _DECIDABLE_TYPES]
        if unknown and kind == "unicast":
            return f"whether the route to {address} is of type {unknown[0]} depends on the routes"
        return e.negate

    def _tcp_flags(self, e: ast.TcpFlags, _branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        """Evaluate the flags of a SYN packet, which may also have the congestion bits (ECE, CWR)."""
        if self.packet.protocol.value != "TCP":
            return False
        if e.mask & 0xC0:
            return "whether the first packet asks for congestion notification is the client's choice"
        return (_SYN & e.mask == e.value) is not e.negate

    def _icmp_type(self, e: ast.IcmpType, _branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        """Evaluate the type of an echo request."""
        if self.packet.protocol.value != "ICMP":
            return False
        found = _ECHO[self.family] in e.types and (e.codes is None or e.codes[0] <= 0 <= e.codes[1])
        return found is not e.negate

    def _conn_mark_is(self, e: ast.ConnMarkIs, branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        """Evaluate the connection mark. It is 0 until a rule sets it, and an untracked packet has none."""
        return branch.tracked and (branch.connection_mark & e.mask == e.value) is not e.negate

    def _ct_direction(self, e: ast.CtDirection, branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        """Evaluate the direction. The first packet has the original one."""
        return branch.tracked and e.original

    def _undecidable(self, e: ast.UndecidableMatch, _branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        """Return False for packets that cannot have the property, else that it is unknown."""
        if not (e.sent_locally if self.packet.from_host else e.forwarded):
            return False
        return f"depends on {e.about}: {e.text}"

    def _ct_state(self, e: ast.CtState, branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        return ((self._state if branch.tracked else "untracked") in e.states) is not e.negate

    def _ct_status(self, e: ast.CtStatus, branch: Branch, _place: HookPoint, table: ast.Table) -> Answer:
        if not branch.tracked:
            # For iptables these are states, which an untracked packet does not have. For nft the match fails.
            return e.negate and table.family is not None and table.name in TABLES
        unknown = [bit for bit in e.bits if bit not in _OWN_STATUS and bit not in _NEVER_ON_FIRST_PACKET]
        if unknown:
            return f"connection status {unknown[0]} is unknown here"
        source = branch.masquerade and branch.saddr != self.packet.source
        found = ("dnat" in e.bits and branch.rewritten) or ("snat" in e.bits and source)
        return found is not e.negate

    def _tcp_reset(self, _e: ast.TcpReset, _branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        return False  # the first packet of a connection is not a reset

    def _mark_is(self, e: ast.MarkIs, branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        return (branch.mark & e.mask == e.value) is not e.negate

    def _in_set(self, e: ast.InSet, branch: Branch, point: HookPoint, table: ast.Table) -> Answer:
        elements = self._index.elements(table, e.name)
        if elements is None:
            return f"the set {e.name} is not in the input"
        if elements.set.unsupported:
            return f"the set {e.name} is not understood: {elements.set.unsupported}"
        if not all(isinstance(part, ast.Field) for part in e.key):
            return f"a random number or a hash is looked up in the set {e.name}"
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

    def _match_set(self, e: ast.MatchSet, branch: Branch, point: HookPoint, table: ast.Table) -> Answer:
        try:
            elements, fields = self._lookup(e, table)
            if elements is None:
                return f"the ipset {e.name} is not in the input"
            key = self.key(fields, branch, point)
        except ValueNotKnown as error:
            return str(error)
        # A packet without ports is in none of the kernel's sets with ports.
        return (key is not None and elements.find(key) is not None) is not e.negate

    def _by_ipvs(self, e: ast.IpvsMatch, branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        if branch.served is None:
            # A packet that IPVS has not handled has no properties of a virtual server.
            return e.negate
        address, protocol, port = branch.served
        return (
            (e.address is None or e.address == address or _contains(e.address, address))
            and e.protocol in (None, protocol.lower, str(protocol.number))
            and e.port in (None, port)
        ) is not e.negate

    def _recent(self, e: ast.RecentCheck, branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        return self.remembered(e.name, (self.packet.source,), branch, e.seconds)

    def _any_of(self, e: ast.AnyOf, branch: Branch, point: HookPoint, table: ast.Table) -> Answer:
        doubt = ""
        for alternative in e.alternatives:
            answer = self.all_of(alternative, branch, point, table)
            if answer is True:
                return not e.negate
            if answer is not False:
                doubt = doubt or answer
        return doubt or e.negate

    def _unknown(self, e: ast.Unknown, _branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        return f"not understood: {e.text}"

    @staticmethod
    def _missing(e: ast.Undecoded | ast.RuleGap, _branch: Branch, _place: HookPoint, _table: ast.Table) -> Answer:
        return e.text


def _contains(cidr: str, address: str) -> bool:
    base, slash, bits = cidr.partition("/")
    if not slash:
        return False
    # Most rules name one address. Parsing 44,000 of them for each packet would dominate a walk.
    if bits == ("128" if ":" in address else "32"):
        return base == address
    return contains(cidr, address)


def _interface(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
