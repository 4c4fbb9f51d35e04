"""Elements of a map from a key and a slot number to an address and a port.

A large cluster has half a million of them, most of its rule set. They are stored by key, each with its tuple of endpoints.
Keys of single elements are built only on access. The encoder works on columns and does not need them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, repeat

from narthex.model import IPFamily
from narthex.netfilter.ast import ElementData, ElementKey, Key, Set
from narthex.netfilter.netlink import elements

Slots = tuple[tuple[str, int], ...]
"""Addresses and ports by slot number, without gaps."""

_BATCH = 256
"""Number of keys whose elements are encoded together."""


class SlotMap(Mapping[ElementKey, ElementData]):
    """Map elements by key and slot number. `runs` is filled first and must not change afterwards."""

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
        """Return the elements that `other` does not have, or has with other data."""
        found: dict[ElementKey, ElementData] = {}
        for key, slots in self.runs.items():
            theirs = other.runs.get(key, ())
            for number, one in enumerate(slots):
                if number >= len(theirs) or theirs[number] != one:
                    found[*key, number] = one
        return found


def encode_slots(one: Set, family: IPFamily, slots: SlotMap) -> Iterator[bytes]:
    """Encode all elements of a map to endpoints as NFTA_LIST_ELEM attributes, in order.

    Raises Unprintable for an element that does not fit.
    """
    pack, one_by_one = _packer(one.name, one.key, family)
    rest = iter(slots.runs.items())
    while some := list(islice(rest, _BATCH)):
        try:
            made = pack(some)
        except elements.MISFITS:
            # One by one, to find the element that does not fit.
            pairs = [((*prefix, slot), one) for prefix, run in some for slot, one in enumerate(run)]
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
        """Return one netlink attribute for each slot of each key; slots of a key are numbered from 0."""
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
