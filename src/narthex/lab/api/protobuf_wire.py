"""The wire format of protobuf: varints, and fields with a length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers and values. Strings and nested messages are bytes. Raises ValueError or IndexError."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(data, at)
            yield number, value
        elif wire == 2:
            length, at = varint(data, at)
            if at + length > len(data):
                raise ValueError("the message ends too soon")
            yield number, data[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {wire} is not used by Kubernetes' objects")


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")


def as_bytes(value: int | bytes) -> bytes:
    """Return a value that is a text or a message."""
    if not isinstance(value, bytes):
        raise ValueError("a number where a text belongs")
    return value


def as_number(value: int | bytes) -> int:
    """Return a value that is a number."""
    if not isinstance(value, int):
        raise ValueError("a text where a number belongs")
    return value


def text(number: int, value: str) -> bytes:
    """Encode a string field, unless it is empty."""
    return part(number, value.encode()) if value else b""


def part(number: int, data: bytes) -> bytes:
    """Encode a field with a length."""
    return bytes(_base_128(number << 3 | 2)) + bytes(_base_128(len(data))) + data


def whole(number: int, value: int) -> bytes:
    """Encode a number field; negative numbers take ten bytes, as two's complements."""
    return bytes(_base_128(number << 3)) + bytes(_base_128(value & 0xFFFF_FFFF_FFFF_FFFF))


def _base_128(value: int) -> Iterable[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value
