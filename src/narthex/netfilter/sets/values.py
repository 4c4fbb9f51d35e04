"""Exact sets of the values of one packet field, as sorted intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""First and last value, both included."""

_FEW = 4
"""Number of intervals up to which a set is intersected by binary search in the other set."""


class ValueSet:
    """A set of integers. Equal sets are equal objects with equal hashes; no set is ever changed."""

    __slots__ = ("_hash", "_starts", "size", "spans")

    def __init__(self, spans: tuple[Span, ...]) -> None:
        """Create a set of sorted intervals that neither overlap nor touch each other."""
        self.spans = spans
        self.size = spans[0][1] - spans[0][0] + 1 if len(spans) == 1 else sum(last - first + 1 for first, last in spans)
        """Number of values."""
        self._hash = hash(spans)
        self._starts: list[int] | None = None

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, ValueSet) and self._hash == other._hash and self.spans == other.spans
        )

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __repr__(self) -> str:
        return f"ValueSet({self.spans})"

    def __contains__(self, value: int) -> bool:
        spans = self.spans
        if len(spans) == 1:
            return spans[0][0] <= value <= spans[0][1]
        at = bisect_right(self._first_values(), value) - 1
        return at >= 0 and value <= spans[at][1]

    def _first_values(self) -> list[int]:
        if self._starts is None:
            self._starts = [first for first, _ in self.spans]
        return self._starts

    @property
    def single(self) -> int | None:
        """The value of a set with one value; None for others."""
        return self.spans[0][0] if self.size == 1 else None

    @property
    def first(self) -> int:
        """The smallest value of a set that is not empty."""
        return self.spans[0][0]

    def __and__(self, other: ValueSet) -> ValueSet:
        if self is other:
            return self
        few, many = (self, other) if len(self.spans) <= len(other.spans) else (other, self)
        if few.size == 1:
            return few if few.spans[0][0] in many else EMPTY
        if many.size == 1:
            return many if many.spans[0][0] in few else EMPTY
        found: list[Span] = []
        spans = many.spans
        if len(few.spans) <= _FEW:
            for first, last in few.spans:
                at = max(bisect_right(many._first_values(), first) - 1, 0)
                while at < len(spans) and spans[at][0] <= last:
                    start, end = max(first, spans[at][0]), min(last, spans[at][1])
                    if start <= end:
                        found.append((start, end))
                    at += 1
        else:
            found = _merged(few, many)
        return _of_parts(found, few, many)

    def __sub__(self, other: ValueSet) -> ValueSet:
        if self is other:
            return EMPTY
        if self.size == 1:
            return EMPTY if self.spans[0][0] in other else self
        found: list[Span] = []
        spans, at = other.spans, 0
        if spans and self.spans:
            at = max(bisect_right(other._first_values(), self.spans[0][0]) - 1, 0)
        for first, last in self.spans:
            start = first
            while at < len(spans) and spans[at][1] < start:
                at += 1
            number = at
            while number < len(spans) and spans[number][0] <= last:
                if start < spans[number][0]:
                    found.append((start, spans[number][0] - 1))
                start = spans[number][1] + 1
                number += 1
            at = max(number - 1, at)
            if start <= last:
                found.append((start, last))
        return _of_parts(found, self, self)

    def __or__(self, other: ValueSet) -> ValueSet:
        return union((self, other))


def _merged(few: ValueSet, many: ValueSet) -> list[Span]:
    found: list[Span] = []
    one, other = few.spans, many.spans
    here, there = 0, max(bisect_right(many._first_values(), one[0][0]) - 1, 0)
    while here < len(one) and there < len(other):
        start, end = max(one[here][0], other[there][0]), min(one[here][1], other[there][1])
        if start <= end:
            found.append((start, end))
        if one[here][1] < other[there][1]:
            here += 1
        else:
            there += 1
    return found


def _of_parts(found: list[Span], one: ValueSet, other: ValueSet) -> ValueSet:
    """Return the set of these intervals, one of two existing sets if it is equal, so that identities stay."""
    if not found:
        return EMPTY
    spans = tuple(found)
    return one if spans == one.spans else other if spans == other.spans else ValueSet(spans)


EMPTY = ValueSet(())


def values(*items: int) -> ValueSet:
    """Return a set of values."""
    return ValueSet(((items[0], items[0]),)) if len(items) == 1 else _joined([(item, item) for item in items])


def span(first: int, last: int) -> ValueSet:
    """Return the set of all values from `first` to `last`, both included; empty if `last` is smaller."""
    return ValueSet(((first, last),)) if first <= last else EMPTY


def union(sets: Iterable[ValueSet]) -> ValueSet:
    """Return the union of sets."""
    some = sets if isinstance(sets, (list, tuple)) else list(sets)
    return some[0] if len(some) == 1 else _joined([each for one in some for each in one.spans])


def _joined(spans: list[Span]) -> ValueSet:
    """Return the set of intervals in any order."""
    spans.sort()
    found: list[Span] = []
    for first, last in spans:
        if found and first <= found[-1][1] + 1:
            if last > found[-1][1]:
                found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return ValueSet(tuple(found))


def segments(sets: Sequence[ValueSet]) -> list[tuple[ValueSet, tuple[int, ...]]]:
    """Split the union of sets into disjoint parts, such that each set is a union of parts.

    Returns each part with the numbers of the sets that contain it, in order. The effort is linear in the number of intervals, apart
    from sorting them.
    """
    distinct: dict[ValueSet, list[int]] = {}
    for number, each in enumerate(sets):
        distinct.setdefault(each, []).append(number)
    distinct.pop(EMPTY, None)
    if len(distinct) <= 1 or all(each.size == 1 for each in distinct):
        return [(each, tuple(numbers)) for each, numbers in distinct.items()]
    members = list(distinct)
    if _are_disjoint(members):
        return [(each, tuple(numbers)) for each, numbers in distinct.items()]
    events = sorted(
        (value, number)
        for number, each in enumerate(members)
        for first, last in each.spans
        for value in (first, last + 1)
    )
    found: dict[tuple[int, ...], list[Span]] = {}
    active: set[int] = set()
    start = 0
    for value, number in events:
        if active and start < value:
            parts = found.setdefault(tuple(sorted(active)), [])
            if parts and parts[-1][1] + 1 == start:
                parts[-1] = parts[-1][0], value - 1
            else:
                parts.append((start, value - 1))
        start = value
        active ^= {number}
    return [
        (
            members[numbers[0]] if members[numbers[0]].spans == (spans := tuple(parts)) else ValueSet(spans),
            tuple(sorted(item for number in numbers for item in distinct[members[number]])),
        )
        for numbers, parts in found.items()
    ]


def _are_disjoint(sets: Sequence[ValueSet]) -> bool:
    reached = -1
    for first, last in sorted([span for each in sets for span in each.spans]):
        if first <= reached:
            return False
        reached = last
    return True


def disjoint_union(sets: Sequence[ValueSet]) -> ValueSet | None:
    """Return the union of sets without a common value, None if they have one."""
    return union(sets) if _are_disjoint(sets) else None
