"""Which packets an edit of rules touches, and the part of the rules that some packets can meet.

What a packet meets on its way is decided by its header: each rule and each element that it meets lets through its destination address,
protocol, and port, as they are at that point. A packet is touched by an edit only if, on its way through the new rules, it arrives at a
chain or set that the edit changed with a header that one of the added or removed rules or elements lets through. All other packets
meet exactly what they met before, step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from narthex.netfilter import ast
from narthex.netfilter.sets.conditions import conditions, named_by
from narthex.netfilter.sets.space import DADDR, DPORT, PROTOCOL, NotInterpreted, PacketSpace
from narthex.netfilter.sets.tracked import TouchedRules, TrackedTable
from narthex.netfilter.sets.tracked_set import Elements, TrackedSet
from narthex.netfilter.sets.values import EMPTY, ValueSet, union, values

Header = tuple[ValueSet, ValueSet, ValueSet]
"""Destination address, protocol, and destination port, as they are at some point of a packet's way."""

Tables = Mapping[str, TrackedTable]

_FIELDS = {ast.Field.DADDR: DADDR, ast.Field.L4PROTO: PROTOCOL, ast.Field.DPORT: DPORT}
_MOST = 64
"""Headers by which a chain is entered that are distinguished."""


def meet(one: Header, other: Header) -> Header | None:
    """Return the headers that are in both."""
    found = one[0] & other[0], one[1] & other[1], one[2] & other[2]
    return found if all(found) else None


class RuleReach:
    """Reports by which headers the chains and sets of one version of the rules are reached."""

    def __init__(self, tables: Tables, space: PacketSpace) -> None:
        self.tables = tables
        self.space = space
        self.whole: Header = (space.whole[DADDR], space.whole[PROTOCOL], space.whole[DPORT])
        self._entries: dict[tuple[str, str], list[Header] | None] = {}
        """None while a chain's callers are visited."""

    def touched(self, changes: Mapping[str, TouchedRules]) -> list[Header] | None:
        """Return the headers that edits touch, by table; None: any."""
        found: list[Header] = []
        for name, touched in changes.items():
            if touched.everything:
                return None
            table = self.tables[name]
            for chain, rules in touched.chains.items():
                found += self._by_chain(table, chain, rules)
            for held in touched.sets:
                found += self.by_set(table, held)
            for held, keys in touched.elements.items():
                if held in table.sets:
                    entries = self.by_set(table, held)
                    boxes = [self._element(table.sets[held].declared.key, key) for key in keys]
                    found += self._narrowed(boxes, entries)
            if any(self._is_whole(each) for each in found):
                return None
        return list(dict.fromkeys(found))

    def _is_whole(self, header: Header) -> bool:
        return header[0].size == self.whole[0].size

    def _by_chain(self, table: TrackedTable, chain: str, rules: tuple[ast.Rule, ...] | None) -> list[Header]:
        if rules is not None and not rules:
            return []
        entries = self.by_chain(table, chain)
        if rules is None:
            return entries
        return [each for rule in rules for each in self._narrowed(self._rule(table, rule), entries)]

    def _narrowed(self, boxes: list[Header], entries: list[Header]) -> list[Header]:
        """Return the parts of boxes by which a chain or set is reached; a box of few addresses is a part by itself."""
        found: list[Header] = []
        for box in boxes:
            if box[0].size == 1:
                found.append(box)
            else:
                found += [part for entry in entries if (part := meet(box, entry)) is not None]
        return found

    # ---- how chains and sets are reached ---------------------------------------------------------------------------------------

    def by_set(self, table: TrackedTable, name: str) -> list[Header]:
        """Return the headers by which a set or map is looked up, at least."""
        users = table.users.get(name, ())
        if len(users) > _MOST:
            return [self.whole]
        return self._few([each for user in users for each in self.by_chain(table, user)])

    def by_chain(self, table: TrackedTable, chain: str) -> list[Header]:
        """Return the headers by which a chain is entered, at least."""
        if chain in table.hooks:
            return [self.whole]
        known = table.name, chain
        if known in self._entries:
            return self._entries[known] or ([self.whole] if self._entries[known] is None else [])
        self._entries[known] = None
        found = self._entries[known] = self._few(list(self._callers(table, chain)))
        return found

    def _callers(self, table: TrackedTable, chain: str) -> Iterator[Header]:
        callers, maps = table.callers.get(chain, ()), table.through.get(chain, ())
        if len(callers) > _MOST or len(maps) > _MOST:
            yield self.whole
            return
        for caller in callers:
            rules = table.calling(caller, chain)
            boxes = [self.whole] if len(rules) > _MOST else [box for each in rules for box in self._rule(table, each)]
            entries = self.by_chain(table, caller)
            yield from (part for box in boxes for entry in entries if (part := meet(box, entry)) is not None)
        for name in maps:
            held = table.sets[name]
            keys = held.targets[chain]
            boxes = [self.whole] if len(keys) > _MOST else [self._element(held.declared.key, key) for key in keys]
            entries = self.by_set(table, name)
            yield from (part for box in boxes for entry in entries if (part := meet(box, entry)) is not None)

    def _few(self, headers: list[Header]) -> list[Header]:
        found = list(dict.fromkeys(headers))
        if self.whole in found:
            return [self.whole]
        if len(found) <= _MOST:
            return found
        return [(union(each[0] for each in found), self.whole[1], self.whole[2])]

    # ---- what rules and elements let through -----------------------------------------------------------------------------------

    def _rule(self, table: TrackedTable, rule: ast.Rule) -> list[Header]:
        """Return the headers that meet the matches of a rule, at least."""
        found = [self.whole]
        for each in conditions(rule):
            boxes = self._condition(table, each)
            if boxes is not None:
                found = [part for one in found for other in boxes if (part := meet(one, other)) is not None]
                if len(found) > _MOST:
                    return [self.whole]
        return found

    def _condition(self, table: TrackedTable, e: ast.Expression) -> list[Header] | None:
        """Return the headers that meet a match; None if it says nothing of them."""
        if isinstance(e, ast.IsLocal) and e.field is ast.Field.DADDR and not e.negate:
            return [(self.space.own, self.whole[1], self.whole[2])]
        if isinstance(e, ast.InSet) and not e.negate:
            held = table.sets.get(e.name)
            if held is None or held.declared.dynamic or held.rest or len(held.buckets) > _MOST:
                return None
            elements = held.elements()
            return [self._element(held.declared.key, key) for key in elements] if len(elements) <= _MOST else None
        if isinstance(e, ast.Compare) and not e.negate and e.field in _FIELDS:
            try:
                part = union(self.space.field_values(e.field, value) for value in e.values)
            except NotInterpreted:
                return None
            return [self._box(e.field, part)]
        return None

    def _box(self, field: ast.Field, part: ValueSet) -> Header:
        at = _FIELDS[field]
        return (*self.whole[:at], part, *self.whole[at + 1 :])  # type: ignore[return-value]

    def _element(self, key: ast.Key, element: ast.ElementKey) -> Header:
        found = self.whole
        for part, atom in zip(key, element, strict=False):
            if isinstance(part, ast.Field) and part in _FIELDS:
                try:
                    box = self._box(part, self.space.field_values(part, atom))
                except NotInterpreted:
                    continue
                found = meet(found, box) or found
        return found


