"""Passes a request on to another server, and its response back: for the subresource `proxy`, and for Ingresses.

A request that changes the protocol, such as a WebSocket, becomes a pipe.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import h11

from narthex.lab.server.pods import DIAL_SECONDS, DIALERS
from narthex.runtime.http import Headers
from narthex.runtime.http.connection import HttpConnection

_RECEIVE_BYTES = 64 * 1024
_MAX_PAGE = 8 * 1024 * 1024
"""Bytes of an HTML page whose links are rewritten; of a longer one, the rest is sent as it is."""
_MAX_HEAD = 1024 * 1024
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_OWN = _HOP_BY_HOP | {"host", "content-length", "expect"}
"""Fields of the client that are not passed on: the forwarder has its own."""


class UpstreamError(Exception):
    """A server that cannot be reached, or does not answer as HTTP requires."""


class UpstreamTimeout(UpstreamError):
    """A server that does not begin to answer in time."""


class TargetConnection(NamedTuple):
    """A connection to the server that requests are forwarded to."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class ForwardedRequest(NamedTuple):
    """A request as the server gets it."""

    method: str
    target: str
    fields: tuple[tuple[str, str], ...]
    """Header fields, without those of the connection and the body."""
    body: bytes = b""
    upgrade: str = ""
    """Protocol that the client wants to change to, such as websocket."""

    @property
    def framed(self) -> list[tuple[str, str]]:
        """Header fields with the length of the body."""
        has_body = self.body or self.method in ("POST", "PUT", "PATCH")
        return [*self.fields, *([("Content-Length", str(len(self.body)))] if has_body else [])]


class ResponseRewriter(Protocol):
    """Rewrites links of a response."""

    def url(self, text: str) -> str:
        """Return the URL of a redirect."""

    def page(self, page: bytes) -> bytes:
        """Return an HTML page."""


def passed_on(headers: Headers) -> Iterator[tuple[str, str]]:
    """Yield the fields of a client that the server gets, too."""
    return ((name, value) for name, value in headers.items() if name not in _OWN)


async def connect(dial: Callable[[], socket.socket], *, tls: bool) -> TargetConnection:
    """Connect in a thread of its own. Raises OSError, and what `dial` raises."""
    sock = await asyncio.get_running_loop().run_in_executor(DIALERS, dial)
    if not tls:
        return TargetConnection(*await asyncio.open_connection(sock=sock))
    # As upstream: certificates of pods are not verified.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opened = asyncio.open_connection(sock=sock, ssl=context, server_hostname="", ssl_handshake_timeout=DIAL_SECONDS)
    return TargetConnection(*await opened)


async def forward(
    connection: HttpConnection,
    request: ForwardedRequest,
    upstream: TargetConnection,
    rewriter: ResponseRewriter | None = None,
    seconds: float | None = None,
    keep: bool = False,
) -> bool:
    """Send a request, and the response to the client. Raises UpstreamError before anything is answered.

    `seconds` is the time until the response begins; None: no limit. The server's connection is closed, unless `keep` is True and the
    server allows another request on it: then the result is True. After a change of the protocol, the client's connection is closed, too.
    """
    kept = False
    try:
        if request.upgrade:
            await _pipe(connection, request, upstream)
        else:
            kept = await _exchange(connection, request, upstream, rewriter, seconds, keep)
    finally:
        if not kept:
            upstream.writer.transport.abort()
    return kept


async def _exchange(
    connection: HttpConnection,
    request: ForwardedRequest,
    upstream: TargetConnection,
    rewriter: ResponseRewriter | None,
    seconds: float | None,
    keep: bool,
) -> bool:
    """Return True if the server's connection may have another request."""
    reader, writer = upstream
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
    fields = [*request.framed, *([] if keep else [("Connection", "close")])]
    head = h11.Request(method=request.method, target=request.target, headers=fields)
    parts = [client.send(head), client.send(h11.Data(data=request.body)), client.send(h11.EndOfMessage())]
    try:
        async with asyncio.timeout(seconds):
            writer.write(b"".join(part or b"" for part in parts))
            await writer.drain()
            response = await _next(client, reader)
            while isinstance(response, h11.InformationalResponse):
                response = await _next(client, reader)
    except TimeoutError:
        raise UpstreamTimeout(f"no response within {seconds:g} s") from None
    except (OSError, h11.RemoteProtocolError) as error:
        raise UpstreamError(str(error) or type(error).__name__) from error
    if not isinstance(response, h11.Response):
        raise UpstreamError("EOF")
    await _answer(connection, request, rewriter, response, client, reader)
    return client.our_state is client.their_state is h11.DONE and not client.trailing_data[0]


async def _next(client: h11.Connection, reader: asyncio.StreamReader) -> object:
    while (event := client.next_event()) is h11.NEED_DATA:
        client.receive_data(await reader.read(_RECEIVE_BYTES))
    return event


async def _answer(
    connection: HttpConnection,
    request: ForwardedRequest,
    rewriter: ResponseRewriter | None,
    response: h11.Response,
    client: h11.Connection,
    reader: asyncio.StreamReader,
) -> None:
    """Send a response as it arrives; a page whose links are rewritten is collected first."""
    fields = list(_answered(response, rewriter))
    named = {name.lower(): value for name, value in fields}
    is_page = named.get("content-type", "").partition(";")[0].strip() == "text/html" and request.method != "HEAD"
    bodiless = request.method == "HEAD" or response.status_code in (204, 304)
    first: list[bytes] = []
    if is_page and rewriter is not None:
        page = b""
        while len(page) < _MAX_PAGE and isinstance(event := await _next(client, reader), h11.Data):
            page += event.data
        first = [rewriter.page(page)]
        fields = [(name, value) for name, value in fields if name.lower() != "content-length"]
    if not bodiless and (first or "content-length" not in named):
        fields.append(("Transfer-Encoding", "chunked"))
    await connection.begin(response.status_code, fields)
    await connection.send(first)
    try:
        while client.their_state is h11.SEND_BODY and isinstance(event := await _next(client, reader), h11.Data):
            await connection.send([bytes(event.data)])
    except h11.RemoteProtocolError:
        # The client must not take the part that has arrived for the whole.
        raise ConnectionResetError from None
    await connection.end()


def _answered(response: h11.Response, rewriter: ResponseRewriter | None) -> Iterator[tuple[str, str]]:
    for name, value in response.headers.raw_items():
        key, text = name.decode("latin-1"), value.decode("latin-1")
        if key.lower() == "location" and rewriter is not None:
            text = rewriter.url(text)
        if key.lower() not in _HOP_BY_HOP:
            yield key, text


async def _pipe(connection: HttpConnection, request: ForwardedRequest, upstream: TargetConnection) -> None:
    """Pass bytes on in both directions until one side ends."""
    reader, writer = upstream
    fields = [*request.framed, ("Connection", "Upgrade"), ("Upgrade", request.upgrade)]
    lines = [f"{request.method} {request.target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + request.body + connection.framing.trailing())
    await writer.drain()
    copies = [
        asyncio.ensure_future(_copy(source, target))
        for source, target in ((connection.reader, writer), (reader, connection.writer))
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancelled(copies)
    # The connection no longer speaks HTTP.
    await connection.close()
    raise ConnectionResetError


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_RECEIVE_BYTES):
        target.write(data)
        await target.drain()


async def _cancelled(tasks: Iterable[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
