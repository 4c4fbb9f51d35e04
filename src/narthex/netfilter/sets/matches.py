"""Evaluation of matches for sets of packets: each match splits a branch, exactly.

The answers mean what those of `narthex.netfilter.walk.matches` mean for each packet of the part. A match that has no exact set
answers with the reason, for the part of the packets whose other matches hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narthex.model import Host, IPFamily
from narthex.netfilter import ast
from narthex.netfilter.sets.asked import ORIGINAL
from narthex.netfilter.sets.branch import SetBranch, WalkPoint
from narthex.netfilter.sets.index import BoxIndex
from narthex.netfilter.sets.space import (
    DADDR,
    DPORT,
    HERE,
    LINK,
    PORTS,
    PROTOCOL,
    SADDR,
    SPORT,
    NotInterpreted,
    PacketSpace,
)
from narthex.netfilter.sets.values import ValueSet, span, union, values
from narthex.netfilter.walk.lookup import RulesetIndex, ipset_fields, ipset_index
from narthex.netfilter.walk.state import KernelObjects
from narthex.netfilter.xtables.values import TABLES

Answer = bool | str
Parts = list[tuple[Answer, SetBranch]]
SlotParts = list[tuple[ValueSet | None, tuple[Any, ...], SetBranch]]
"""For each part: the slots it draws, None without a slot; the data of the elements it meets, none on a miss; the branch."""

_FIELDS = {
    ast.Field.DADDR: DADDR,
    ast.Field.DPORT: DPORT,
    ast.Field.SADDR: SADDR,
    ast.Field.SPORT: SPORT,
    ast.Field.L4PROTO: PROTOCOL,
    ast.Field.ORIG_DADDR: DADDR,
    ast.Field.ORIG_DPORT: DPORT,
    ast.Field.ORIG_SADDR: SADDR,
    ast.Field.ORIG_SPORT: SPORT,
    ast.Field.IIFNAME: LINK,
}
_PORTS = frozenset((ast.Field.SPORT, ast.Field.DPORT, ast.Field.ORIG_SPORT, ast.Field.ORIG_DPORT))
_VAGUE = "which address of the node a redirected packet gets depends on its link of arrival"
_NO_PORTS = "a packet without ports has other data where others have them"
_SYN = 2
_ICMP = {IPFamily.IPV4: 1, IPFamily.IPV6: 58}
_ECHO = {IPFamily.IPV4: 8, IPFamily.IPV6: 128}
_MULTICAST = {IPFamily.IPV4: "224.0.0.0/4", IPFamily.IPV6: "ff00::/8"}
_DECIDABLE_TYPES = frozenset(("local", "unicast", "broadcast", "multicast"))
_NEVER_ON_FIRST_PACKET = frozenset(("seen-reply", "assured", "expected", "dying", "confirmed"))
_MOST_SLOTS = 1 << 20


class SetMatcher:
    """Evaluates matches for sets of packets on one host. Connections are new, and tables have no state but free choices."""

    def __init__(self, space: PacketSpace, index: RulesetIndex, objects: KernelObjects) -> None:
        self._space = space
        self._index = index
        self._ipsets = objects.sets
        self._sets: dict[int, tuple[ast.Expression, ValueSet]] = {}
        self._elements: dict[tuple[int, ast.Key, tuple[int, ...]], tuple[ast.Set, BoxIndex[Any]]] = {}
        self._unread: dict[tuple[int, ast.Key], str] = {}
        self._multicast = space.network(_MULTICAST[space.family])
        self._broadcast = space.network("255.255.255.255")
        self.answers: dict[type, Callable[[Any, SetBranch, WalkPoint, ast.Table], Parts]] = {
            ast.Compare: self._compare,
            ast.PortRange: self._port_range,
            ast.IsLocal: self._is_local,
            ast.AddressType: self._address_type,
            ast.TcpReset: self._tcp_reset,
            ast.TcpFlags: self._tcp_flags,
            ast.IcmpType: self._icmp_type,
            ast.CtState: self._ct_state,
            ast.CtStatus: self._ct_status,
            ast.CtDirection: self._ct_direction,
            ast.MarkIs: self._mark_is,
            ast.ConnMarkIs: self._conn_mark_is,
            ast.InSet: self._in_set,
            ast.RecentCheck: self._recent,
            ast.AnyOf: self._any_of,
            ast.IpvsMatch: self._by_ipvs,
            ast.MatchSet: self._match_set,
            ast.UndecidableMatch: self._undecidable,
            ast.OmittedMatch: self._text,
            ast.Assumed: self._text,
            ast.Unknown: self._unknown,
            ast.Undecoded: self._text,
            ast.RuleGap: self._text,
        }
        """By type of match. All other expressions are statements or random."""

    def forget(self) -> None:
        """Drop what is known of packets that were looked up."""
        for _, index in self._elements.values():
            index.forget()

    @property
    def host(self) -> Host:
        """The node."""
        return self._space.host

    # ---- fields ----------------------------------------------------------------------------------------------------------------

    def _field(self, field: ast.Field, branch: SetBranch) -> tuple[ValueSet, int | None]:
        """Return the values of a field, and the field of the box that has them: None if rules set it. Raises NotInterpreted."""
        if field is ast.Field.DADDR and branch.daddr is not None:
            return branch.daddr, None
        if field is ast.Field.DPORT and branch.dport is not None:
            return branch.dport, None
        if field is ast.Field.SADDR:
            if branch.saddr is not None:
                return branch.saddr, None
            if branch.masquerade:
                raise NotInterpreted("the source after masquerading depends on the outgoing link")
        if field is ast.Field.SPORT and branch.masquerade:
            raise NotInterpreted("the kernel draws the source port after masquerading")
        at = _FIELDS.get(field)
        if at is None:
            raise NotInterpreted(f"{field.value} is not interpreted")
        return branch.box[at], at

    def _select(self, branch: SetBranch, have: ValueSet, at: int | None, desired: ValueSet, negate: bool) -> Parts:
        """Split a branch by the values of a field."""
        inside = have & desired
        if not inside.size:
            return [(negate, branch)]
        if inside.size == have.size:
            return [(not negate, branch)]
        if at is None:
            return [(_VAGUE, branch)]
        return [(not negate, branch.within(at, inside)), (negate, branch.within(at, have - desired))]

    def _with_ports(self, branch: SetBranch) -> tuple[SetBranch | None, SetBranch | None]:
        """Split a branch into packets with and without ports."""
        have = branch.box[PROTOCOL]
        inside = have & PORTS
        if not inside.size:
            return None, branch
        if inside.size == have.size:
            return branch, None
        return branch.within(PROTOCOL, inside), branch.within(PROTOCOL, have - PORTS)

    def _desired(self, e: ast.Compare | ast.PortRange) -> ValueSet:
        known = self._sets.get(id(e))
        if known is None:
            if isinstance(e, ast.PortRange):
                made = span(e.first, e.last)
            else:
                made = union(self._space.field_values(e.field, value) for value in e.values)
            known = self._sets[id(e)] = e, made
        return known[1]

    def _compare(self, e: ast.Compare, branch: SetBranch, point: WalkPoint, _table: ast.Table) -> Parts:
        field = e.field
        try:
            if field is ast.Field.IIFNAME:
                return self._iif(e, branch, point)
            if field is ast.Field.OIFNAME:
                return self._oif(e, branch, point)
            if field is ast.Field.NFPROTO:
                own = "ipv4" if self._space.family is IPFamily.IPV4 else "ipv6"
                return [((own in e.values) is not e.negate, branch)]
            if field in _PORTS:
                return self._ports(e, branch)
            if field in ORIGINAL and not branch.tracked:
                return [(False, branch)]
            desired = self._desired(e)
            if field is ast.Field.SADDR and point.iif == "lo" and branch.masquerade and branch.saddr is None:
                have, at = self._space.node, None  # over loopback, the new source is an address of this node
            else:
                have, at = self._field(field, branch)
            if e.negate and not desired and field is not ast.Field.L4PROTO:
                return [(False, branch)]  # in an inet table, a negated address of the other family never matches
            return self._select(branch, have, at, desired, e.negate)
        except NotInterpreted as error:
            return [(str(error), branch)]

    def _ports(self, e: ast.Compare | ast.PortRange, branch: SetBranch) -> Parts:
        if e.field in ORIGINAL and not branch.tracked:
            return [(False, branch)]
        with_ports, without = self._with_ports(branch)
        found: Parts = [] if without is None else [(_NO_PORTS, without)]
        if with_ports is not None:
            have, at = self._field(e.field, with_ports)
            found += self._select(with_ports, have, at, self._desired(e), e.negate)
        return found

    def _port_range(self, e: ast.PortRange, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        try:
            return self._ports(e, branch)
        except NotInterpreted as error:
            return [(str(error), branch)]

    def _iif(self, e: ast.Compare, branch: SetBranch, point: WalkPoint) -> Parts:
        if point.iif is not None:
            return [(any(_named(str(each), point.iif) for each in e.values) is not e.negate, branch)]
        return self._select(branch, branch.box[LINK], LINK, self._desired(e), e.negate)

    def _oif(self, e: ast.Compare, branch: SetBranch, point: WalkPoint) -> Parts:
        if point.oif is not None:
            return [(any(_named(str(each), point.oif) for each in e.values) is not e.negate, branch)]
        if e.values == ("lo",):
            return [(e.negate, branch)]  # routing never sends a packet for another host to loopback
        return [("the outgoing link is decided by routing", branch)]

    # ---- addresses of the host -----------------------------------------------------------------------------------------------

    def _is_local(self, e: ast.IsLocal, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        if e.field is ast.Field.SADDR and branch.masquerade and branch.saddr is None:
            return [(not e.negate, branch)]
        have, at = self._field(e.field, branch)
        return self._select(branch, have, at, self._space.local, e.negate)

    def _address_type(self, e: ast.AddressType, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        """Split by route type, as far as it follows from the address alone."""
        if e.field is ast.Field.SADDR and branch.masquerade and branch.saddr is None:
            return [(("local" in e.types) is not e.negate, branch)]
        have, at = self._field(e.field, branch)
        found: Parts = []
        local = self._space.local
        multicast = self._multicast - local
        broadcast = self._broadcast - local
        for kind, members in (("local", local), ("multicast", multicast), ("broadcast", broadcast)):
            part = have & members
            if part.size:
                inside = branch if at is None or part.size == have.size else branch.within(at, part)
                found.append(((kind in e.types) is not e.negate, inside))
        rest = have - union((local, multicast, broadcast))
        if rest.size:
            outside = branch if at is None or rest.size == have.size else branch.within(at, rest)
            found.append((self._unicast(e), outside))
        return found

    def _unicast(self, e: ast.AddressType) -> Answer:
        types = set(e.types)
        other = sorted(types - _DECIDABLE_TYPES)
        if self._space.family is IPFamily.IPV4 and ("unicast" in types) is not ("broadcast" in types):
            return "whether an address is a broadcast address depends on the routes"
        if "unicast" in types:
            return not e.negate
        return f"whether a route is of type {other[0]} depends on the routes" if other else e.negate

    # ---- headers of protocols ------------------------------------------------------------------------------------------------

    def _tcp_reset(self, _e: ast.TcpReset, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        return [(False, branch)]  # the first packet of a connection is not a reset

    def _tcp_flags(self, e: ast.TcpFlags, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        answer: Answer = (_SYN & e.mask == e.value) is not e.negate
        if e.mask & 0xC0:
            answer = "whether the first packet asks for congestion notification is the client's choice"
        parts = self._select(branch, branch.box[PROTOCOL], PROTOCOL, _TCP, False)
        return [(answer if inside else False, part) for inside, part in parts]

    def _icmp_type(self, e: ast.IcmpType, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        echo = _ECHO[self._space.family] in e.types and (e.codes is None or e.codes[0] <= 0 <= e.codes[1])
        parts = self._select(branch, branch.box[PROTOCOL], PROTOCOL, values(_ICMP[self._space.family]), False)
        return [(echo is not e.negate if inside else False, part) for inside, part in parts]

    # ---- connections and marks -----------------------------------------------------------------------------------------------

    def _ct_state(self, e: ast.CtState, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        return [((("new" if branch.tracked else "untracked") in e.states) is not e.negate, branch)]

    def _ct_status(self, e: ast.CtStatus, branch: SetBranch, _point: WalkPoint, table: ast.Table) -> Parts:
        if not branch.tracked:
            return [(e.negate and table.family is not None and table.name in TABLES, branch)]
        unknown = [bit for bit in e.bits if bit not in ("dnat", "snat") and bit not in _NEVER_ON_FIRST_PACKET]
        if unknown:
            return [(f"connection status {unknown[0]} is unknown here", branch)]
        if "snat" in e.bits and branch.masquerade:
            return [("whether the source differs depends on the outgoing link", branch)]
        return [(("dnat" in e.bits and branch.rewritten) is not e.negate, branch)]

    def _ct_direction(self, e: ast.CtDirection, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        return [(branch.tracked and e.original, branch)]

    def _mark_is(self, e: ast.MarkIs, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        return [((branch.mark & e.mask == e.value) is not e.negate, branch)]

    def _conn_mark_is(self, e: ast.ConnMarkIs, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        return [(branch.tracked and (branch.connection_mark & e.mask == e.value) is not e.negate, branch)]

    # ---- sets ------------------------------------------------------------------------------------------------------------------

    def look_up(self, key: ast.Key, name: str, branch: SetBranch, point: WalkPoint, table: ast.Table) -> SlotParts:
        """Split a branch along the elements of a set or map. Raises NotInterpreted."""
        held = self._index.elements(table, name)
        if held is None or held.set.unsupported:
            why = held.set.unsupported if held is not None else "it is not in the input"
            raise NotInterpreted(f"the set {name} of table {table.name}: {why}")
        if ast.Field.IIFNAME in key and point.iif is not None:
            raise NotInterpreted(f"the set {name}: packets over loopback are not looked up by link")
        return self._met(key, held.set, branch)

    def _met(self, key: ast.Key, held: ast.Set, branch: SetBranch) -> SlotParts:
        if _PORTS.isdisjoint(key):
            return self._meet(key, held, branch)
        with_ports, without = self._with_ports(branch)
        if without is not None and ast.Field.L4PROTO not in key:
            raise NotInterpreted(_NO_PORTS)
        # A set that names the protocol has no element for one without ports.
        missing: SlotParts = [] if without is None else [(None, (), without)]
        return missing if with_ports is None else missing + self._meet(key, held, with_ports)

    def _meet(self, key: ast.Key, held: ast.Set, branch: SetBranch) -> SlotParts:
        have: list[ValueSet] = []
        places: list[int | None] = []
        slot: int | None = None
        for position, part in enumerate(key):
            if isinstance(part, ast.Slot):
                if slot is not None or part.mod > _MOST_SLOTS:
                    raise NotInterpreted(f"the random numbers in the key of {held.name} are not interpreted")
                slot = position
                have.append(span(0, part.mod - 1))
                places.append(None)
                continue
            if isinstance(part, ast.HashedFields):
                raise NotInterpreted(
                    f"a hash of the packet selects the element of {held.name}, which splits no set of packets"
                )
            value, at = self._field(part, branch)
            have.append(value)
            places.append(at)
        # Fields with one value come first: they are found by hash, whatever the others are. The others are split in the order of
        # diagrams, so that a set of pairs leaves as few boxes as possible there.
        order = tuple(sorted(range(len(key)), key=lambda at: (at == slot, have[at].size != 1, places[at] or 0)))
        found: SlotParts = []
        box = branch.box
        for narrowed, data in self._box_index(key, held, order).split(tuple(have)):
            smaller = box
            for number, at in enumerate(places):
                if narrowed[number] is have[number] or number == slot:
                    continue
                if at is None:
                    raise NotInterpreted(_VAGUE)
                smaller = (*smaller[:at], narrowed[number] & smaller[at], *smaller[at + 1 :])
            found.append((narrowed[slot] if slot is not None else None, data, branch.part(smaller)))
        return found

    def _box_index(self, key: ast.Key, held: ast.Set, order: tuple[int, ...]) -> BoxIndex[Any]:
        known = self._elements.get((id(held), key, order))
        if known is not None:
            return known[1]
        boxes = []
        for element, data in held.elements.items():
            if len(element) != len(key):
                raise NotInterpreted(f"the set {held.name}: an element has {len(element)} parts, its key {len(key)}")
            boxes.append((tuple(map(self._component, key, element)), data))
        if held.interval:  # as `walk.lookup`: of overlapping elements the most specific one counts
            boxes.sort(key=lambda pair: [part.size for part in pair[0]])
        made: BoxIndex[Any] = BoxIndex(boxes, order)
        self._elements[id(held), key, order] = held, made
        return made

    def _component(self, part: ast.KeyPart, atom: ast.Atom) -> ValueSet:
        if isinstance(part, ast.Slot):
            return self._space.port(atom) if isinstance(atom, str) else values(atom)
        if isinstance(part, ast.HashedFields):
            raise NotInterpreted("a hash of the packet in a key is not interpreted")
        return self._space.field_values(part, atom)

    def _in_set(self, e: ast.InSet, branch: SetBranch, point: WalkPoint, table: ast.Table) -> Parts:
        if not all(isinstance(part, ast.Field) for part in e.key):
            return [(f"a random number or a hash is looked up in the set {e.name}", branch)]
        try:
            parts = self.look_up(e.key, e.name, branch, point, table)
        except NotInterpreted as error:
            return [(str(error), branch)]
        held = table.sets[e.name]
        found: Parts = []
        for _, data, part in parts:
            if data or not held.dynamic:
                found.append((bool(data) is not e.negate, part))
            else:
                found += self._remembered(list_name(e.name, e.key), held.timeout or None, part, e.negate)
        return found

    def _match_set(self, e: ast.MatchSet, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        """Split a branch along an ipset."""
        ipset = self._ipsets.get(e.name)
        if ipset is None:
            return [(f"the ipset {e.name} is not in the input", branch)]
        try:
            parts = self._met(ipset_fields(ipset, e.sides), ipset_index(ipset).set, branch)
        except (NotInterpreted, ValueError) as error:
            return [(f"the ipset {e.name}: {error}", branch)]
        return [(bool(data) is not e.negate, part) for _, data, part in parts]

    def _recent(self, e: ast.RecentCheck, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        return self._remembered(e.name, e.seconds, branch, False)

    @staticmethod
    def _remembered(name: str, seconds: int | None, branch: SetBranch, negate: bool) -> Parts:
        """Split a branch by whether a list has the packet: a free choice, unless it was added by this packet."""
        if name in branch.remembers:
            return [(not negate, branch)]
        choice = choice_name(name, seconds)
        for taken in (True, False):
            if (choice, taken) in branch.choices:
                return [(taken is not negate, branch)]
        return [(not negate, branch.choosing((choice, True))), (negate, branch.choosing((choice, False)))]

    # ---- the others ------------------------------------------------------------------------------------------------------------

    def _any_of(self, e: ast.AnyOf, branch: SetBranch, point: WalkPoint, table: ast.Table) -> Parts:
        found: Parts = []
        left: list[tuple[str, SetBranch]] = [("", branch)]
        for alternative in e.alternatives:
            still: list[tuple[str, SetBranch]] = []
            for doubt, part in left:
                for answer, smaller in self.all_of(alternative, part, point, table):
                    if answer is True:
                        found.append((not e.negate, smaller))
                    else:
                        still.append((doubt or (answer or ""), smaller))
            left = still
        return found + [(doubt or e.negate, part) for doubt, part in left]

    def all_of(
        self, matches: tuple[ast.Expression, ...], branch: SetBranch, point: WalkPoint, table: ast.Table
    ) -> Parts:
        """Split a branch by whether all of the matches hold."""
        found: Parts = []
        left: list[tuple[str, SetBranch]] = [("", branch)]
        for each in matches:
            still: list[tuple[str, SetBranch]] = []
            for doubt, part in left:
                for answer, smaller in self.answers[type(each)](each, part, point, table):
                    if answer is False:
                        found.append((False, smaller))
                    else:
                        still.append((doubt or ("" if answer is True else answer), smaller))
            left = still
        return found + [(doubt or True, part) for doubt, part in left]

    def _by_ipvs(self, e: ast.IpvsMatch, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        if branch.served and not (e.address is None and e.protocol is None and e.port is None):
            return [("which virtual server has forwarded the packet is not interpreted", branch)]
        return [(branch.served is not e.negate, branch)]

    def _undecidable(self, e: ast.UndecidableMatch, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        parts = self._select(branch, branch.box[LINK], LINK, HERE, False)
        about = f"depends on {e.about}: {e.text}"
        return [(about if (e.sent_locally if here else e.forwarded) else False, part) for here, part in parts]

    def _unknown(self, e: ast.Unknown, branch: SetBranch, _point: WalkPoint, _table: ast.Table) -> Parts:
        return [(f"not understood: {e.text}", branch)]

    def _text(
        self,
        e: ast.Undecoded | ast.RuleGap | ast.OmittedMatch | ast.Assumed,
        branch: SetBranch,
        _point: WalkPoint,
        _table: ast.Table,
    ) -> Parts:
        return [(e.text, branch)]


_TCP = values(6)


def list_name(name: str, key: ast.Key) -> str:
    """Return the name of an affinity list; a list that doesn't go by the source alone has its key in the name."""
    if key == (ast.Field.SADDR,):
        return name
    return f"{name} by {' . '.join(part.value if isinstance(part, ast.Field) else 'numgen' for part in key)}"


def choice_name(name: str, seconds: int | None) -> str:
    """Return the name of the free choice whether a list has the sender."""
    return name if seconds is None else f"{name} within {seconds} s"


def _named(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
