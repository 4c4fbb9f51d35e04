"""One client's connection: HTTP/1.1 framing without I/O (the protocol itself is h11's), and the connection on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import NamedTuple

import h11

from narthex.runtime.http import ChunkedResponse, HttpRequest, HttpResponse, Responder, SlowResponse
from narthex.runtime.logs import LOGGER

HeaderFields = Iterable[tuple[str, str]]


class HttpLimits(NamedTuple):
    """Sizes, in bytes, beyond which a request is rejected."""

    head: int = 16 * 1024
    body: int = 3 * 1024 * 1024


class MalformedRequest(Exception):
    """A request that cannot be read. `status` is the HTTP status to answer with."""

    def __init__(self, status: int, message: str) -> None:
        """Create the error."""
        super().__init__(message)
        self.status = status


class RequestFraming:
    """The server side of one connection. Requests are answered one after the other."""

    def __init__(self, limits: HttpLimits = HttpLimits()) -> None:  # noqa: B008 - immutable
        """Start before the first request."""
        self._limits = limits
        self._unparsed = bytearray()
        self._exchange: h11.Connection | None = None
        self._head: HttpRequest | None = None
        self._body = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._exchange is not None:
            self._exchange.receive_data(data)
        else:
            self._unparsed += data

    def next_head(self) -> HttpRequest | None:
        """Return the next request without its body, or None until its head is complete. Raises MalformedRequest."""
        if self._exchange is not None:
            if not self.persistent:
                return self._head
            self._next_exchange()
        end = self._unparsed.find(b"\r\n\r\n") + 4
        if end < 4 or end > self._limits.head:
            if len(self._unparsed) > self._limits.head:
                raise MalformedRequest(431, "the request's head is too long")
            return None
        head, rest = bytes(self._unparsed[:end]), bytes(self._unparsed[end:])
        self._unparsed.clear()
        # h11 is given whole heads only, so its own limit never applies.
        exchange = h11.Connection(h11.SERVER, max_incomplete_event_size=self._limits.head + 1024)
        exchange.receive_data(_tolerated(head))
        self._exchange = exchange
        self._head = self._read_head(exchange)
        if rest:
            exchange.receive_data(rest)
        return self._head

    def next_request(self) -> HttpRequest | None:
        """Return the next request, or None until it is complete. Raises MalformedRequest."""
        if self._head is None or self.persistent:
            self.next_head()
        if self._head is None or self._exchange is None:
            return None
        while True:
            event = self._next_event(self._exchange)
            if isinstance(event, h11.Data):
                self._body += event.data
                self._check_length(len(self._body))
            elif isinstance(event, h11.EndOfMessage):
                return self._head._replace(body=bytes(self._body))
            else:
                return None

    def interim(self) -> bytes:
        """Return the `100 Continue` that the client waits for, or nothing."""
        if self._exchange is None or not self._exchange.they_are_waiting_for_100_continue:
            return b""
        return self._exchange.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")) or b""

    @property
    def persistent(self) -> bool:
        """True if the present exchange is complete and another request may follow it."""
        exchange = self._exchange
        return exchange is not None and exchange.our_state is h11.DONE and exchange.their_state is h11.DONE

    @property
    def idle(self) -> bool:
        """True between requests, when no byte of the next one has been received."""
        return not self.trailing() and (self._exchange is None or self.persistent)

    def response_head(self, status: int, fields: HeaderFields) -> bytes:
        """Return the head of a response. Without Content-Length, its body is chunked, or ends with the connection."""
        reason = HTTPStatus(status).phrase if status in _KNOWN else "-"
        headers = [(name.encode(), _one_line(value)) for name, value in fields]
        kind = h11.InformationalResponse if status < 200 else h11.Response
        return self._sent(kind(status_code=status, headers=headers, reason=reason.encode()))

    def body(self, pieces: Sequence[bytes]) -> bytes:
        """Return pieces of a response's body. Each is a chunk of its own if the body is chunked."""
        return b"".join(self._sent(h11.Data(data=piece)) for piece in pieces if piece)

    def end(self) -> bytes:
        """Return what ends a response's body."""
        return self._sent(h11.EndOfMessage())

    def response(self, status: int, body: bytes, fields: HeaderFields) -> bytes:
        """Return a whole response. That to HEAD has no body, but the length of one."""
        first, *others = fields
        head = self.response_head(status, [first, ("Content-Length", str(len(body))), *others])
        has_body = self._head is None or self._head.method != "HEAD"
        return head + (self.body([body]) if has_body else b"") + self.end()

    def trailing(self) -> bytes:
        """Return the bytes that were received after the request."""
        return self._exchange.trailing_data[0] if self._exchange is not None else bytes(self._unparsed)

    def take_trailing(self) -> bytes:
        """Return the bytes after the request, once: the connection does not speak HTTP any more."""
        left, self._unparsed, self._exchange = self.trailing(), bytearray(), None
        return left

    def _sent(self, event: h11.Event) -> bytes:
        if self._exchange is None:
            # The head was too long, or the server refuses before it has read one.
            self._exchange = h11.Connection(h11.SERVER)
        return self._exchange.send(event) or b""

    def _next_exchange(self) -> None:
        self._unparsed += self.trailing()
        self._exchange = self._head = None
        self._body.clear()

    def _next_event(self, exchange: h11.Connection) -> object:
        try:
            return exchange.next_event()
        except h11.RemoteProtocolError as error:
            raise MalformedRequest(400, f"the request is not HTTP/1.1: {error}") from None

    def _read_head(self, exchange: h11.Connection) -> HttpRequest:
        event = self._next_event(exchange)
        if not isinstance(event, h11.Request) or not event.http_version.startswith(b"1."):
            raise MalformedRequest(400, "the request is not HTTP/1.1")
        headers: dict[str, str] = {}
        for name, value in event.headers:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        if headers.get("content-length", "").isdigit():
            self._check_length(int(headers["content-length"]))
        target = event.target.decode("latin-1")
        if not target.startswith("/"):
            # The absolute form, as a client sends it to a proxy (RFC 9112, 3.2.2): scheme and host do not matter here.
            target = target if target == "*" else "/" + target.partition("://")[2].partition("/")[2]
        path, _, query = target.partition("?")
        return HttpRequest(event.method.decode(), path, query, headers)

    def _check_length(self, length: int) -> None:
        if length > self._limits.body:
            raise MalformedRequest(413, f"Request body is too large: limit is {self._limits.body}")


