"""Domain names as text and in wire form (RFC 1035 section 3.1).

Wire form is uncompressed: each label after its length byte, then a zero byte. Two names are equal if their wire forms are
equal in lower case; only ASCII letters have a case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

MAX_NAME = 255
"""Bytes of a name in wire form."""
MAX_LABEL = 63
ROOT = b"\0"

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_*/")
_LABEL_BYTES = _PLAIN | frozenset(b"+=:~^%&!?,|[]{}<>#'`")


def wire(text: str) -> bytes:
    r"""Return the wire form of a name in its original case. A trailing dot makes no difference, and `.` is the root.

    Escapes (`\.`, `\032`) are read as in zone files. Raises ValueError for empty or long labels, blanks, control characters, and
    anything outside ASCII.
    """
    if text in (".", ""):
        if not text:
            raise ValueError("is empty; the root is written as .")
        return ROOT
    labels: list[bytes] = []
    label = bytearray()
    at = 0
    ended = False
    while at < len(text):
        char = text[at]
        at += 1
        ended = char == "."
        if ended:
            labels.append(bytes(label))
            label.clear()
        elif char == "\\":
            digits = text[at : at + 3]
            if len(digits) == 3 and digits.isascii() and digits.isdecimal() and int(digits) < 256:
                label.append(int(digits))
                at += 3
            elif at < len(text) and text[at].isascii() and not digits[:1].isdecimal():
                label.append(ord(text[at]))
                at += 1
            else:
                raise ValueError("has an escape that is neither \\DDD below 256 nor \\ and a character")
        elif char.isascii() and ord(char) in _LABEL_BYTES:
            label.append(ord(char))
        else:
            raise ValueError(f"holds {char!a}, which is not allowed in a name")
    if not ended:
        labels.append(bytes(label))
    for found in labels:
        if not found:
            raise ValueError("has an empty label")
        if len(found) > MAX_LABEL:
            raise ValueError(f"has a label of {len(found)} characters; {MAX_LABEL} are allowed")
    packed = b"".join(bytes((len(found),)) + found for found in labels) + ROOT
    if len(packed) > MAX_NAME:
        raise ValueError(f"is too long: {len(packed)} bytes where {MAX_NAME} are allowed")
    return packed


def wire_or_none(text: str) -> bytes | None:
    """Return the wire form of a name in lower case, or None if it is invalid."""
    try:
        return wire(text).lower()
    except ValueError:
        return None


def text(name: bytes) -> str:
    """Return a valid wire form as text, with the trailing dot; special characters are escaped as in zone files."""
    parts = []
    for label in labels(name):
        shown = "".join(
            chr(byte) if byte in _LABEL_BYTES else f"\\{chr(byte)}" if byte in b".\\" else f"\\{byte:03d}"
            for byte in label
        )
        parts.append(shown + ".")
    return "".join(parts) or "."


def labels(name: bytes) -> Iterator[bytes]:
    """Yield the labels from first to last, without the root."""
    at = 0
    while name[at]:
        end = at + 1 + name[at]
        yield name[at + 1 : end]
        at = end


def suffixes(name: bytes) -> Iterator[bytes]:
    """Yield the name itself, then its parent, and so on up to the root."""
    at = 0
    while name[at]:
        yield name[at:]
        at += 1 + name[at]
    yield ROOT


def within(name: bytes, zone: bytes) -> bool:
    """Return True if `name` is `zone` or below it. Both are in lower case."""
    if not name.endswith(zone):
        return False
    at, end = 0, len(name) - len(zone)
    while at < end:
        at += 1 + name[at]
    return at == end


def lower_zones(zones: Iterable[str]) -> tuple[bytes, ...]:
    """Return the wire forms of zones, in lower case."""
    return tuple(wire(zone).lower() for zone in zones)


def within_any(name: bytes, zones: Iterable[bytes]) -> bool:
    """Return True if `name` is in one of the zones. All are in lower case."""
    return any(within(name, zone) for zone in zones)


@lru_cache(maxsize=4096)
def label(text: str) -> bytes:
    """Return one ASCII label in wire form, in lower case."""
    data = text.lower().encode("ascii")
    return bytes((len(data),)) + data
