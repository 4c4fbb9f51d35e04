"""The server in front of Ingresses: it finds the route of each request and passes it on (`lab/controllers/ingress/routing.py`).

Clients may keep connections open. Each request goes to the next server of its backend, on a connection that has no other request:
one that an earlier request has left (`idle_connections.py`), or a new one.
"""

from __future__ import annotations

import base64
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from narthex.lab.api.errors import StatusError
from narthex.lab.controllers.ingress.routing import IngressBackend, IngressCertificate, IngressTable, IngressTarget
from narthex.lab.server import certificate
from narthex.lab.server.forward import (
    ForwardedRequest,
    TargetConnection,
    UpstreamError,
    UpstreamTimeout,
    connect,
    forward,
    passed_on,
)
from narthex.lab.server.idle_connections import IdleConnections
from narthex.runtime.connection_slots import SlotLimits
from narthex.runtime.http import HttpRequest
from narthex.runtime.http.connection import HttpConnection, HttpLimits, MalformedRequest
from narthex.runtime.http.server import HttpServer
from narthex.runtime.logs import LOGGER

_LIMITS = HttpLimits(head=64 * 1024, body=16 * 1024 * 1024)
"""A request is passed on as a whole, so its body is held in memory."""
_SLOTS = SlotLimits(port=1024, client=512)
"""Tests come from one address, `outside`."""
_TRIES = 3
"""Servers that a request tries before the client gets an error."""
_RESPONSE_SECONDS = 60.0
"""Time until a server begins to answer, as in ingress-nginx."""
_REPEATABLE = frozenset(("GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"))
"""Methods whose requests may be sent again if the server closes a connection that was kept. Others get a new connection."""
_FORWARDED = frozenset(("x-forwarded-for", "x-forwarded-host", "x-forwarded-port", "x-forwarded-proto", "x-real-ip"))

Dial = Callable[[IngressTarget], socket.socket]
"""Connects to a server. Raises OSError or StatusError."""