_KNOWN = frozenset(HTTPStatus)


def _one_line(value: str) -> bytes:
    """Return a header field's value without anything that could end its line."""
    return value.replace("\r", " ").replace("\n", " ").strip().encode()


def _tolerated(head: bytes) -> bytes:
    """Return a request's head in the form that h11 requires.

    Health checks of simple load balancers and `printf | nc` send no Host field with HTTP/1.1, and Go's servers accept bytes
    above 127 in a path. h11 rejects both.
    """
    line, _, rest = head.partition(b"\r\n")
    if not line.isascii():
        line = b"".join(b"%c" % byte if byte < 128 else b"%%%02X" % byte for byte in line)
    if b"\r\nhost:" not in b"\r\n" + rest.lower():
        rest = b"Host: \r\n" + rest
    return line + b"\r\n" + rest


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
        self.on_waiting: Callable[[bool], object] = lambda _: None
        """Called with True when the server begins to wait for the client, and with False when the client has moved.

        A connection begins with the server waiting.
        """
        self._is_waiting = True

    def note_waiting(self, is_waiting: bool) -> None:
        """Note whether the server waits for the client."""
        if is_waiting is not self._is_waiting:
            self._is_waiting = is_waiting
            self.on_waiting(is_waiting)

    async def head(self) -> HttpRequest | None:
        """Return the next request without its body, None if the client sends no more. Raises MalformedRequest."""
        self.note_waiting(True)
        while (request := self.framing.next_head()) is None:
            if not (data := await self.reader.read(_RECEIVE_BYTES)):
                return None
            self.framing.feed(data)
        self.note_waiting(False)
        return request

    async def request(self) -> HttpRequest | None:
        """Return the next request, None if the client sends no more. Raises MalformedRequest."""
        self.note_waiting(True)
        while (request := self.framing.next_request()) is None:
            if interim := self.framing.interim():
                await self.write(interim)
            if not (data := await self.reader.read(_RECEIVE_BYTES)):
                return None
            self.framing.feed(data)
        self.note_waiting(False)
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
        self.note_waiting(True)
        await self.writer.drain()
        self.note_waiting(False)

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
        connection.note_waiting(True)
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
