"""An index of boxes: splits a box of packets along all boxes of a map or set that it meets.

Each level of the index is one field. A value of its own is found by hash and an interval by binary search, and what is left of a set of
values is computed once, so that a box splits along a map in time linear in the elements of the map. Where few
boxes are left, their other fields are compared directly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from narthex.netfilter.sets.values import ValueSet, segments, union

Item = TypeVar("Item")

_FEW = 3
"""Number of boxes that are compared one after the other."""


class _Node(Generic[Item]):
    """The boxes that agree with the values of the fields before this one."""

    __slots__ = ("_known", "_spans", "_starts", "singles")

    def __init__(self, parts: list[tuple[ValueSet, _Child[Item]]]) -> None:
        self.singles = {part.first: child for part, child in parts if part.size == 1}
        self._spans = (
            tuple(
                sorted(
                    ((first, last, child) for part, child in parts if part.size != 1 for first, last in part.spans),
                    key=lambda span: span[0],
                )
            )
            if len(self.singles) < len(parts)
            else ()
        )
        self._starts = [first for first, _, _ in self._spans] if self._spans else None
        self._known: dict[ValueSet, list[tuple[ValueSet, _Child[Item] | None]]] | None = None

    def at(self, value: int) -> _Child[Item] | None:
        """Return what is below a value."""
        found = self.singles.get(value)
        if found is None and self._starts is not None:
            at = bisect_right(self._starts, value) - 1
            if at >= 0 and value <= self._spans[at][1]:
                return self._spans[at][2]
        return found

    def _met(self, desired: ValueSet) -> Iterator[tuple[int, _Child[Item]]]:
        """Yield the values of a set that have a child of their own. The effort is that of the smaller side."""
        singles = self.singles
        if desired.size > len(singles):
            yield from (pair for pair in singles.items() if pair[0] in desired)
            return
        for first, last in desired.spans:
            for value in range(first, last + 1):
                child = singles.get(value)
                if child is not None:
                    yield value, child

    def forget(self) -> None:
        """Drop the parts that are known."""
        self._known = None

    def split(self, desired: ValueSet, used: list[_Node[Item]]) -> list[tuple[ValueSet, _Child[Item] | None]]:
        """Split a set of values along the node; what no box has comes last, with None. A node that remembers parts joins `used`."""
        if self._known is None:
            self._known = {}
            used.append(self)
        known = self._known.get(desired)
        if known is None:
            parts: dict[int, tuple[_Child[Item], list[ValueSet]]] = {}
            for value, child in self._met(desired):
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


class _Rest:
    """Few boxes, and which of their fields are still to be compared."""

    __slots__ = ("fields", "numbers")

    def __init__(self, numbers: list[int], fields: list[tuple[int, ...]]) -> None:
        self.numbers, self.fields = numbers, fields


_Child = _Node[Item] | _Rest | tuple[Item, ...]
Header = tuple[ValueSet, ...]
Pieces = list[tuple[Header, tuple[Item, ...]]]


class BoxIndex(Generic[Item]):
    """Finds the items of all boxes that contain a packet. Fields are looked up in the order `order`."""

    def __init__(self, boxes: Sequence[tuple[Header, Item]], order: Sequence[int], whole: Header | None = None) -> None:
        """Index boxes with their items; of boxes that overlap, the first comes first. `whole` is the box of all packets.

        Fields of which boxes have all values are not compared then: a tenth of the time for rules like kube-proxy's.
        """
        self._order = tuple(order)
        self._whole = whole
        self._boxes = boxes
        self._used: list[_Node[Item]] = []
        self._root = self._build(list(range(len(boxes))), 0)

    def _build(self, numbers: list[int], level: int) -> _Child[Item]:
        boxes = self._boxes
        if level == len(self._order):
            return tuple(boxes[number][1] for number in numbers)
        if len(numbers) <= _FEW and level > 0:
            fields = [self._narrow(boxes[number][0], level) for number in numbers]
            return _Rest(numbers, fields) if any(fields) else tuple(boxes[number][1] for number in numbers)
        field = self._order[level]
        found = segments([boxes[number][0][field] for number in numbers])
        return _Node([(part, self._build([numbers[at] for at in active], level + 1)) for part, active in found])

    def _narrow(self, box: Header, level: int) -> tuple[int, ...]:
        """Return the fields from a level on of which a box does not have all values."""
        whole = self._whole
        return tuple(field for field in self._order[level:] if whole is None or box[field] != whole[field])

    def forget(self) -> None:
        """Drop what is known of boxes that were split."""
        for node in self._used:
            node.forget()
        self._used.clear()

    def split(self, box: Header) -> Pieces[Item]:
        """Split a box into disjoint boxes, each with the items of the boxes that contain it: none where no box is."""
        found: Pieces[Item] = []
        self._split(self._root, 0, box, found)
        return found

    def _split(self, node: _Child[Item], level: int, box: Header, found: Pieces[Item]) -> None:
        while isinstance(node, _Node):
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
        if isinstance(node, _Rest):
            found += self._compared(node, box)
            return
        for part, child in node.split(desired, self._used):
            smaller = box if part is desired else (*box[:field], part, *box[field + 1 :])
            if child is None:
                found.append((smaller, ()))
            else:
                self._split(child, level + 1, smaller, found)

    def _compared(self, rest: _Rest, box: Header) -> Pieces[Item]:
        """Split a box along few other boxes."""
        pieces: Pieces[Item] = [(box, ())]
        for number, fields in zip(rest.numbers, rest.fields, strict=True):
            element, item = self._boxes[number]
            after: Pieces[Item] = []
            for piece, items in pieces:
                inside: Header | None = piece
                outside: list[Header] = []
                for field in fields:
                    assert inside is not None
                    have, desired = inside[field], element[field]
                    if have is desired:
                        continue
                    part = have & desired
                    if not part:
                        inside, outside = None, [piece]
                        break
                    if part.size != have.size:
                        outside.append((*inside[:field], have - desired, *inside[field + 1 :]))
                        inside = (*inside[:field], part, *inside[field + 1 :])
                if inside is not None:
                    after.append((inside, (*items, item)))
                after += [(part, items) for part in outside]
            pieces = after
        return pieces