class IngressServer:
    """Answers HTTP and HTTPS for all Ingresses."""

    def __init__(self, dial: Dial) -> None:
        """Prepare a server."""
        self._dial = dial
        self._http = HttpServer("ingress")
        self._idle = IdleConnections()
        self._table = IngressTable()
        self._contexts: dict[IngressCertificate, ssl.SSLContext | None] = {}
        self._turns: Counter[str] = Counter()
        """Requests for each backend, which its servers answer in turn."""

    def listen(self, sock: socket.socket, *, tls: bool = False) -> None:
        """Serve a listening socket, which the server owns from now on. Raises CommandError without a certificate."""
        context = None
        if tls:
            context = certificate.make(["ingress.local"]).context()
            context.sni_callback = self._choose_certificate
        connection = partial(HttpConnection, limits=_LIMITS)
        self._http.serve(sock, connection, partial(self._serve, tls=tls), _SLOTS, context)

    def close(self) -> None:
        """Stop listening and reset open connections."""
        self._http.call(partial(self._idle.retain, ()))
        self._http.stop()

    def use(self, table: IngressTable) -> None:
        """Answer by other routes from now on."""
        held = self._contexts
        contexts = {each: held[each] if each in held else _context(each) for each in table.certificates}
        self._contexts, self._table = contexts, table
        targets = {target for route in table.routes for target in route.backend.targets}
        self._http.call(partial(self._idle.retain, targets))
        titles = {route.backend.title for route in table.routes}
        self._turns = Counter({title: turn for title, turn in self._turns.items() if title in titles})

    def _choose_certificate(self, handshake: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        found = self._table.certificate(name or "")
        context = self._contexts.get(found) if found is not None else None
        if context is not None:
            handshake.context = context

    async def _serve(self, connection: HttpConnection, tls: bool) -> None:
        try:
            while (request := await connection.request()) is not None:
                await self._answer(connection, request, tls)
                if not connection.framing.persistent:
                    break
        except MalformedRequest as error:
            await _respond(connection, error.status, str(error))
        await connection.close()

    async def _answer(self, connection: HttpConnection, request: HttpRequest, tls: bool) -> None:
        backend = self._table.find(request.headers.get("host", ""), request.path)
        if backend is None:
            await _respond(connection, 404, "no Ingress has a rule for this host and path")
            return
        if not backend.targets:
            await _respond(connection, 503, f"{backend.title}: {backend.fault or 'no pod is ready'}")
            return
        why = ""
        forwarded = _forwarded(connection, request, tls)
        may_repeat = forwarded.method in _REPEATABLE and not forwarded.upgrade
        for target in self._next_targets(backend):
            kept = self._idle.take(target) if may_repeat else None
            try:
                if kept is not None and await self._reuse(connection, forwarded, target, kept):
                    return
                try:
                    upstream = await connect(partial(self._dial, target), tls=False)
                except (OSError, StatusError) as error:
                    why = f"{backend.title} at {target.address} cannot be reached: {error}"
                    continue
                await self._exchange(connection, forwarded, target, upstream)
            except UpstreamError as error:
                status = 504 if isinstance(error, UpstreamTimeout) else 502
                await _respond(connection, status, f"{backend.title} at {target.address}: {error}")
            return
        await _respond(connection, 502, why)

    async def _reuse(
        self, connection: HttpConnection, forwarded: ForwardedRequest, target: IngressTarget, upstream: TargetConnection
    ) -> bool:
        """Send a request on a connection that was kept; return False if the server has closed it. Raises UpstreamTimeout."""
        try:
            await self._exchange(connection, forwarded, target, upstream)
        except UpstreamTimeout:
            raise
        except UpstreamError:
            return False
        return True

    async def _exchange(
        self, connection: HttpConnection, forwarded: ForwardedRequest, target: IngressTarget, upstream: TargetConnection
    ) -> None:
        """Send a request and its response, and keep the server's connection. Raises UpstreamError before anything is answered."""
        if await forward(connection, forwarded, upstream, seconds=_RESPONSE_SECONDS, keep=True):
            self._idle.keep(target, upstream)

    def _next_targets(self, backend: IngressBackend) -> Iterator[IngressTarget]:
        for _ in range(min(_TRIES, len(backend.targets))):
            turn = self._turns[backend.title]
            self._turns[backend.title] += 1
            yield backend.targets[turn % len(backend.targets)]


async def _respond(connection: HttpConnection, status: int, text: str) -> None:
    await connection.respond(status, f"{text}\n".encode(), [("Content-Type", "text/plain; charset=utf-8")])


def _forwarded(connection: HttpConnection, request: HttpRequest, tls: bool) -> ForwardedRequest:
    """Return the request with the fields that tell the server about the client."""
    headers = request.headers
    client, port = (
        str(connection.writer.get_extra_info(name)[index]) for name, index in (("peername", 0), ("sockname", 1))
    )
    before = headers.get("x-forwarded-for")
    fields = (
        ("Host", headers.get("host", "")),
        *(field for field in passed_on(headers) if field[0] not in _FORWARDED),
        ("X-Forwarded-For", f"{before}, {client}" if before else client),
        ("X-Forwarded-Host", headers.get("host", "")),
        ("X-Forwarded-Port", port),
        ("X-Forwarded-Proto", "https" if tls else "http"),
        ("X-Real-IP", client),
    )
    asked = {word.strip().lower() for word in headers.get("connection", "").split(",")}
    upgrade = headers.get("upgrade", "") if "upgrade" in asked else ""
    target = f"{request.path}?{request.query}" if request.query else request.path
    # HTTP/2 without TLS is an offer, which a server may ignore.
    return ForwardedRequest(request.method, target, fields, request.body, "" if upgrade == "h2c" else upgrade)


def _context(found: IngressCertificate) -> ssl.SSLContext | None:
    """Return a TLS context, None if the certificate is unusable."""
    try:
        pem = (base64.b64decode(each, validate=True).decode() for each in (found.certificate, found.key))
        return certificate.Certificate(*pem).context()
    except (ValueError, ssl.SSLError) as error:
        LOGGER.warning(
            "the certificate of an Ingress for %s is unusable: %s", ", ".join(found.hosts) or "all hosts", error
        )
        return None
