"""An index of boxes: splits a box of packets along all boxes of a map or set that it meets.

Each level of the index is one field. A value of its own is found by hash and an interval by binary search, and what is left of a set of
values is computed once, so that a box splits along a map in time linear in the elements of the map.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Generic, TypeVar

from narthex.netfilter.sets.values import ValueSet, segments, union

Item = TypeVar("Item")


class _Node(Generic[Item]):
    """The elements that agree with the values of the fields before this one."""

    __slots__ = ("_known", "_spans", "_starts", "singles")

    def __init__(self, parts: list[tuple[ValueSet, _Node[Item] | tuple[Item, ...]]]) -> None:
        self.singles = {part.first: child for part, child in parts if part.size == 1}
        self._spans = sorted(
            (first, last, child) for part, child in parts if part.size != 1 for first, last in part.spans
        ) if len(self.singles) < len(parts) else []  # fmt: skip
        self._starts = [first for first, _, _ in self._spans]
        self._known: dict[ValueSet, list[tuple[ValueSet, _Node[Item] | tuple[Item, ...] | None]]] = {}

    def at(self, value: int) -> _Node[Item] | tuple[Item, ...] | None:
        """Return what is below a value."""
        found = self.singles.get(value)
        if found is None and self._starts:
            at = bisect_right(self._starts, value) - 1
            if at >= 0 and value <= self._spans[at][1]:
                return self._spans[at][2]
        return found

    def split(self, desired: ValueSet) -> list[tuple[ValueSet, _Node[Item] | tuple[Item, ...] | None]]:
        """Split a set of values along the node; what no element has comes last, with None."""
        known = self._known.get(desired)
        if known is None:
            parts: dict[int, tuple[_Node[Item] | tuple[Item, ...], list[ValueSet]]] = {}
            for value, child in self.singles.items():
                if value in desired:
                    parts.setdefault(id(child), (child, []))[1].append(ValueSet(((value, value),)))
            for first, last, child in self._spans:
                part = desired & ValueSet(((first, last),))
                if part:
                    parts.setdefault(id(child), (child, []))[1].append(part)
            known = []
            for child, sets in parts.values():
                known.append((sets[0] if len(sets) == 1 else union(sets), child))
            left = desired - union(part for part, _ in known)
            if left:
                known.append((left, None))
            self._known[desired] = known
        return known


class BoxIndex(Generic[Item]):
    """Finds the items of all boxes that contain a packet. Fields are looked up in the order `order`."""

    def __init__(self, boxes: Sequence[tuple[tuple[ValueSet, ...], Item]], order: Sequence[int]) -> None:
        """Index boxes with their items; of boxes that overlap, the first comes first."""
        self._order = tuple(order)
        self._boxes = boxes
        self._root = self._build(list(range(len(boxes))), 0)

    def _build(self, numbers: list[int], level: int) -> _Node[Item] | tuple[Item, ...]:
        boxes = self._boxes
        if level == len(self._order):
            return tuple(boxes[number][1] for number in numbers)
        field = self._order[level]
        found = segments([boxes[number][0][field] for number in numbers])
        return _Node([(part, self._build([numbers[at] for at in active], level + 1)) for part, active in found])

    def split(self, box: tuple[ValueSet, ...]) -> list[tuple[tuple[ValueSet, ...], tuple[Item, ...]]]:
        """Split a box into disjoint boxes, each with the items of the boxes that contain it: none where no box is."""
        found: list[tuple[tuple[ValueSet, ...], tuple[Item, ...]]] = []
        self._split(self._root, 0, box, found)
        return found

    def _split(
        self,
        node: _Node[Item] | tuple[Item, ...],
        level: int,
        box: tuple[ValueSet, ...],
        found: list[tuple[tuple[ValueSet, ...], tuple[Item, ...]]],
    ) -> None:
        while not isinstance(node, tuple):
            field = self._order[level]
            desired = box[field]
            if desired.size != 1:
                break
            child = node.at(desired.first)
            if child is None:
                found.append((box, ()))
                return
            node, level = child, level + 1
        if isinstance(node, tuple):
            found.append((box, node))
            return
        parts = node.split(desired)
        for part, child in parts:
            smaller = box if part is desired else (*box[:field], part, *box[field + 1 :])
            if child is None:
                found.append((smaller, ()))
            else:
                self._split(child, level + 1, smaller, found)
