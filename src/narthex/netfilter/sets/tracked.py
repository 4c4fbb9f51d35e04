"""Rules that are followed change by change: an immutable state of tables, and what each change touches.

A state shares with the state before it all that did not change, so that a change of one Service costs what it changes, however many
rules there are. Long chains and sets are indexed by the destination address, or else the destination port, that a packet needs to meet
a rule or an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from immutables import Map

from narthex.model import IPFamily, address_key
from narthex.netfilter import ast
from narthex.netfilter.edit import TableEdit, UnfitEdit
from narthex.netfilter.netlink.slot_map import SlotMap
from narthex.netfilter.sets.numbered import NumberedItems
from narthex.netfilter.sets.values import ValueSet

Elements = Mapping[ast.ElementKey, ast.ElementData]
Rules = Sequence[ast.Rule]

_LONG = 64
"""Number of rules from which a chain is indexed."""
_MATCHES = (
    ast.Compare, ast.PortRange, ast.IsLocal, ast.AddressType, ast.TcpReset, ast.TcpFlags, ast.IcmpType, ast.CtState, ast.CtStatus,
    ast.CtDirection, ast.MarkIs, ast.ConnMarkIs, ast.InSet, ast.RandomMatch, ast.EveryNth, ast.RecentCheck, ast.Counter,
)  # fmt: skip


def conditions(rule: ast.Rule) -> Iterator[ast.Expression]:
    """Yield the matches of a rule that a packet has to meet before the rule acts on it."""
    for each in rule.expressions:
        if not isinstance(each, _MATCHES):
            return
        yield each


class TouchedRules:
    """What an edit touches: packets that meet none of this are treated as before."""

    def __init__(self) -> None:
        self.everything = False
        self.chains: dict[str, tuple[ast.Rule, ...] | None] = {}
        """By chain the rules that are added and removed; None: any."""
        self.elements: dict[str, list[ast.ElementKey]] = {}
        """By set the elements that are added, removed, or have other data."""
        self.sets: set[str] = set()
        """Sets that are declared anew."""

    def __bool__(self) -> bool:
        return bool(self.everything or self.chains or self.elements or self.sets)


# ---- chains ------------------------------------------------------------------------------------------------------------------


class _Keys(NamedTuple):
    """The single destination address or port that a packet needs to match a rule; an address comes first."""

    address: int | None
    port: int | None


def _keys(rule: ast.Rule) -> _Keys:
    port = None
    for each in conditions(rule):
        if isinstance(each, ast.Compare) and not each.negate and len(each.values) == 1:
            value = each.values[0]
            if each.field is ast.Field.DADDR and (address := single_address(value)) is not None:
                return _Keys(address, None)
            if each.field is ast.Field.DPORT and isinstance(value, int):
                port = value
    return _Keys(None, port)


def single_address(atom: ast.Atom) -> int | None:
    """Return the number of an address; None for a network or a range."""
    if not isinstance(atom, str) or "/" in atom or "-" in atom:
        return None
    return address_key(atom)[1]


class LongChain:
    """The rules of a long chain by their keys."""

    __slots__ = ("_calling", "_positions", "by_address", "by_port", "rules", "unkeyed")

    def __init__(
        self,
        rules: tuple[ast.Rule, ...],
        by_address: NumberedItems[tuple[ast.Rule, ...]],
        by_port: NumberedItems[tuple[ast.Rule, ...]],
        unkeyed: tuple[ast.Rule, ...],
    ) -> None:
        self.rules = rules
        self.by_address, self.by_port, self.unkeyed = by_address, by_port, unkeyed
        self._positions: dict[int, int] | None = None
        self._calling: dict[str, list[ast.Rule]] | None = None

    @classmethod
    def of(cls, rules: Rules) -> LongChain | None:
        """Return the index of a chain; None for a short one, and for one that an index does not help."""
        if len(rules) < _LONG:
            return None
        held = tuple(rules)
        by_address: dict[int, list[ast.Rule]] = {}
        by_port: dict[int, list[ast.Rule]] = {}
        unkeyed: list[ast.Rule] = []
        for rule in held:
            address, port = _keys(rule)
            if address is not None:
                by_address.setdefault(address, []).append(rule)
            elif port is not None:
                by_port.setdefault(port, []).append(rule)
            else:
                unkeyed.append(rule)
        if len(by_address) + len(by_port) < _LONG // 2 or len(set(map(id, held))) != len(held):
            return None
        return cls(held, _frozen(by_address), _frozen(by_port), tuple(unkeyed))

    def after(self, rules: tuple[ast.Rule, ...], difference: RuleDifference) -> LongChain | None:
        """Return the index of the next version of the chain, given the difference."""
        swapped = difference.swapped
        fresh = [id(rule) for rule in (*difference.added, *(new for _, new in swapped))]
        if len(set(fresh)) != len(fresh) or not self._order.keys().isdisjoint(fresh):
            return None
        by_address, by_port, unkeyed = self.by_address, self.by_port, list(self.unkeyed)
        for rule in (*difference.removed, *(old for old, _ in swapped)):
            address, port = _keys(rule)
            if address is not None:
                by_address = _without(by_address, address, rule)
            elif port is not None:
                by_port = _without(by_port, port, rule)
            else:
                unkeyed = [each for each in unkeyed if each is not rule]
        for rule in (*difference.added, *(new for _, new in swapped)):
            address, port = _keys(rule)
            if address is not None:
                by_address = by_address.with_item(address, (*(by_address.get(address) or ()), rule))
            elif port is not None:
                by_port = by_port.with_item(port, (*(by_port.get(port) or ()), rule))
            else:
                unkeyed.append(rule)
        made = LongChain(rules, by_address, by_port, tuple(unkeyed))
        made._calling = self._called_after(difference) if self._calling is not None else None
        return made

    def _called_after(self, difference: RuleDifference) -> dict[str, list[ast.Rule]]:
        calling = dict(self._calling or {})
        for rule in (*difference.removed, *(old for old, _ in difference.swapped)):
            for name in named_by((rule,)).chains:
                left = [each for each in calling.get(name, ()) if each is not rule]
                calling[name] = left
                if not left:
                    del calling[name]
        for rule in (*difference.added, *(new for _, new in difference.swapped)):
            for name in named_by((rule,)).chains:
                calling[name] = [*calling.get(name, ()), rule]
        return calling

    @property
    def _order(self) -> dict[int, int]:
        """The positions of the rules."""
        if self._positions is None:
            self._positions = dict(zip(map(id, self.rules), range(len(self.rules)), strict=True))
        return self._positions

    def calling(self, chain: str) -> Sequence[ast.Rule]:
        """Return the rules that name a chain."""
        if self._calling is None:
            self._calling = {}
            for rule in self.rules:
                for name in named_by((rule,)).chains:
                    self._calling.setdefault(name, []).append(rule)
        return self._calling.get(chain, ())

    def some(self, addresses: ValueSet, ports: ValueSet) -> tuple[ast.Rule, ...]:
        """Return the rules that packets with these destinations and ports can meet, in order."""
        positions, found = self._order, [*self.unkeyed]
        for rules in (*self.by_address.chosen(addresses), *self.by_port.chosen(ports)):
            found += rules
        return tuple(sorted(found, key=lambda rule: positions[id(rule)]))


def _frozen(items: Mapping[int, list[ast.Rule]]) -> NumberedItems[tuple[ast.Rule, ...]]:
    return NumberedItems({key: tuple(rules) for key, rules in items.items()})


def _without(
    items: NumberedItems[tuple[ast.Rule, ...]], key: int, rule: ast.Rule
) -> NumberedItems[tuple[ast.Rule, ...]]:
    return items.with_item(key, tuple(each for each in items.get(key) or () if each is not rule) or None)


def _effective(some: Iterable[ast.Rule], rules: Rules) -> Iterator[ast.Rule]:
    """Yield rules of a chain whose packets are those that some of its rules have an effect on.

    A rule that only returns has an effect on packets that meet a rule behind it, since the end of a chain returns as well.
    """
    for rule in some:
        if _only_returns(rule):
            held = tuple(rules)
            behind = held[next(at for at, each in enumerate(held) if each == rule) + 1 :]
            if len(behind) <= _LONG:
                yield from behind
                continue
        yield rule


def _only_returns(rule: ast.Rule) -> bool:
    last = rule.expressions[-1] if rule.expressions else None
    return isinstance(last, ast.Return) and sum(1 for _ in conditions(rule)) == len(rule.expressions) - 1


class RuleDifference(NamedTuple):
    """The difference between two versions of a chain whose other rules are equal and have the same order."""

    removed: list[ast.Rule]
    added: list[ast.Rule]
    swapped: list[tuple[ast.Rule, ast.Rule]]
    """Equal rules that are other objects."""

    def same(self, one: ast.Rule, other: ast.Rule) -> bool:
        """Return True if two rules are equal, and note if they are two objects."""
        if one is other:
            return True
        if one != other:
            return False
        self.swapped.append((one, other))
        return True


def rule_difference(have: Rules, want: Rules) -> RuleDifference | None:
    """Return the difference between two versions of a chain; None if rules that both have changed places."""
    old, new = tuple(have), tuple(want)
    difference = RuleDifference([], [], [])
    start, ends = 0, min(len(old), len(new))
    while start < ends and difference.same(old[start], new[start]):
        start += 1
    tail = 0
    while tail < ends - start and difference.same(old[-1 - tail], new[-1 - tail]):
        tail += 1
    old, new = old[start : len(old) - tail], new[start : len(new) - tail]
    old_ids, new_ids = list(map(id, old)), _same_ids(old, new)
    in_old, in_new = set(old_ids), set(new_ids)
    here = there = 0
    while here < len(old) and there < len(new):
        if old_ids[here] == new_ids[there]:
            if old[here] is not new[there]:
                difference.swapped.append((old[here], new[there]))
            here += 1
            there += 1
        elif old_ids[here] not in in_new:
            difference.removed.append(old[here])
            here += 1
        elif new_ids[there] not in in_old:
            difference.added.append(new[there])
            there += 1
        else:
            return None
    difference.removed.extend(old[here:])
    difference.added.extend(new[there:])
    return difference if in_new.isdisjoint(map(id, difference.removed)) else None


def _same_ids(old: Rules, new: Rules) -> list[int]:
    """Return a number for each new rule: that of an equal old rule, if there is one."""
    ids = set(map(id, old))
    fresh = [rule for rule in new if id(rule) not in ids]
    ids = set(map(id, new))
    equal = {rule: id(rule) for rule in old if id(rule) not in ids} if fresh else {}
    numbers = {id(rule): equal.get(rule, id(rule)) for rule in fresh}
    return [numbers.get(id(rule), id(rule)) for rule in new]


# ---- sets --------------------------------------------------------------------------------------------------------------------


class TrackedSet:
    """A set or map with its elements by destination address, or else by destination port."""

    __slots__ = ("at", "buckets", "declared", "field", "rest", "targets")

    def __init__(
        self,
        declared: ast.Set,
        buckets: NumberedItems[Elements],
        rest: Elements,
        targets: Map[str, Map[ast.ElementKey, None]],
    ) -> None:
        self.declared = declared
        """The set without elements."""
        self.field, self.at = _indexed_field(declared.key)
        self.buckets = buckets
        self.rest = rest
        """Elements of networks and ranges, and all elements of a set without such a field."""
        self.targets = targets
        """For each chain that verdicts of the map name: the elements with these verdicts."""

    @classmethod
    def of(cls, one: ast.Set) -> TrackedSet:
        """Return a set with its elements."""
        declared = declaration(one)
        field, at = _indexed_field(one.key)
        if at is None:
            return cls(declared, NumberedItems(), one.elements, _targets(one.elements))
        buckets: dict[int, dict[ast.ElementKey, ast.ElementData] | SlotMap] = {}
        rest: dict[ast.ElementKey, ast.ElementData] = {}
        if isinstance(one.elements, SlotMap):
            for prefix, slots in one.elements.runs.items():
                number = _number(prefix[at], field)
                if number is None:
                    rest.update({(*prefix, slot): data for slot, data in enumerate(slots)})
                else:
                    run = buckets.setdefault(number, SlotMap())
                    assert isinstance(run, SlotMap)
                    run.runs[prefix] = slots
            return cls(declared, NumberedItems(buckets), rest, Map())
        for key, data in one.elements.items():
            number = _number(key[at], field)
            if number is None:
                rest[key] = data
            else:
                bucket = buckets.setdefault(number, {})
                assert isinstance(bucket, dict)
                bucket[key] = data
        return cls(declared, NumberedItems(buckets), rest, _targets(one.elements))

    def elements(self) -> Elements:
        """Return all elements."""
        runs = [bucket for bucket in self.buckets.items.values() if isinstance(bucket, SlotMap)]
        if not self.rest and runs and len(runs) == len(self.buckets):
            whole = SlotMap()
            for run in runs:
                whole.runs.update(run.runs)
            return whole
        found = dict(self.rest)
        for bucket in self.buckets.items.values():
            found.update(bucket)
        return found

    def some(self, addresses: ValueSet, ports: ValueSet) -> Elements:
        """Return the elements that packets with these destinations, or to these ports, can meet."""
        if self.at is None:
            return self.rest
        found = dict(self.rest)
        for bucket in self.buckets.chosen(addresses if self.field is ast.Field.DADDR else ports):
            found.update(bucket)
        return found

    def difference(self, want: TrackedSet) -> tuple[Elements, Elements]:
        """Return the elements that another version of the set does not have, and those that only it has."""
        gone: dict[ast.ElementKey, ast.ElementData] = {}
        new: dict[ast.ElementKey, ast.ElementData] = {}
        pairs: list[tuple[Elements, Elements]] = [(self.rest, want.rest)]
        pairs += [(bucket, want.buckets.get(number) or {}) for number, bucket in self.buckets.items.items()]
        pairs += [({}, bucket) for number, bucket in want.buckets.items.items() if number not in self.buckets]
        for have, other in pairs:
            if have is not other:
                gone.update((key, data) for key, data in have.items() if other.get(key, _MISSING) != data)
                new.update((key, data) for key, data in other.items() if have.get(key, _MISSING) != data)
        return gone, new

    def get(self, key: ast.ElementKey, default: object) -> object:
        """Return the data of an element."""
        number = None if self.at is None else _number(key[self.at], self.field)
        held = self.rest if number is None else self.buckets.get(number) or {}
        return held.get(key, default)

    def has(self, key: ast.ElementKey, data: ast.ElementData) -> bool:
        """Return True if an element is there with this data."""
        return self.get(key, _MISSING) == data

    def redeclared(self, one: ast.Set) -> TrackedSet:
        """Return the set with another declaration and the same elements."""
        if one.key != self.declared.key:
            raise UnfitEdit(f"the key of the set {one.name} can't change while it has elements")
        return TrackedSet(declaration(one), self.buckets, self.rest, self.targets)

    def after(self, deletions: Elements, additions: Elements, touched: list[ast.ElementKey]) -> TrackedSet:
        """Return the set after some changes of elements, and add those that differ to `touched`. Raises UnfitEdit."""
        name = self.declared.name
        changed: dict[int | None, dict[ast.ElementKey, ast.ElementData]] = {}
        targets = self.targets
        for key in deletions:
            bucket = self._changed(key, changed)
            if key not in bucket:
                raise UnfitEdit(f"the set {name} has no element {key} to delete")
            targets = _unaimed(targets, key, bucket.pop(key))
            touched.append(key)
        for key, data in additions.items():
            bucket = self._changed(key, changed)
            if key in bucket:
                if bucket[key] != data:
                    raise UnfitEdit(f"the set {name} has an element {key} with other data already")
                continue
            bucket[key] = data
            if isinstance(data, (ast.Jump, ast.Goto)):
                targets = targets.set(data.chain, targets.get(data.chain, _NO_KEYS).set(key, None))
            touched.append(key)
        buckets, rest = self.buckets, self.rest
        for number, held in changed.items():
            if number is None:
                rest = held
            else:
                buckets = buckets.with_item(number, held or None)
        return TrackedSet(self.declared, buckets, rest, targets)

    def _changed(
        self, key: ast.ElementKey, changed: dict[int | None, dict[ast.ElementKey, ast.ElementData]]
    ) -> dict[ast.ElementKey, ast.ElementData]:
        number = None if self.at is None else _number(key[self.at], self.field)
        held = changed.get(number)
        if held is None:
            held = changed[number] = dict(self.rest if number is None else self.buckets.get(number) or {})
        return held


_MISSING = object()
_NO_KEYS: Map[ast.ElementKey, None] = Map()


def declaration(one: ast.Set) -> ast.Set:
    """Return a set without its elements."""
    return msgspec.structs.replace(one, elements={}) if one.elements else one


def _indexed_field(key: ast.Key) -> tuple[ast.Field | None, int | None]:
    for field in (ast.Field.DADDR, ast.Field.DPORT):
        if field in key:
            return field, key.index(field)
    return None, None


def _number(atom: ast.Atom, field: ast.Field | None) -> int | None:
    if field is ast.Field.DADDR:
        return single_address(atom)
    return atom if isinstance(atom, int) else None


def _targets(elements: Elements) -> Map[str, Map[ast.ElementKey, None]]:
    if isinstance(elements, SlotMap):
        return Map()
    found: dict[str, dict[ast.ElementKey, None]] = {}
    for key, data in elements.items():
        if isinstance(data, (ast.Jump, ast.Goto)):
            found.setdefault(data.chain, {})[key] = None
    return Map({chain: Map(keys) for chain, keys in found.items()})


def _unaimed(
    targets: Map[str, Map[ast.ElementKey, None]], key: ast.ElementKey, data: ast.ElementData
) -> Map[str, Map[ast.ElementKey, None]]:
    if not isinstance(data, (ast.Jump, ast.Goto)):
        return targets
    left = targets[data.chain].delete(key)
    return targets.set(data.chain, left) if left else targets.delete(data.chain)


# ---- tables ------------------------------------------------------------------------------------------------------------------


class _Named(NamedTuple):
    """The chains and sets that the rules of a chain name."""

    chains: frozenset[str]
    sets: frozenset[str]


def named_by(rules: Iterable[ast.Rule]) -> _Named:
    """Return the chains and sets that rules name."""
    chains: set[str] = set()
    sets: set[str] = set()
    for rule in rules:
        for each in rule.expressions:
            _collect(each, chains, sets)
    return _Named(frozenset(chains), frozenset(sets))


def _collect(e: ast.Expression, chains: set[str], sets: set[str]) -> None:
    if isinstance(e, (ast.Jump, ast.Goto)):
        chains.add(e.chain)
    elif isinstance(e, ast.InSet):
        sets.add(e.name)
    elif isinstance(e, (ast.VerdictMap, ast.DnatMap)):
        sets.add(e.map)
    elif isinstance(e, ast.UpdateSet):
        sets.add(e.set)
    elif isinstance(e, ast.RandomGoto):
        chains.update(e.chains)
    elif isinstance(e, ast.RandomMap):
        chains.update(what.chain for _, _, what in e.arms if isinstance(what, (ast.Jump, ast.Goto)))
    elif isinstance(e, ast.InlineVerdictMap):
        chains.update(what.chain for _, what in e.arms if isinstance(what, (ast.Jump, ast.Goto)))
        for matches, _ in e.arms:
            for each in matches:
                _collect(each, chains, sets)
    elif isinstance(e, ast.AnyOf):
        for matches in e.alternatives:
            for each in matches:
                _collect(each, chains, sets)


_NOBODY: Map[str, None] = Map()
_Uses = Map[str, Map[str, None]]


def _added(uses: _Uses, name: str, user: str) -> _Uses:
    return uses.set(name, uses.get(name, _NOBODY).set(user, None))


def _removed(uses: _Uses, name: str, user: str) -> _Uses:
    left = uses[name].delete(user)
    return uses.set(name, left) if left else uses.delete(name)


class TrackedTable:
    """One version of a table."""

    def __init__(self, family: IPFamily, name: str) -> None:
        """Create an empty table."""
        self.family = family
        self.name = name
        self.hooks: dict[str, ast.Hook] = {}
        """The hooks of base chains, in the order of their registration."""
        self.chains: Map[str, Rules] = Map()
        self.long: Map[str, LongChain] = Map()
        """The indexes of long chains."""
        self.sets: Map[str, TrackedSet] = Map()
        self.callers: _Uses = Map()
        """For each chain those whose rules name it."""
        self.users: _Uses = Map()
        """For each set the chains whose rules name it."""
        self.through: _Uses = Map()
        """For each chain the verdict maps that name it."""

    def table(self) -> ast.Table:
        """Return the whole table."""
        chains = {
            name: ast.Chain(name=name, rules=tuple(rules), hook=self.hooks.get(name))
            for name, rules in self._in_order()
        }
        sets = {
            name: msgspec.structs.replace(held.declared, elements=held.elements()) for name, held in self.sets.items()
        }
        return ast.Table(family=self.family, name=self.name, chains=chains, sets=sets)

    def _in_order(self) -> Iterator[tuple[str, Rules]]:
        yield from ((name, self.chains[name]) for name in self.hooks)
        yield from ((name, rules) for name, rules in self.chains.items() if name not in self.hooks)

    def calling(self, caller: str, target: str) -> Sequence[ast.Rule]:
        """Return the rules of a chain that name another one."""
        if caller in self.long:
            return self.long[caller].calling(target)
        return [rule for rule in self.chains[caller] if target in named_by((rule,)).chains]

    def after(self, edit: TableEdit) -> tuple[TrackedTable, TouchedRules]:
        """Return the table after an edit, and what the edit touches. Raises UnfitEdit."""
        made, touched = TrackedTable(self.family, self.name), TouchedRules()
        touched.everything = edit.replace
        if not edit.replace:
            made.hooks, made.chains, made.long, made.sets = dict(self.hooks), self.chains, self.long, self.sets
            made.callers, made.users, made.through = self.callers, self.users, self.through
        for one in edit.sets:
            made._declare(one, edit.filled, touched)
        made._put(edit.chains, touched)
        for name, hook in edit.hooks.items():
            if made.hooks.get(name) != hook:
                made.hooks[name] = hook
                touched.everything = True
        for name in dict.fromkeys((*edit.deletions, *edit.additions)):
            made._change(name, edit.deletions.get(name, {}), edit.additions.get(name, {}), touched)
        for name in edit.removed_chains:
            made._remove_chain(name, touched)
        for name in edit.removed_sets:
            made._remove_set(name, touched)
        return made, touched

    def edit_to(self, want: TrackedTable) -> TableEdit:
        """Return the changes that lead to another version of the table, which need not have followed this one."""
        edit = TableEdit(family=want.family, table=want.name)
        if list(self.hooks.items()) != list(want.hooks.items()):
            chains, sets = dict(want._in_order()), tuple(want.table().sets.values())
            filled = frozenset(one.name for one in sets)
            return msgspec.structs.replace(
                edit, replace=True, chains=chains, hooks=want.hooks, sets=sets, filled=filled
            )
        deletions, additions = {}, {}
        for name, one in want.sets.items():
            have = self.sets.get(name)
            old, new = ({}, one.elements()) if have is None else have.difference(one)
            deletions[name], additions[name] = old, new
        return msgspec.structs.replace(
            edit,
            chains={
                name: rules
                for name, rules in want.chains.items()
                if (held := self.chains.get(name)) is None or tuple(held) != tuple(rules)
            },
            removed_chains=tuple(name for name in self.chains if name not in want.chains),
            sets=tuple(
                one.declared
                for name, one in want.sets.items()
                if name not in self.sets or self.sets[name].declared != one.declared
            ),
            deletions={name: elements for name, elements in deletions.items() if elements},
            additions={name: elements for name, elements in additions.items() if elements},
            removed_sets=tuple(name for name in self.sets if name not in want.sets),
        )

    def holds(self, edit: TableEdit) -> bool:
        """Return True if all that an edit writes is in the table already, and nothing that it removes."""
        if edit.replace or not self.hooks.items() >= edit.hooks.items():
            return False
        chains, sets = self.chains, self.sets
        if any(name in chains for name in edit.removed_chains) or any(name in sets for name in edit.removed_sets):
            return False
        if any(name not in chains or tuple(chains[name]) != tuple(rules) for name, rules in edit.chains.items()):
            return False
        if any(one.name not in sets or sets[one.name].declared != declaration(one) for one in edit.sets):
            return False
        filled = {one.name: one.elements for one in edit.sets if one.name in edit.filled}
        for name, elements in (*edit.additions.items(), *filled.items()):
            if name not in sets or any(not sets[name].has(key, data) for key, data in elements.items()):
                return False
        return not any(
            name in sets and sets[name].get(key, _MISSING) is not _MISSING and key not in edit.additions.get(name, {})
            for name, elements in edit.deletions.items()
            for key in elements
        )

    # ---- chains --------------------------------------------------------------------------------------------------------------

    def _put(self, chains: Mapping[str, Rules], touched: TouchedRules) -> None:
        held, long = self.chains.mutate(), self.long
        for name, rules in chains.items():
            before = held.get(name)
            difference = None if touched.everything or before is None else rule_difference(before, rules)
            known = long.get(name)
            index = None if known is None or difference is None else known.after(tuple(rules), difference)
            index = index or LongChain.of(rules)
            if difference is not None:
                touched.chains[name] = (
                    *_effective(difference.removed, before or ()),
                    *_effective(difference.added, rules),
                )
                self._name_again(name, difference, rules if index is None else index)
            else:
                touched.chains[name] = None
                self._name(name, named_by(before) if before is not None else _NOTHING, named_by(rules))
            if index is not None:
                long = long.set(name, index)
            elif known is not None:
                long = long.delete(name)
            held[name] = rules if index is None else index.rules
        self.chains, self.long = held.finish(), long

    def _name_again(self, chain: str, difference: RuleDifference, rules: Rules | LongChain) -> None:
        """Note what other rules of a chain name."""
        before, now = named_by(difference.removed), named_by(difference.added)
        gone = _Named(before.chains - now.chains, before.sets - now.sets)
        if gone.sets or (gone.chains and not isinstance(rules, LongChain)):
            left = named_by(rules.rules if isinstance(rules, LongChain) else rules)
            gone = _Named(gone.chains - left.chains, gone.sets - left.sets)
        elif isinstance(rules, LongChain):
            gone = _Named(frozenset(name for name in gone.chains if not rules.calling(name)), gone.sets)
        self._name(chain, gone, now)

    def _name(self, chain: str, before: _Named, now: _Named) -> None:
        for name in before.chains - now.chains:
            self.callers = _removed(self.callers, name, chain)
        for name in before.sets - now.sets:
            self.users = _removed(self.users, name, chain)
        for name in now.chains:
            self.callers = _added(self.callers, name, chain)
        for name in now.sets:
            self.users = _added(self.users, name, chain)

    def _remove_chain(self, name: str, touched: TouchedRules) -> None:
        rules = self.chains.get(name)
        if rules is None:
            raise UnfitEdit(f"table {self.name} has no chain {name} to remove")
        if self.hooks.pop(name, None) is not None:
            touched.everything = True
        self._name(name, named_by(rules), _NOTHING)
        self.chains = self.chains.delete(name)
        if name in self.long:
            self.long = self.long.delete(name)
        touched.chains[name] = None

    # ---- sets ----------------------------------------------------------------------------------------------------------------

    def _declare(self, one: ast.Set, filled: frozenset[str], touched: TouchedRules) -> None:
        before = self.sets.get(one.name)
        keeps = before is not None and one.name not in filled
        self._replace_set(one.name, before, before.redeclared(one) if before and keeps else TrackedSet.of(one))
        if self.users.get(one.name):
            touched.sets.add(one.name)

    def _change(self, name: str, deletions: Elements, additions: Elements, touched: TouchedRules) -> None:
        before = self.sets.get(name)
        if before is None:
            raise UnfitEdit(f"table {self.name} has no set {name}")
        after = before.after(deletions, additions, touched.elements.setdefault(name, []))
        self._replace_set(name, before, after)

    def _remove_set(self, name: str, touched: TouchedRules) -> None:
        before = self.sets.get(name)
        if before is None:
            raise UnfitEdit(f"table {self.name} has no set {name} to remove")
        for chain in before.targets:
            self.through = _removed(self.through, chain, name)
        self.sets = self.sets.delete(name)
        touched.sets.add(name)

    def _replace_set(self, name: str, before: TrackedSet | None, after: TrackedSet) -> None:
        self.sets = self.sets.set(name, after)
        old = before.targets if before is not None else _NO_TARGETS
        if old is after.targets:
            return
        for chain in old:
            if chain not in after.targets:
                self.through = _removed(self.through, chain, name)
        for chain in after.targets:
            if chain not in old:
                self.through = _added(self.through, chain, name)


_NOTHING = _Named(frozenset(), frozenset())
_NO_TARGETS: Map[str, Map[ast.ElementKey, None]] = Map()