class Unsliceable(Exception):
    """Rules whose part for some packets is only known by looking at all of them."""


class RuleSlice:
    """The part of the rules that packets with some headers can meet, whatever they do to the packets on the way.

    It is the same to these packets as the whole.
    """

    def __init__(self, reach: RuleReach, headers: Iterable[Header]) -> None:
        """Cut the slice. `headers` are those of packets as they arrive, and those that they are expected to get.

        Raises Unsliceable.
        """
        self._reach = reach
        self._headers = list(headers)
        self._cut()
        while further := self._rewritten():
            self._headers += further
            self._cut()

    def ruleset(self) -> ast.Ruleset:
        """Return the slice as rules."""
        return ast.Ruleset(self._tables)

    def _cut(self) -> None:
        self._addresses = union(each[0] for each in self._headers)
        self._targets: set[tuple[str, int | None]] = set()
        self._tables = tuple(map(self._table, self._reach.tables.values()))

    def _rewritten(self) -> list[Header]:
        """Return the headers that the rules of the slice may give to packets, and that it was not cut for."""
        space, whole = self._reach.space, self._reach.whole
        found: list[Header] = []
        for address, port in self._targets:
            try:
                target = space.network(address)
            except NotInterpreted:
                raise Unsliceable(f"packets are sent to {address}") from None
            ports = whole[2] if port is None else values(port)
            if target and not any(not target - each[0] and not ports - each[2] for each in self._headers):
                found.append((target, whole[1], ports))
        return found

    def _table(self, table: TrackedTable) -> ast.Table:
        chains: dict[str, ast.Chain] = {}
        sets: dict[str, ast.Set] = {}
        todo = list(table.hooks)
        while todo:
            name = todo.pop()
            if name in chains or name not in table.chains:
                continue
            rules = self._rules(table, name)
            chains[name] = ast.Chain(name=name, rules=rules, hook=table.hooks.get(name))
            named = named_by(rules)
            todo += named.chains
            for each in named.sets - sets.keys():
                held = table.sets.get(each)
                if held is not None:
                    elements = self._elements(table, held)
                    sets[each] = msgspec.structs.replace(held.declared, elements=elements)
                    todo += self._verdicts(held, elements)
            self._note_targets(rules)
        bases = {name: chains[name] for name in table.hooks if name in chains}
        return ast.Table(family=table.family, name=table.name, chains={**bases, **chains}, sets=sets)

    def _rules(self, table: TrackedTable, name: str) -> tuple[ast.Rule, ...]:
        index = table.long.get(name)
        if index is None:
            return tuple(table.chains[name])
        return index.some(self._addresses, self._ports(self._reach.by_chain(table, name)))

    def _elements(self, table: TrackedTable, held: TrackedSet) -> Elements:
        ports = self._ports(self._reach.by_set(table, held.declared.name)) if held.field is ast.Field.DPORT else EMPTY
        return held.some(self._addresses, ports)

    def _ports(self, entries: list[Header]) -> ValueSet:
        """Return the ports of those headers by which a chain or set is reached."""
        return union(each[2] for each in self._headers if any(each[0] & entry[0] for entry in entries))

    def _verdicts(self, held: TrackedSet, elements: Elements) -> list[str]:
        if held.declared.data == "endpoint":
            self._targets.update(data for data in elements.values() if isinstance(data, tuple))
            return []
        return [data.chain for data in elements.values() if isinstance(data, (ast.Jump, ast.Goto))]

    def _note_targets(self, rules: Iterable[ast.Rule]) -> None:
        for rule in rules:
            for each in rule.expressions:
                if isinstance(each, ast.Dnat):
                    self._targets.add((each.address, each.port))
                elif isinstance(each, ast.RandomMap):
                    self._targets.update(
                        (what.address, what.port) for _, _, what in each.arms if isinstance(what, ast.Dnat)
                    )
                elif isinstance(each, (ast.Redirect, ast.RedirectRange, ast.DnatRange)):
                    raise Unsliceable("packets are redirected to ports of this node")
