"""Decoder of the chunked coding of HTTP/1.1 (RFC 9112, section 7.1). Pure.

A server sends each line of a watch as one chunk. The decoder returns together what arrived together.
"""

from __future__ import annotations

import re
from enum import Enum

_LONGEST_LINE = 16384
"""Bytes of a chunk's head with its extensions, and of all trailers together."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f]*)?")


class ChunkError(ValueError):
    """The received bytes violate the chunked coding."""


class _Next(Enum):
    SIZE = 0
    CONTENT = 1
    FOOT = 2
    TRAILER = 3
    NOTHING = 4


class ChunkDecoder:
    """Decodes a chunked body that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._next = _Next.SIZE
        self._left = 0
        """Bytes of this chunk's content that are still to come."""
        self._rest = b""
        self._trailers = 0

    @property
    def ended(self) -> bool:
        """Return True once the body is complete."""
        return self._next is _Next.NOTHING

    @property
    def beyond(self) -> bytes:
        """Return the bytes that followed the end of the body."""
        return self._rest if self.ended else b""

    def feed(self, data: bytes) -> bytes:
        """Return the content in `data`, which may be empty. Raises ChunkError."""
        data, at = self._rest + data if self._rest else data, 0
        found: list[bytes] = []
        while not self.ended:
            if self._next is _Next.CONTENT:
                part = data[at : at + self._left]
                found.append(part)
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
                self._next = _Next.FOOT
            if self._next is _Next.FOOT:
                foot = data[at : at + 2]
                if foot != b"\r\n"[: len(foot)]:
                    raise ChunkError(f"a chunk ends with {foot!r}")
                if len(foot) < 2:
                    break
                at += 2
                self._next = _Next.SIZE
            end = data.find(b"\r\n", at)
            if (len(data) if end < 0 else end) - at > _LONGEST_LINE:
                raise ChunkError("a line between chunks has no end")
            if end < 0:
                break
            self._line(data[at:end])
            at = end + 2
        self._rest = data[at:]
        return found[0] if len(found) == 1 else b"".join(found)

    def _line(self, line: bytes) -> None:
        """Process the head of a chunk or a trailer line."""
        if self._next is _Next.SIZE:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise ChunkError(f"{line[:40]!r} is not the head of a chunk")
            self._left = int(match[1], 16)
            self._next = _Next.CONTENT if self._left else _Next.TRAILER
        elif line:
            self._trailers += len(line)
            if self._trailers > _LONGEST_LINE:
                raise ChunkError("the trailers have no end")
        else:
            self._next = _Next.NOTHING
