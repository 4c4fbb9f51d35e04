"""Netlink attributes: number, length, and padding of what all netlink messages consist of.

A CNI plugin loads this module for each pod, so it imports only `struct`.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NESTED = 0x8000
_TYPE_MASK = 0x3FFF
_HEADER = struct.Struct("=HH")


def attribute(kind: int, payload: bytes) -> bytes:
    """Return a netlink attribute, padded to four bytes."""
    return _HEADER.pack(4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def attributes(
    data: bytes | memoryview, start: int = 0, end: int | None = None, *, strict: bool = True
) -> Iterator[tuple[int, int, int]]:
    """Yield the attributes between two offsets: type, start of the payload, and end of the payload.

    Raises ValueError for a truncated attribute, unless `strict` is False, which stops there.
    """
    stop = len(data) if end is None else end
    while start + 4 <= stop:
        length, kind = _HEADER.unpack_from(data, start)
        if length < 4 or start + length > stop:
            if strict:
                raise ValueError("truncated netlink attribute")
            return
        yield kind & _TYPE_MASK, start + 4, start + length
        start += (length + 3) & ~3


def payloads(data: bytes, start: int = 0) -> dict[int, bytes]:
    """Return the payloads of the attributes from an offset on, by type; of duplicates, the last."""
    return {kind: data[first:end] for kind, first, end in attributes(data, start, strict=False)}
