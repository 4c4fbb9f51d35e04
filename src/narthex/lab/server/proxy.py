"""The subresource `proxy`: a request goes on to a server in a pod, and its response comes back.

As in apimachinery's util/proxy, links in HTML and redirects to the server's own paths get the prefix that leads to it. A request
that changes the protocol, such as a WebSocket, becomes a pipe.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

import h11

from narthex.lab.api.errors import StatusError, not_implemented
from narthex.lab.api.proxy_path import ProxyRequest
from narthex.lab.api.requests import ApiRequest
from narthex.lab.server.pods import DIAL_SECONDS, DIALERS, PodRuntime
from narthex.model import join_port
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
_NOT_SENT = _HOP_BY_HOP | {"authorization", "host", "content-length", "accept-encoding"}
"""Fields of the client that are not passed on. Responses must not be compressed, since links are rewritten."""
_LINK = re.compile(
    rb"""(\s(?:href|src|action|formaction|cite|background|poster|manifest|data|codebase|longdesc|usemap|profile)\s*=\s*)"""
    rb"""(?:"([^"]*)"|'([^']*)')""",
    re.IGNORECASE,
)
_TAG = re.compile(rb"<[a-zA-Z][^<>]*>")


async def serve_proxy(
    connection: HttpConnection, pods: PodRuntime | None, request: ApiRequest, to: ProxyRequest
) -> None:
    """Pass a request on and send the response. Raises StatusError before anything is answered."""
    if not to.path and request.method in ("GET", "HEAD"):
        _, mark, query = request.target.partition("?")
        await connection.respond(301, b"", (("Location", f"{to.prefix}/{mark}{query}"),))
        return
    if pods is None:
        raise not_implemented("no pod runs here, so that nothing can be reached in one")
    reader, writer = await _connect(pods, to)
    try:
        if request.headers.get("upgrade"):
            await _pipe(connection, request, to, reader, writer)
        else:
            await _exchange(connection, request, to, reader, writer)
    finally:
        writer.transport.abort()


async def _connect(pods: PodRuntime, to: ProxyRequest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    def dial() -> socket.socket:
        return pods.dial(to.node, to.host, to.port)

    try:
        sock = await asyncio.get_running_loop().run_in_executor(DIALERS, dial)
        if not to.tls:
            return await asyncio.open_connection(sock=sock)
        # As upstream: certificates of pods are not verified.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return await asyncio.open_connection(
            sock=sock, ssl=context, server_hostname="", ssl_handshake_timeout=DIAL_SECONDS
        )
    except OSError as error:
        raise _unreachable(f"dial tcp {join_port(to.host, to.port)}: {error.strerror or error}") from error


def _unreachable(why: str) -> StatusError:
    return StatusError(503, "ServiceUnavailable", f"error trying to reach service: {why}")


def _head(request: ApiRequest, to: ProxyRequest, length: int) -> Iterator[tuple[str, str]]:
    """Yield the header fields for the server."""
    yield "Host", join_port(to.host, to.port)
    for name, value in request.headers.items():
        if name not in _NOT_SENT:
            yield name, value
    yield "X-Forwarded-Uri", to.prefix + to.path
    yield "X-Forwarded-Host", request.headers.get("host", "")
    yield "X-Forwarded-Proto", "https"
    if length or request.method in ("POST", "PUT", "PATCH"):
        yield "Content-Length", str(length)


def _target(request: ApiRequest, to: ProxyRequest) -> str:
    _, mark, query = request.target.partition("?")
    return f"{to.path or '/'}{mark}{query}"


