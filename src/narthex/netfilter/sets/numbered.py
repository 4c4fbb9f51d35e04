"""Immutable mappings from numbers, such as addresses and ports, to items, which are found by sets of numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from immutables import Map

from narthex.netfilter.sets.values import ValueSet

Item = TypeVar("Item")


class NumberedItems(Generic[Item]):
    """A mapping from numbers to items. A changed version shares with this one all that did not change."""

    __slots__ = ("_order", "items")

    def __init__(self, items: Mapping[int, Item] | None = None) -> None:
        self.items: Map[int, Item] = items if isinstance(items, Map) else Map(items or {})
        self._order: list[int] | None = None
        """The numbers in order, once an interval was looked up."""

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, number: int) -> bool:
        return number in self.items

    def get(self, number: int) -> Item | None:
        """Return the item of a number, None if it has none."""
        return self.items.get(number)

    def with_item(self, number: int, item: Item | None) -> NumberedItems[Item]:
        """Return the mapping with another item for a number; None removes it."""
        known = number in self.items
        if item is None and not known:
            return self
        made = NumberedItems(self.items.delete(number) if item is None else self.items.set(number, item))
        order = self._order
        if order is not None and known is (item is None):
            order = order.copy()
            if item is None:
                del order[bisect_left(order, number)]
            else:
                insort(order, number)
        made._order = order
        return made

    def chosen(self, desired: ValueSet) -> Iterator[Item]:
        """Yield the items whose numbers are in a set."""
        items = self.items
        for first, last in desired.spans:
            if first == last:
                if first in items:
                    yield items[first]
                continue
            if self._order is None:
                self._order = sorted(items)
            order = self._order
            for number in order[bisect_left(order, first) : bisect_right(order, last)]:
                yield items[number]
