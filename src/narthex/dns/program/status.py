"""The HTTP endpoints of plugins `health`, `ready`, and `prometheus`: `/health`, `/ready`, `/metrics` (rows S15, S16)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence

import msgspec

from narthex.dns.corefile.settings import HttpEndpoint, ServerBlock
from narthex.dns.program.listeners import EVERYWHERE, ListenError
from narthex.runtime.http import HttpRequest, HttpResponse, Responder, SlowResponse
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.metrics import metrics_reply

_OK = HttpResponse(200, b"OK")


class Readiness(msgspec.Struct, frozen=True):
    """State of the server for `/ready`."""

    missing: tuple[str, ...] = ()
    stale: str = ""
    """Which data is stale and for how long; empty if none is."""
    terminating: bool = False


class StatusEndpoints:
    """The HTTP endpoints of a DNS server."""

    def __init__(self, scrape: Callable[[], bytes], readiness: Callable[[], Readiness]) -> None:
        self._scrape = scrape
        self._readiness = readiness
        self._http = HttpServer()
        self._open: dict[tuple[str, HttpEndpoint], socket.socket] = {}
        self._strict = False

    def open(self, blocks: Iterable[ServerBlock]) -> None:
        """Open the endpoints of these server blocks and close all others.

        Raises ListenError if one cannot be opened; the others stay open.
        """
        desired: dict[tuple[str, HttpEndpoint], Responder] = {}
        self._strict = False
        for block in blocks:
            if block.health is not None:
                desired["health", block.health.listen] = _only("/health", lambda: _OK)
            if block.ready is not None:
                self._strict = self._strict or block.ready.monitor == "continuously"
                desired["ready", block.ready.listen] = _only("/ready", self._ready)
            if block.prometheus is not None:
                desired["metrics", block.prometheus.listen] = _only("/metrics", self._metrics)
        for key in [key for key in self._open if key not in desired]:
            self._http.close(self._open.pop(key))
        for key, responder in desired.items():
            if key not in self._open:
                sock = _listen(*key)
                self._open[key] = sock
                self._http.open(sock, responder)

    def close(self) -> None:
        """Close all endpoints."""
        self._http.stop()
        self._open.clear()

    def _metrics(self) -> SlowResponse:
        return SlowResponse(lambda: metrics_reply(self._scrape()))

    def _ready(self) -> HttpResponse:
        now = self._readiness()
        if now.terminating:
            return HttpResponse(503, b"ending\n")
        if now.missing or (self._strict and now.stale):
            reason = ",".join(now.missing) or f"kubernetes: {now.stale}"
            return HttpResponse(503, reason.encode())
        return HttpResponse(200, f"OK\nkubernetes: {now.stale}\n".encode()) if now.stale else _OK


def _only(path: str, respond: Callable[[], HttpResponse | SlowResponse]) -> Responder:
    def choose(request: HttpRequest) -> HttpResponse | SlowResponse:
        """Respond to GET and HEAD requests of the path; return 404 or 405 to all others."""
        if request.path != path:
            return HttpResponse(404, f"only {path} is here\n".encode())
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"GET and HEAD only\n")
        return respond()

    return choose


def _listen(purpose: str, endpoint: HttpEndpoint) -> socket.socket:
    hosts: Sequence[str] = {"": tuple(reversed(EVERYWHERE)), "localhost": ("127.0.0.1",)}.get(
        endpoint.host, (endpoint.host,)
    )
    for host in hosts:
        try:
            return listen_tcp(host, endpoint.port, both_families=host == EVERYWHERE[1])
        except OSError as error:
            failed = error
    raise ListenError(f"cannot listen on {endpoint} for {purpose}: {failed.strerror or failed}")
