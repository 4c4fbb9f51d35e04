"""One client's connection on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from narthex.runtime.http.framing import HeaderFields, HttpLimits, MalformedRequest, RequestFraming
from narthex.runtime.http.messages import ChunkedResponse, HttpRequest, HttpResponse, Responder, SlowResponse
from narthex.runtime.logs import LOGGER

_RECEIVE_BYTES = 64 * 1024
_REQUEST_SECONDS = 5.0
"""Time for one request and its response on a status port."""
_LINGER_BYTES = 16 * 1024
ONE_REQUEST = HttpLimits(head=16 * 1024, body=1 << 62)
"""Limits of a port that answers a request without reading its body."""


class HttpConnection:
    """A connection from a client. Methods that send raise ConnectionError once the client is gone."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: HttpLimits = HttpLimits(),  # noqa: B008 - immutable
    ) -> None:
        """Wrap a connection."""
        self.reader = reader
        self.writer = writer
        self.framing = RequestFraming(limits)
        self.is_reset = False

    async def head(self) -> HttpRequest | None:
        """Return the next request without its body, None if the client sends no more. Raises MalformedRequest."""
        while (request := self.framing.next_head()) is None:
            if not (data := await self.reader.read(_RECEIVE_BYTES)):
                return None
            self.framing.feed(data)
        return request

    async def request(self) -> HttpRequest | None:
        """Return the next request, None if the client sends no more. Raises MalformedRequest."""
        while (request := self.framing.next_request()) is None:
            if interim := self.framing.interim():
                await self.write(interim)
            if not (data := await self.reader.read(_RECEIVE_BYTES)):
                return None
            self.framing.feed(data)
        return request

    async def respond(self, status: int, body: bytes, headers: HeaderFields) -> None:
        """Send a whole response, in one write."""
        await self.write(self.framing.response(status, body, headers))

    async def begin(self, status: int, headers: HeaderFields) -> None:
        """Send the head of a response whose body follows piece by piece."""
        await self.write(self.framing.response_head(status, headers))

    async def send(self, pieces: Sequence[bytes]) -> None:
        """Send pieces of a response's body, each as a chunk of its own."""
        if data := self.framing.body(pieces):
            await self.write(data)

    async def end(self) -> None:
        """Send the end of a response's body."""
        await self.write(self.framing.end())

    async def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def close(self) -> None:
        """Send what is buffered, then close."""
        self.writer.close()
        await self.writer.wait_closed()

    def reset(self) -> None:
        """Close at once."""
        self.is_reset = True
        self.writer.transport.abort()


async def answer_once(connection: HttpConnection, responder: Responder, seconds: float = 0.0) -> None:
    """Answer one request, then close. A client that sends none, or too large a head, gets no answer."""
    async with asyncio.timeout(seconds or _REQUEST_SECONDS) as limit:
        try:
            request = await connection.head()
        except MalformedRequest as error:
            if error.status != 400:
                return
            response: HttpResponse | ChunkedResponse = HttpResponse(400, b"not an HTTP/1.1 request\n")
        else:
            if request is None:
                return
            response = await _response(responder, request)
        if isinstance(response, ChunkedResponse):
            limit.reschedule(None)
            await _stream(connection, response)
            return
        await connection.respond(response.status, response.body, _headers(response))
        # To close while a request's body arrives would make the kernel discard the response.
        connection.writer.write_eof()
        left = _LINGER_BYTES
        while left > 0 and (data := await connection.reader.read(_RECEIVE_BYTES)):
            left -= len(data)
        await connection.close()


async def _response(responder: Responder, request: HttpRequest) -> HttpResponse | ChunkedResponse:
    try:
        response = responder(request)
        return await asyncio.to_thread(response.make) if isinstance(response, SlowResponse) else response
    except Exception as error:
        LOGGER.error("answering %r: %s: %s", request.path, type(error).__name__, error)
        return HttpResponse(500, b"internal error; see the log\n")


async def _stream(connection: HttpConnection, response: ChunkedResponse) -> None:
    """Send pieces until there are no more, or the client stops sending."""
    await connection.begin(200, [*_headers(response), ("Transfer-Encoding", "chunked")])
    async for piece in response.pieces:
        if connection.reader.at_eof():
            return
        await connection.send([piece])
    await connection.end()
    await connection.close()


def _headers(response: HttpResponse | ChunkedResponse) -> list[tuple[str, str]]:
    return [
        ("Content-Type", response.content_type),
        ("X-Content-Type-Options", "nosniff"),
        *response.headers,
        ("Connection", "close"),
    ]
