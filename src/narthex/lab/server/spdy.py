"""SPDY/3.1 frames of a server, without I/O: kubectl before 1.31 speaks it for exec, attach, and port-forward.

Streams are opened by the client alone, and frames are sent without flow control, as Kubernetes' own library does.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length content-location "
    "content-md5 content-range content-type date etag expect expires from host if-match if-modified-since if-none-match "
    "if-range if-unmodified-since last-modified location max-forwards pragma proxy-authenticate proxy-authorization range "
    "referer retry-after server te trailer transfer-encoding upgrade user-agent vary via warning www-authenticate method get "
    "status 200_OK version HTTP/1.1 url public set-cookie keep-alive origin"
)
_TAIL = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-Authoritative "
    "Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not Found500 Internal "
    "Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, "
    "Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,"
    "text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY = (
    b"".join(len(word).to_bytes(4, "big") + word.replace("_", " ").encode() for word in _WORDS.split()) + _TAIL.encode()
)
"""What both sides' compression of headers starts with (SPDY Protocol - Draft 3.1, 2.6.10.1)."""

_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _PING, _GOAWAY = 1, 2, 3, 6, 7
_FIN = 1
_CONTROL = 0x8003
"""The first two bytes of a control frame: a bit, and the version."""
_MAX_FRAME = 4 * 1024 * 1024
_MAX_HEADERS = 64 * 1024
_MAX_STREAMS = 1000
"""Streams of one connection at a time: two for each connection that is forwarded."""


class BadSpdyFrame(ValueError):
    """Bytes that are no SPDY frames, or exceed a limit."""


class SpdyStream(NamedTuple):
    """A stream that the client has opened."""

    number: int
    headers: Mapping[str, str]


class SpdyData(NamedTuple):
    """Data of a stream."""

    number: int
    data: bytes
    last: bool
    """The client sends no more on it."""


class SpdyReset(NamedTuple):
    """A stream that the client has ended at once."""

    number: int


class SpdyFraming:
    """One connection."""

    def __init__(self) -> None:
        """Start before the first frame."""
        self._received = bytearray()
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._deflate = zlib.compressobj(zdict=DICTIONARY)
        self._streams: set[int] = set()
        self._last = 0
        self.pending = b""
        """Bytes to send to the client: replies to new streams and pings."""

    def feed(self, data: bytes) -> Iterator[SpdyStream | SpdyData | SpdyReset]:
        """Yield what has been received completely. Raises BadSpdyFrame."""
        self._received += data
        while len(self._received) >= 8:
            length = int.from_bytes(self._received[5:8], "big")
            if length > _MAX_FRAME:
                raise BadSpdyFrame(f"a frame has at most {_MAX_FRAME} bytes here")
            if len(self._received) < 8 + length:
                return
            head, body = bytes(self._received[:8]), bytes(self._received[8 : 8 + length])
            del self._received[: 8 + length]
            yield from self._control(head, body) if head[0] & 0x80 else self._data(head, body)

    def _data(self, head: bytes, body: bytes) -> Iterator[SpdyData]:
        number = int.from_bytes(head[:4], "big")
        if number in self._streams:
            yield SpdyData(number, body, bool(head[4] & _FIN))

    def _control(self, head: bytes, body: bytes) -> Iterator[SpdyStream | SpdyData | SpdyReset]:
        if int.from_bytes(head[:2], "big") != _CONTROL:
            raise BadSpdyFrame("another version than SPDY/3")
        number = int.from_bytes(body[:4], "big")
        match int.from_bytes(head[2:4], "big"):
            case 1:
                if len(self._streams) >= _MAX_STREAMS:
                    raise BadSpdyFrame(f"a connection has at most {_MAX_STREAMS} streams here")
                headers = self._headers(body[10:])
                self._streams.add(number)
                self._last = max(self._last, number)
                self.pending += self._frame(_SYN_REPLY, number.to_bytes(4, "big") + self._compressed({}))
                yield SpdyStream(number, headers)
                if head[4] & _FIN:
                    yield SpdyData(number, b"", True)
            case 3:
                self._streams.discard(number)
                yield SpdyReset(number)
            case 6:
                self.pending += self._frame(_PING, body)

    def _headers(self, block: bytes) -> dict[str, str]:
        try:
            plain = self._inflate.decompress(block, _MAX_HEADERS)
        except zlib.error as error:
            raise BadSpdyFrame(f"headers cannot be decompressed: {error}") from None
        found, at = {}, 4
        for _ in range(int.from_bytes(plain[:4], "big")):
            words = []
            for _ in range(2):
                length = int.from_bytes(plain[at : at + 4], "big")
                if at + 4 + length > len(plain):
                    raise BadSpdyFrame("headers end too soon")
                words.append(plain[at + 4 : at + 4 + length].decode("latin-1"))
                at += 4 + length
            found[words[0]] = words[1]
        return found

    def _compressed(self, headers: Mapping[str, str]) -> bytes:
        words = [word.encode() for pair in headers.items() for word in pair]
        plain = len(headers).to_bytes(4, "big") + b"".join(len(word).to_bytes(4, "big") + word for word in words)
        return self._deflate.compress(plain) + self._deflate.flush(zlib.Z_SYNC_FLUSH)

    def data(self, number: int, data: bytes, *, last: bool = False) -> bytes:
        """Return a data frame of a stream that is open, otherwise nothing."""
        if number not in self._streams:
            return b""
        return number.to_bytes(4, "big") + bytes((_FIN if last else 0,)) + len(data).to_bytes(3, "big") + data

    def forget(self, number: int) -> None:
        """Note that both sides have ended a stream."""
        self._streams.discard(number)

    def reset(self, number: int) -> bytes:
        """Return the frame that ends a stream at once."""
        if number not in self._streams:
            return b""
        self._streams.discard(number)
        return self._frame(_RST_STREAM, number.to_bytes(4, "big") + (5).to_bytes(4, "big"))

    def goaway(self) -> bytes:
        """Return the frame that ends the connection."""
        return self._frame(_GOAWAY, self._last.to_bytes(4, "big") + bytes(4))

    @staticmethod
    def _frame(kind: int, body: bytes) -> bytes:
        return _CONTROL.to_bytes(2, "big") + kind.to_bytes(2, "big") + b"\0" + len(body).to_bytes(3, "big") + body
