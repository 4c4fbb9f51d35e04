"""The two status ports of a node proxy: health for balancers and kubelets, metrics and state for people."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from narthex.model.net import join_port
from narthex.proxy.program.metrics import Metrics, indicators
from narthex.runtime.http import Answer, HttpServer, Reply, Request, Seats, Slow, listening
from narthex.runtime.logs import LOGGER

RETRY_SECONDS = 5.0
"""A port that is taken is tried again this often (row 17.8)."""

Routes = Mapping[str, Callable[[], Reply | Slow]]
"""Path to answer."""


class Listener(NamedTuple):
    """One address to serve on."""

    purpose: str
    """Said when it fails: "health"."""
    address: str
    port: int
    routes: Routes

    @property
    def place(self) -> tuple[str, str, int]:
        """What makes it another listener."""
        return self.purpose, self.address, self.port

    def __str__(self) -> str:
        return f"{self.purpose} server on {join_port(self.address, self.port)}"


class Judged(Protocol):
    """Somebody's health, as HTTP status and body."""

    def healthz(self) -> tuple[int, dict[str, Any]]: ...

    def livez(self) -> tuple[int, dict[str, Any]]: ...


class BindError(RuntimeError):
    """An address cannot be listened on, and `bindAddressHardFail` says that this is fatal."""

    def __init__(self, purpose: str, message: str) -> None:
        super().__init__(message)
        self.purpose = purpose


def health_routes(health: Judged, metrics: Metrics) -> Routes:
    """`/healthz` and `/livez` of the health port; both are counted (row 17.9)."""

    def answer(name: str, ask: Callable[[], tuple[int, dict[str, Any]]]) -> Reply:
        status, body = ask()
        metrics.answered(name, status)
        return _json(body, status)

    return {
        "/healthz": lambda: answer("healthz", health.healthz),
        "/livez": lambda: answer("livez", health.livez),
    }


def metrics_routes(metrics: Metrics, health: Judged, mode: str, configurations: Mapping[str, Any]) -> Routes:
    """What the metrics port serves (row 20.25). `configurations` is what `/configz` shows, by name."""

    def exposition(text: Callable[[], bytes]) -> Slow:
        return Slow(lambda: Reply(200, text(), "text/plain; version=0.0.4; charset=utf-8"))

    return {
        "/metrics": lambda: exposition(metrics.exposition),
        "/metrics/slis": lambda: exposition(lambda: indicators(health.livez()[0] == 200)),
        "/proxyMode": lambda: Reply(200, mode.encode()),
        "/healthz": lambda: Reply(200, b"ok"),
        "/configz": lambda: _json(configurations),
    }


def _json(body: Any, status: int = 200) -> Reply:
    return Reply(status, msgspec.json.encode(body), "application/json")


class StatusServer:
    """Keeps the listeners open. `serve` listens at once, so that a caller knows of a taken port."""

    def __init__(self, http: HttpServer, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._http = http
        self._retry_seconds = retry_seconds
        self._seats = Seats()
        self._lock = threading.Lock()
        self._wanted: tuple[Listener, ...] = ()
        self._bound: dict[tuple[str, str, int], socket.socket] = {}
        self._waiting = False
        self.addresses: dict[str, tuple[str, int]] = {}
        """Where each purpose is served now."""

    def serve(self, listeners: Sequence[Listener], *, hard_fail: bool = False) -> None:
        """Listen at these and at no others, in the network namespace of the calling thread; what is served already goes
        on. Raises BindError when a taken port is fatal; the others are then served all the same."""
        with self._lock:
            self._wanted = tuple(listeners)
            leaving = self._bound.keys() - {listener.place for listener in listeners}
            closing = [(place, self._bound.pop(place)) for place in leaving]
        for place, sock in closing:
            self.addresses.pop(place[0], None)
            self._http.close(sock)
        failed = self._listen(first=True)
        if failed and hard_fail:
            listener, error = failed[0]
            raise BindError(listener.purpose, f"{listener}: {error.strerror}; bindAddressHardFail is set")
        self._retry_later(failed)

    def _retry(self) -> None:
        self._waiting = False
        self._retry_later(self._listen(first=False))

    def _listen(self, *, first: bool) -> list[tuple[Listener, OSError]]:
        """Listen where it is wanted and not done yet; what cannot be had, and why."""
        failed = []
        with self._lock:
            for listener in self._wanted:
                if listener.place in self._bound:
                    continue
                try:
                    sock = _listen(listener)
                except OSError as error:
                    failed.append((listener, error))
                    continue
                self._bound[listener.place] = sock
                self._open(listener, sock)
                if not first:
                    LOGGER.info("%s: listening now", listener)
        for listener, refused in failed if first else ():
            LOGGER.error(
                "%s: %s; it is tried again every %g s; stop what else listens there, or give another address",
                listener,
                refused.strerror,
                self._retry_seconds,
            )
        return failed

    def _retry_later(self, failed: Sequence[object]) -> None:
        if failed and not self._waiting:
            self._waiting = True
            self._http.later(self._retry_seconds, self._retry)

    def _open(self, listener: Listener, sock: socket.socket) -> None:
        self.addresses[listener.purpose] = sock.getsockname()[:2]
        self._http.open(sock, _answer(listener.routes), self._seats)


def _listen(listener: Listener) -> socket.socket:
    """`::` takes IPv4 too, as it does for kube-proxy."""
    return listening(listener.address, listener.port, both_families=listener.address == "::")


def _answer(routes: Routes) -> Answer:
    """GET and HEAD of fixed paths."""

    def answer(request: Request) -> Reply | Slow:
        route = routes.get(request.path)
        if request.method not in ("GET", "HEAD"):
            return Reply(405, b"only GET and HEAD\n")
        if route is None:
            return Reply(404, f"not found; there is {', '.join(routes)}\n".encode())
        return route()

    return answer