async def _exchange(
    connection: HttpConnection,
    request: ApiRequest,
    to: ProxyRequest,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
    fields = [*_head(request, to, len(request.body)), ("Connection", "close")]
    head = h11.Request(method=request.method, target=_target(request, to), headers=fields)
    parts = [client.send(head), client.send(h11.Data(data=request.body)), client.send(h11.EndOfMessage())]
    try:
        writer.write(b"".join(part or b"" for part in parts))
        await writer.drain()
        response = await _next(client, reader)
        while isinstance(response, h11.InformationalResponse):
            response = await _next(client, reader)
    except (OSError, h11.RemoteProtocolError) as error:
        raise _unreachable(str(error) or type(error).__name__) from error
    if not isinstance(response, h11.Response):
        raise _unreachable("EOF")
    await _answer(connection, request, to, response, client, reader)


async def _next(client: h11.Connection, reader: asyncio.StreamReader) -> object:
    while (event := client.next_event()) is h11.NEED_DATA:
        client.receive_data(await reader.read(_RECEIVE_BYTES))
    return event


async def _answer(
    connection: HttpConnection,
    request: ApiRequest,
    to: ProxyRequest,
    response: h11.Response,
    client: h11.Connection,
    reader: asyncio.StreamReader,
) -> None:
    """Send a response as it arrives; a page is collected first."""
    links = LinkRewriter(to.prefix, join_port(to.host, to.port), request.headers.get("host", ""))
    fields = list(_answered(response, links))
    named = {name.lower(): value for name, value in fields}
    is_page = named.get("content-type", "").partition(";")[0].strip() == "text/html" and request.method != "HEAD"
    bodiless = request.method == "HEAD" or response.status_code in (204, 304)
    if is_page:
        page = b""
        while len(page) < _MAX_PAGE and isinstance(event := await _next(client, reader), h11.Data):
            page += event.data
        first = [links.page(page)]
    else:
        first = []
    kept = [(name, value) for name, value in fields if not (is_page and name.lower() == "content-length")]
    if not bodiless and (is_page or "content-length" not in named):
        kept.append(("Transfer-Encoding", "chunked"))
    await connection.begin(response.status_code, kept)
    await connection.send(first)
    try:
        while client.their_state is h11.SEND_BODY and isinstance(event := await _next(client, reader), h11.Data):
            await connection.send([bytes(event.data)])
    except h11.RemoteProtocolError:
        # The client must not take the part that has arrived for the whole.
        raise ConnectionResetError from None
    await connection.end()


def _answered(response: h11.Response, links: LinkRewriter) -> Iterator[tuple[str, str]]:
    for name, value in response.headers.raw_items():
        key, text = name.decode("latin-1"), value.decode("latin-1")
        if key.lower() == "location":
            text = links.url(text)
        if key.lower() not in _HOP_BY_HOP:
            yield key, text


class LinkRewriter(NamedTuple):
    """Rewrites a server's links to its own paths, so that they lead through the API server."""

    prefix: str
    server: str
    """Host and port of the server in the pod."""
    host: str
    """Host and port of the API server, as the client has them."""

    def url(self, text: str) -> str:
        """Return a link; a relative one, and one to another host, as it is."""
        try:
            parts = urlsplit(text)
        except ValueError:
            return text
        if parts.netloc not in ("", self.server, self.host) or not parts.path.startswith("/"):
            return text
        path = parts.path if parts.path.startswith(self.prefix) else self.prefix + parts.path
        return urlunsplit(("", "", path, parts.query, parts.fragment))

    def page(self, page: bytes) -> bytes:
        """Return an HTML page with its links rewritten."""
        return _TAG.sub(lambda tag: _LINK.sub(self._link, tag[0]), page)

    def _link(self, found: re.Match[bytes]) -> bytes:
        quote = b'"' if found[2] is not None else b"'"
        value = found[2] if found[2] is not None else found[3]
        return (
            found[1] + quote + self.url(value.decode(errors="surrogateescape")).encode(errors="surrogateescape") + quote
        )


async def _pipe(
    connection: HttpConnection,
    request: ApiRequest,
    to: ProxyRequest,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Pass bytes on in both directions until one side ends."""
    fields = [
        *_head(request, to, len(request.body)),
        ("Connection", "Upgrade"),
        ("Upgrade", request.headers["upgrade"]),
    ]
    lines = [f"{request.method} {_target(request, to)} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
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
