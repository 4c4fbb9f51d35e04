"""Domain names: text as people write it, wire form as packets hold it.

Wire form is what RFC 1035 3.1 says, uncompressed: each label behind its length, then a zero. Two names are the same
when their lower-case wire forms are; only ASCII letters have a case.
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST = 255
"""Bytes of a name in wire form."""
LONGEST_LABEL = 63
ROOT = b"\0"

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_*/")
_LABEL_BYTES = _PLAIN | frozenset(b"+=:~^%&!?,|[]{}<>#'`")


def wire(text: str) -> bytes:
    """The wire form of a name, case as written; a dot at the end makes no difference, and `.` is the root.

    Raises ValueError for what is no name: empty or long labels, blanks, control characters, anything outside ASCII.
    Escapes (`\\.`, `\\032`) are read as in zone files.
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
        if len(found) > LONGEST_LABEL:
            raise ValueError(f"has a label of {len(found)} characters; {LONGEST_LABEL} are allowed")
    packed = b"".join(bytes((len(found),)) + found for found in labels) + ROOT
    if len(packed) > LONGEST:
        raise ValueError(f"is too long: {len(packed)} bytes where {LONGEST} are allowed")
    return packed


def text(name: bytes) -> str:
    """The name as text, with its dot at the end; what would be misread is escaped. Takes a whole, valid wire form."""
    parts = []
    for label in labels(name):
        shown = "".join(
            chr(byte) if byte in _LABEL_BYTES else f"\\{chr(byte)}" if byte in b".\\" else f"\\{byte:03d}"
            for byte in label
        )
        parts.append(shown + ".")
    return "".join(parts) or "."


def labels(name: bytes) -> Iterator[bytes]:
    """Its labels, first to last, without the root."""
    at = 0
    while name[at]:
        end = at + 1 + name[at]
        yield name[at + 1 : end]
        at = end


def suffixes(name: bytes) -> Iterator[bytes]:
    """The name itself, then what is left without its first label, and so on down to the root."""
    at = 0
    while name[at]:
        yield name[at:]
        at += 1 + name[at]
    yield ROOT


def within(name: bytes, zone: bytes) -> bool:
    """Whether `name` is `zone` or below it. Both in lower case."""
    if not name.endswith(zone):
        return False
    at, end = 0, len(name) - len(zone)
    while at < end:
        at += 1 + name[at]
    return at == end
