"""Evidence by reference: the whole documents behind short answers, and parts of them.

A reference is `narthex://evidence/NUMBER` with an optional path of keys and indexes. A part that is too large to read at once is
returned as an outline, whose lines are references to smaller parts.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import msgspec

from narthex.trace.agents.requests import RequestError

SCHEME = "narthex://evidence/"
_REFERENCE = re.compile(r"narthex://evidence/(\d{1,9})((?:/[^/\x00-\x1f]{1,300}){0,64})")
MOST_DOCUMENTS, MOST_BYTES = 32, 128_000_000
LONGEST_PART = 24_000
"""Bytes of JSON that are returned at once."""
_MOST_LINES = 200


class EvidenceStore:
    """The latest documents, bounded in number and bytes. Not thread-safe."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._last = 0

    def add(self, document: Any, size: int) -> str:
        """Store a document of `size` bytes, drop the oldest ones if there is no room, and return its reference."""
        self._last += 1
        self._held[self._last] = document, size
        self._bytes += size
        while len(self._held) > MOST_DOCUMENTS or (self._bytes > MOST_BYTES and len(self._held) > 1):
            _, (_, gone) = self._held.popitem(last=False)
            self._bytes -= gone
        return f"{SCHEME}{self._last}"

    def references(self) -> list[tuple[str, str]]:
        """Return the reference of each document with its kind, the newest first."""
        return [
            (f"{SCHEME}{number}", str(document.get("kind", "")))
            for number, (document, _) in reversed(self._held.items())
        ]

    def read(self, reference: str) -> Any:
        """Return the part that a reference names, or its outline if it is too large. Raises RequestError."""
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise RequestError(f"{reference[:80]!r} is no reference: copy one from an answer, such as {SCHEME}1")
        number = int(match[1])
        if number not in self._held:
            raise RequestError(f"{SCHEME}{number} is not kept any more: repeat the request that gave it")
        part: Any = self._held[number][0]
        for key in match[2].split("/")[1:]:
            part = _inside(part, key, reference)
        return part if len(msgspec.json.encode(part)) <= LONGEST_PART else _outline(part, reference)


def _inside(part: Any, key: str, reference: str) -> Any:
    if isinstance(part, dict) and key in part:
        return part[key]
    if isinstance(part, list) and key.isdecimal() and int(key) < len(part):
        return part[int(key)]
    have = (
        ", ".join(list(part)[:20])
        if isinstance(part, dict)
        else f"0 to {len(part) - 1}"
        if isinstance(part, list)
        else "nothing"
    )
    raise RequestError(f"{reference}: there is no {key!r}; there is {have}")


def _outline(part: Any, reference: str) -> Any:
    if isinstance(part, str):
        return part[:LONGEST_PART] + "…"
    items = list(part.items() if isinstance(part, dict) else enumerate(part))
    lines = [
        {"reference": f"{reference}/{key}", "bytes": len(msgspec.json.encode(value))}
        for key, value in items[:_MOST_LINES]
    ]
    return {"outline": lines, "left_out": max(0, len(items) - _MOST_LINES)}
