"""`/health`, `/ready` and `/metrics`, where server blocks want them (rows S15, S16)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from narthex.dns.corefile.settings import Listen, ServerBlock
from narthex.dns.program.listeners import EVERYWHERE, ListenError
from narthex.dns.program.metrics import Metrics
from narthex.runtime.http.messages import ConnectionSlots, HttpRequest, HttpResponse, Responder, SlowResponse
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.metrics import metrics_reply

_OK = HttpResponse(200, b"OK")


class Readiness(NamedTuple):
    """Whether questions should come here."""

    missing: tuple[str, ...] = ()
    """Plugins without which answers would be wrong."""
    stale: str = ""
    """What is wrong with the data that is served, empty when nothing is."""
    ending: bool = False


class Ports:
    """The HTTP ports of a DNS server. `open` and `close` them."""

    def __init__(self, metrics: Metrics, readiness: Callable[[], Readiness]) -> None:
        self._metrics = metrics
        self._readiness = readiness
        self._http = HttpServer()
        self._seats = ConnectionSlots()
        self._open: dict[tuple[str, Listen], socket.socket] = {}
        self._strict = False

    def open(self, blocks: Iterable[ServerBlock]) -> None:
        """Open what these ask for, close what they do not. Raises ListenError; the others stay open."""
        wanted: dict[tuple[str, Listen], Responder] = {}
        self._strict = False
        for block in blocks:
            if block.health is not None:
                wanted["health", block.health.listen] = _only("/health", lambda: _OK)
            if block.ready is not None:
                self._strict = self._strict or block.ready.monitor == "continuously"
                wanted["ready", block.ready.listen] = _only("/ready", self._ready)
            if block.prometheus is not None:
                wanted["metrics", block.prometheus.listen] = _only("/metrics", lambda: SlowResponse(self._scrape))
        for key in [key for key in self._open if key not in wanted]:
            self._http.close(self._open.pop(key))
        for key, answer in wanted.items():
            if key not in self._open:
                sock = _listen(*key)
                self._open[key] = sock
                self._http.open(sock, answer, self._seats)

    def close(self) -> None:
        """Close all."""
        self._http.stop()
        self._open.clear()

    def _scrape(self) -> HttpResponse:
        return metrics_reply(self._metrics.text())

    def _ready(self) -> HttpResponse:
        now = self._readiness()
        if now.ending:
            return HttpResponse(503, b"ending\n")
        if now.missing or (self._strict and now.stale):
            said = ",".join(now.missing) or f"kubernetes: {now.stale}"
            return HttpResponse(503, said.encode())
        return HttpResponse(200, f"OK\nkubernetes: {now.stale}\n".encode()) if now.stale else _OK


def _only(path: str, answer: Callable[[], HttpResponse | SlowResponse]) -> Responder:
    def choose(request: HttpRequest) -> HttpResponse | SlowResponse:
        if request.path != path:
            return HttpResponse(404, f"only {path} is here\n".encode())
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"GET and HEAD only\n")
        return answer()

    return choose


def _listen(purpose: str, where: Listen) -> socket.socket:
    hosts: Sequence[str] = {"": tuple(reversed(EVERYWHERE)), "localhost": ("127.0.0.1",)}.get(where.host, (where.host,))
    for host in hosts:
        try:
            return listen_tcp(host, where.port, both_families=host == EVERYWHERE[1])
        except OSError as error:
            failed = error
    raise ListenError(f"cannot listen on {where} for {purpose}: {failed.strerror or failed}")
