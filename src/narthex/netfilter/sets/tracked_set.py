"""Sets and maps that are followed change by change: their elements by destination address, or else by destination port."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from immutables import Map

from narthex.netfilter import ast
from narthex.netfilter.edit import UnfitEdit
from narthex.netfilter.netlink.slot_map import SlotMap
from narthex.netfilter.sets.conditions import single_address
from narthex.netfilter.sets.numbered import NumberedItems
from narthex.netfilter.sets.values import ValueSet

Elements = Mapping[ast.ElementKey, ast.ElementData]


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
                gone.update((key, data) for key, data in have.items() if other.get(key, MISSING) != data)
                new.update((key, data) for key, data in other.items() if have.get(key, MISSING) != data)
        return gone, new

    def get(self, key: ast.ElementKey, default: object) -> object:
        """Return the data of an element."""
        number = None if self.at is None else _number(key[self.at], self.field)
        held = self.rest if number is None else self.buckets.get(number) or {}
        return held.get(key, default)

    def has(self, key: ast.ElementKey, data: ast.ElementData) -> bool:
        """Return True if an element is there with this data."""
        return self.get(key, MISSING) == data

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


MISSING = object()
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
