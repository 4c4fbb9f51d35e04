"""One HTTP/1.1 connection: requests in, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, unquote

from narthex.lab.api.requests import Request

MOST_BODY = 3 * 1024 * 1024
"""Bytes of a request's body, as upstream."""


class Malformed(Exception):
    """The bytes are no request that can be answered; `code` is what to say."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Connection:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.news = asyncio.Event()
        """Set when a stream that is open here may have something new."""
        self.gone = False

    async def request(self) -> Request | None:
        """The next request, None when there is none. Raises Malformed."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except asyncio.LimitOverrunError:
            raise Malformed(431, "the request's head is too long") from None
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise Malformed(400, "this is no request of HTTP/1.1")
        method, target, _ = parts
        headers = _headers(lines)
        body = await self._body(headers)
        if not target.startswith("/"):
            # As it is written to a proxy (RFC 9112, 3.2.2): scheme and host are not of interest.
            target = "/" + target.partition("://")[2].partition("/")[2]
        path, _, query = target.partition("?")
        pairs = tuple(parse_qsl(query, keep_blank_values=True))
        return Request(method, unquote(path), dict(pairs), headers, body, pairs)

    async def whole(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
        """An answer in one piece."""
        await self.head(code, {**headers, "Content-Length": str(len(body))})
        await self.write(body)

    async def head(self, code: int, headers: Mapping[str, str]) -> None:
        """The status and headers."""
        lines = "".join(f"{name}: {_line(value)}\r\n" for name, value in headers.items())
        await self.write(f"HTTP/1.1 {code} {_PHRASES.get(code, '-')}\r\n{lines}\r\n".encode())

    async def chunks(self, pieces: Sequence[bytes]) -> None:
        """Parts of a stream, each a chunk of its own, as upstream sends events."""
        if pieces:
            await self.write(b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces))

    async def last_chunk(self) -> None:
        """A stream's end."""
        await self.write(b"0\r\n\r\n")

    async def write(self, data: bytes) -> None:
        """Send."""
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """End it without ceremony."""
        self.gone = True
        self.news.set()
        self.writer.transport.abort()

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("expect", "").lower() == "100-continue":
            await self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return await self._chunked()
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise Malformed(400, f"Content-Length: {length!r} is not a number")
        if int(length) > MOST_BODY:
            raise Malformed(413, f"Request body is too large: limit is {MOST_BODY}")
        return await self.reader.readexactly(int(length))

    async def _chunked(self) -> bytes:
        body = b""
        while True:
            line = (await self.reader.readuntil(b"\r\n")).partition(b";")[0].strip()
            try:
                length = int(line, 16)
            except ValueError:
                raise Malformed(400, "a chunk begins with its length") from None
            if length < 0 or len(body) + length > MOST_BODY:
                raise Malformed(413, f"Request body is too large: limit is {MOST_BODY}")
            if not length:
                while (await self.reader.readuntil(b"\r\n")).strip():
                    pass
                return body
            body += (await self.reader.readexactly(length + 2))[:-2]


def _headers(lines: Sequence[str]) -> dict[str, str]:
    """Names in lower case; what comes several times is one list (RFC 9110, 5.3)."""
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            key = name.strip().lower()
            found[key] = f"{found[key]}, {value.strip()}" if key in found else value.strip()
    return found


def _line(value: str) -> str:
    """A header's value: what could end the line is not let through."""
    return value.replace("\r", " ").replace("\n", " ")


_PHRASES = {
    101: "Switching Protocols",
    200: "OK",
    201: "Created",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    406: "Not Acceptable",
    409: "Conflict",
    410: "Gone",
    413: "Request Entity Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Entity",
    500: "Internal Server Error",
    504: "Gateway Timeout",
}
