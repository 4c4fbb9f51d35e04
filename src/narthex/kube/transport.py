"""HTTP/1.1 transport of the API client, for servers that are reached without a proxy, and the decoder of its chunks.

httpx2's own transport passes each chunk of a response through a dozen layers, and a watch sends a chunk for each
line, which costs more than decoding the objects. This transport returns together what arrived together. h11 handles
requests and the heads of responses; TLS settings come from lightkube; retries and timeouts belong to the callers.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from asyncio import sslproto
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, cast

import h11
import httpx2

_MOST_WAITING = 1024 * 1024
"""Bytes that may wait for their reader before the socket is paused."""
_KEPT_SECONDS = 5.0
"""An idle connection is not reused after this; servers close theirs later."""

_TLS_BUFFER_BYTES = 32 * 1024
"""Buffer of each TLS connection, which is two records; asyncio takes 256 KiB, and a node has a dozen watches."""
sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES

_Origin = tuple[str, str, int]


class ApiTransport(httpx2.AsyncBaseTransport):
    """A transport for one asyncio loop, with reuse of idle connections."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        """Prepare a transport. Without `context`, https is refused."""
        self._context = context
        self._idle: list[tuple[float, _Connection]] = []
        self._open: set[_Connection] = set()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and read the head of the response. Raises httpx2.TransportError."""
        times = request.extensions.get("timeout", {})
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        origin = request.url.scheme, request.url.raw_host.decode("ascii"), port
        connection = self._kept(origin)
        if connection is None:
            name = request.extensions.get("sni_hostname") or origin[1]
            with _said_as(httpx2.ConnectError, httpx2.ConnectTimeout):
                async with asyncio.timeout(times.get("connect")):
                    connection = await self._connect(origin, name)
        try:
            with _said_as(httpx2.WriteError, httpx2.WriteTimeout):
                async with asyncio.timeout(times.get("write")):
                    await connection.send(request)
            with _said_as(httpx2.ReadError, httpx2.ReadTimeout):
                async with asyncio.timeout(times.get("read")):
                    head, rest = await connection.head()
        except BaseException:
            self._drop(connection)
            raise
        return httpx2.Response(
            head.status_code,
            headers=head.headers.raw_items(),
            stream=_Body(self, connection, request, head, rest),
            extensions={"network_stream": connection.wire},
        )

    async def aclose(self) -> None:
        """Close all connections, also those in use."""
        for connection in tuple(self._open):
            self._drop(connection)
        while self._open:  # The loop closes their sockets in its next turns, and there may be none after this.
            await asyncio.sleep(0)

    async def _connect(self, origin: _Origin, name: str) -> _Connection:
        scheme, host, port = origin
        if scheme == "https" and self._context is None:
            raise httpx2.UnsupportedProtocol(f"{host}: this client was not made for https")
        more: dict[str, Any] = {"ssl": self._context, "server_hostname": name} if scheme == "https" else {}
        if ":" not in host and not host.replace(".", "").isdigit():
            # One of its addresses may be dead. (asyncio's race leaves a socket to the collector when it is cancelled.)
            more["happy_eyeballs_delay"] = 0.25
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(origin, self._open), host, port, **more
        )
        return connection

    def _kept(self, origin: _Origin) -> _Connection | None:
        """Return an idle connection that the server has not closed."""
        now, idle, self._idle = asyncio.get_running_loop().time(), self._idle, []
        found = None
        for until, connection in idle:
            if now > until or connection.spent:
                self._drop(connection)
            elif found is None and connection.origin == origin:
                found = connection
            else:
                self._idle.append((until, connection))
        return found

    def done(self, connection: _Connection, *, good: bool) -> None:
        """Reuse a connection whose response was read completely; close others."""
        if good and not connection.spent:
            self._idle.append((asyncio.get_running_loop().time() + _KEPT_SECONDS, connection))
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._idle = [(until, each) for until, each in self._idle if each is not connection]
        connection.wire.abort()


