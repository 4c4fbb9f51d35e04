"""Payloads of netlink messages about netfilter: set elements, rules, connections, and virtual servers.

The functions here encode and decode the attributes that all of them consist of.
"""

import struct
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
