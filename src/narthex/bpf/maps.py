"""Maps of the interpreter: what the kernel's maps do, as Python objects.

A per-CPU map has one value, as on a machine with one processor.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping

from narthex.bpf.specification import MapKind, MapSpec

ANY, NO_EXIST, EXIST = 0, 1, 2
"""Flags of an update: create or replace, create only, replace only."""


class MapModel:
    """The elements of one map. Values are mutable, as programs hold pointers to them."""

    def __init__(self, spec: MapSpec, elements: Mapping[bytes, bytes] | None = None) -> None:
        self.spec = spec
        self._elements: dict[bytes, bytearray] = {}
        self._is_array = spec.kind in (MapKind.ARRAY, MapKind.PERCPU_ARRAY)
        if self._is_array:
            for index in range(spec.max_entries):
                self._elements[index.to_bytes(4, "little")] = bytearray(spec.value_size)
        for key, value in (elements or {}).items():
            if result := self.update(key, value):
                raise ValueError(f"map {spec.name}: element {key.hex()}: {errno.errorcode[-result]}")

    def __len__(self) -> int:
        return len(self._elements)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Return keys and values."""
        return ((key, bytes(value)) for key, value in self._elements.items())

    def find(self, key: bytes) -> bytearray | None:
        """Return the value of a key, or of the longest prefix that contains it; None if there is none."""
        if self.spec.kind is MapKind.LPM_TRIE:
            return self._longest(key)
        if self.spec.kind is MapKind.LRU_HASH and key in self._elements:
            self._elements[key] = self._elements.pop(key)
        return self._elements.get(key)

    def update(self, key: bytes, value: bytes, flags: int = ANY) -> int:
        """Store an element. Return 0, or a negative error number as the kernel does."""
        if len(key) != self.spec.key_size or len(value) != self.spec.value_size:
            return -errno.EINVAL
        known = key in self._elements
        if flags == NO_EXIST and known:
            return -errno.EEXIST
        if flags == EXIST and not known:
            return -errno.ENOENT
        if not known and self._is_array:
            return -errno.E2BIG
        if not known and len(self._elements) >= self.spec.max_entries:
            if self.spec.kind is not MapKind.LRU_HASH:
                return -errno.E2BIG
            del self._elements[next(iter(self._elements))]
        # Replaced, not written to: a program that holds a pointer keeps the former value, as under RCU.
        self._elements[key] = bytearray(value)
        return 0

    def delete(self, key: bytes) -> int:
        """Remove an element. Return 0, or a negative error number as the kernel does."""
        if self._is_array:
            return -errno.EINVAL
        return 0 if self._elements.pop(key, None) is not None else -errno.ENOENT

    def _longest(self, key: bytes) -> bytearray | None:
        """Return the value of the longest prefix. A key is a length in bits (32-bit number), and an address."""
        limit, address = int.from_bytes(key[:4], "little"), int.from_bytes(key[4:], "big")
        bits = 8 * (len(key) - 4)
        best = None
        for stored, value in self._elements.items():
            length = int.from_bytes(stored[:4], "little")
            same = int.from_bytes(stored[4:], "big") >> (bits - length) == address >> (bits - length)
            if length <= limit and same and (best is None or length > best[0]):
                best = length, value
        return best[1] if best else None