class _Connection(asyncio.Protocol):
    """A connection that carries one request after another."""

    def __init__(self, origin: _Origin, open: set[_Connection]) -> None:
        """Prepare a connection. It is in `open` while it has a socket."""
        self.origin = origin
        self._open = open
        self.wire: asyncio.Transport
        self._machine: h11.Connection | None = None
        """While the head of a response is awaited."""
        self._came: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: Exception | None = None
        self._turn: asyncio.Future[None] | None = None
        """Done once data has arrived or sending may continue."""
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and register the connection as open."""
        self.wire = cast(asyncio.Transport, transport)
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        """Keep the bytes for the reader; pause the socket if too many wait."""
        self._came.append(data)
        self._size += len(data)
        if self._size >= _MOST_WAITING:
            self.wire.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """Note that the server sends nothing more, and let asyncio close the transport."""
        self._ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end and its error, which the reader raises."""
        self._open.discard(self)
        self._ended, self._error = True, error
        self._wake()

    def pause_writing(self) -> None:
        """Note that the transport's buffer is full; `send` waits."""
        self._full = True

    def resume_writing(self) -> None:
        """Let a waiting `send` continue: the transport's buffer has room."""
        self._full = False
        self._wake()

    def _wake(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None and not turn.done():
            turn.set_result(None)

    async def _wait(self) -> None:
        self._turn = asyncio.get_running_loop().create_future()
        await self._turn

    @property
    def spent(self) -> bool:
        """Return True if the server has closed the connection or sent unrequested data."""
        return self._ended or bool(self._came) or self.wire.is_closing()

    async def send(self, request: httpx2.Request) -> None:
        """Write the whole request; return when the transport has taken it or the server has hung up."""
        self._machine = machine = h11.Connection(h11.CLIENT)
        asked = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        head = machine.send(asked)
        body = [machine.send(h11.Data(data=part)) async for part in cast(AsyncIterable[bytes], request.stream)]
        self.wire.write(b"".join(filter(None, [head, *body, machine.send(h11.EndOfMessage())])))
        # A server may answer and hang up before it has read everything.
        while self._full and not self._ended:
            await self._wait()

    async def head(self) -> tuple[h11.Response, bytes]:
        """Return the head of the response and the bytes that followed it."""
        machine, self._machine = self._machine, None
        assert machine is not None
        while True:
            event = machine.next_event()
            if isinstance(event, h11.Response):
                return event, machine.trailing_data[0]
            if event is h11.NEED_DATA:
                if not (data := await self.read()):
                    raise httpx2.RemoteProtocolError("the server hung up without an answer")
                machine.receive_data(data)

    async def read(self) -> bytes:
        """Return all data that has arrived; empty at the end of the stream."""
        while not self._came:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            await self._wait()
        came, self._came, self._size = self._came, [], 0
        self.wire.resume_reading()
        return came[0] if len(came) == 1 else b"".join(came)


class _Body(httpx2.AsyncByteStream):
    """The body of a response. Read once, and closed by its reader."""

    def __init__(
        self, transport: ApiTransport, connection: _Connection, request: httpx2.Request, head: h11.Response, rest: bytes
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._patience: float | None = request.extensions.get("timeout", {}).get("read")
        self._rest = rest
        fields = dict(head.headers)
        self._chunked = b"transfer-encoding" in fields
        """h11 refuses any other transfer coding."""
        self._length: int | None = None
        if request.method == "HEAD" or head.status_code in (204, 304):
            self._chunked, self._length = False, 0
        elif not self._chunked and b"content-length" in fields:
            self._length = int(fields[b"content-length"])
        asked = (request.headers.get("connection", ""), fields.get(b"connection", b"").decode("latin-1"))
        self._lasting = head.http_version == b"1.1" and not any("close" in words.lower() for words in asked)
        self._whole = self._closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks() if self._chunked else self._plain()

    async def aclose(self) -> None:
        """Return the connection to the transport."""
        if not self._closed:
            self._closed = True
            self._transport.done(self._connection, good=self._whole and self._lasting)

    async def _chunks(self) -> AsyncIterator[bytes]:
        chunks, data, self._rest = ChunkDecoder(), self._rest, b""
        while True:
            try:
                part = chunks.feed(data)
            except ChunkError as error:
                raise httpx2.RemoteProtocolError(str(error)) from error
            if part:
                yield part
            if chunks.ended:
                self._whole = not chunks.beyond
                return
            # What was read is not kept while the next is awaited, which takes minutes in a watch.
            data = part = b""
            if not (data := await self._more()):
                raise httpx2.RemoteProtocolError("the connection ended before its answer was complete")

    async def _plain(self) -> AsyncIterator[bytes]:
        """Yield a body of known length, or one that ends with the connection."""
        left, data = self._length, self._rest
        while left is None or left > 0:
            if data:
                yield data if left is None else data[:left]
                if left is not None and (left := left - len(data)) <= 0:
                    break
            if not (data := await self._more()):
                if left is None:
                    break
                raise httpx2.RemoteProtocolError("the connection ended before its answer was complete")
        self._whole = left == 0

    async def _more(self) -> bytes:
        with _said_as(httpx2.ReadError, httpx2.ReadTimeout):
            if self._patience is None:
                return await self._connection.read()
            async with asyncio.timeout(self._patience):
                return await self._connection.read()


@contextmanager
def _said_as(error: type[httpx2.TransportError], late: type[httpx2.TransportError]) -> Iterator[None]:
    """Convert the exceptions of sockets, TLS, and h11 to those of httpx2."""
    try:
        yield
    except TimeoutError as timeout:
        raise late(str(timeout) or "it took too long") from timeout
    except (OSError, ssl.SSLError) as wrong:
        raise error(str(wrong)) from wrong
    except h11.RemoteProtocolError as wrong:
        raise httpx2.RemoteProtocolError(str(wrong)) from wrong
    except h11.LocalProtocolError as wrong:
        raise httpx2.LocalProtocolError(str(wrong)) from wrong


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
    """Decodes a body in the chunked coding (RFC 9112, section 7.1) that arrives in pieces of any size. Without I/O."""

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
