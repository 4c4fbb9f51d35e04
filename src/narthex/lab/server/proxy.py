"""The subresource `proxy`: a request goes on to a server in a pod, and its response comes back.

As in apimachinery's util/proxy, links in HTML and redirects to the server's own paths get the prefix that leads to it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from narthex.lab.api.errors import StatusError, not_implemented
from narthex.lab.api.proxy_path import ProxyRequest
from narthex.lab.api.requests import ApiRequest
from narthex.lab.server.forward import ForwardedRequest, UpstreamError, connect, forward, passed_on
from narthex.lab.server.pods import PodRuntime
from narthex.model import join_port
from narthex.runtime.http.connection import HttpConnection

_NOT_SENT = ("authorization", "accept-encoding")
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

    def dial() -> socket.socket:
        """Return a connection to the requested host and port."""
        return pods.dial(to.node, to.host, to.port)

    try:
        upstream = await connect(dial, tls=to.tls)
    except OSError as error:
        raise _unreachable(f"dial tcp {join_port(to.host, to.port)}: {error.strerror or error}") from error
    _, mark, query = request.target.partition("?")
    sent = ForwardedRequest(
        request.method,
        f"{to.path or '/'}{mark}{query}",
        tuple(_head(request, to)),
        request.body,
        request.headers.get("upgrade", ""),
    )
    links = LinkRewriter(to.prefix, join_port(to.host, to.port), request.headers.get("host", ""))
    try:
        await forward(connection, sent, upstream, links)
    except UpstreamError as error:
        raise _unreachable(str(error)) from error


def _unreachable(why: str) -> StatusError:
    return StatusError(503, "ServiceUnavailable", f"error trying to reach service: {why}")


def _head(request: ApiRequest, to: ProxyRequest) -> Iterator[tuple[str, str]]:
    """Yield the header fields for the server."""
    yield "Host", join_port(to.host, to.port)
    yield from ((name, value) for name, value in passed_on(request.headers) if name not in _NOT_SENT)
    yield "X-Forwarded-Uri", to.prefix + to.path
    yield "X-Forwarded-Host", request.headers.get("host", "")
    yield "X-Forwarded-Proto", "https"


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
