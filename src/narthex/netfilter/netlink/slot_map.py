"""Elements of a map that numbers what stands under a key: key and slot lead to an address and port.

A big cluster has half a million of them, nearly all of a rule set. They are kept by key, each with its tuple of data, and
get keys of their own only for whoever asks for one; to bytes they go in columns, without.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, repeat

from narthex.model.net import IPFamily
from narthex.netfilter.ast import ElementData, ElementKey, Key, Set
from narthex.netfilter.netlink import elements

Slots = tuple[tuple[str, int], ...]
"""Addresses and ports by slot number; no number is free."""

_AT_ONCE = 256
"""Keys of which the elements are encoded together."""


class SlotMap(Mapping[ElementKey, ElementData]):
    """By key and slot. Filled through `runs`, then only read."""

    __slots__ = ("runs",)

    def __init__(self) -> None:
        self.runs: dict[ElementKey, Slots] = {}
        """By the key without its slot."""

    def __getitem__(self, key: ElementKey) -> ElementData:
        slots, number = self.runs.get(key[:-1], ()), key[-1]
        if not isinstance(number, int) or not 0 <= number < len(slots):
            raise KeyError(key)
        return slots[number]

    def __iter__(self) -> Iterator[ElementKey]:
        return ((*key, slot) for key, slots in self.runs.items() for slot in range(len(slots)))

    def __len__(self) -> int:
        return sum(map(len, self.runs.values()))

    def __bool__(self) -> bool:
        return bool(self.runs)

    def without(self, other: SlotMap) -> dict[ElementKey, ElementData]:
        """The elements that the other does not have, or has with other data."""
        found: dict[ElementKey, ElementData] = {}
        for key, slots in self.runs.items():
            theirs = other.runs.get(key, ())
            for number, one in enumerate(slots):
                if number >= len(theirs) or theirs[number] != one:
                    found[*key, number] = one
        return found


def encode(one: Set, family: IPFamily, held: SlotMap) -> Iterator[bytes]:
    """NFTA_LIST_ELEM attributes of all elements of a map to endpoints, in their order. Raises Unprintable for an element
    that does not fit."""
    pack, one_by_one = _packer(one.name, one.key, family)
    rest = iter(held.runs.items())
    while some := list(islice(rest, _AT_ONCE)):
        try:
            made = pack(some)
        except elements.MISFITS:
            # One by one, to know which it is.
            pairs = [((*prefix, slot), one) for prefix, slots in some for slot, one in enumerate(slots)]
            made = list(one_by_one(pairs))
        yield from made


@lru_cache(maxsize=64)
def _packer(
    name: str, key: Key, family: IPFamily
) -> tuple[Callable[[Sequence[tuple[ElementKey, Slots]]], list[bytes]], elements.Encoder]:
    prefix = key[:-1]
    headers = list(elements.nested_headers(elements.size_of(key, family), elements.size_of(elements.ENDPOINT, family)))
    head = struct.Struct("=6H" + elements.layout_of(prefix, family))
    whole = struct.Struct(f"={head.size}sI4H" + elements.layout_of(elements.ENDPOINT, family))
    fill, aim = elements.fillers(prefix, family), elements.fillers(elements.ENDPOINT, family)
    before, between = [repeat(each) for each in headers[:6]], [repeat(each) for each in headers[6:]]

    def pack(runs: Sequence[tuple[ElementKey, Slots]]) -> list[bytes]:
        keys, slots = zip(*runs, strict=True)
        heads = map(head.pack, *before, *elements.columns(fill, keys))
        counts = list(map(len, slots))
        return list(
            map(
                whole.pack,
                chain.from_iterable(map(repeat, heads, counts)),
                chain.from_iterable(map(range, counts)),
                *between,
                *elements.columns(aim, list(chain.from_iterable(slots))),
            )
        )

    return pack, elements.plain_encoder(name, key, elements.ENDPOINT, family)
