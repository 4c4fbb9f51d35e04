"""The two status ports of a node proxy: health for balancers and kubelets, metrics and state for people."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from narthex.apps.health import Health
from narthex.apps.httpd import Answer, HttpServer, Reply, Request, Seats, listening
from narthex.apps.logs import LOGGER
from narthex.apps.metrics import Metrics
from narthex.model.net import join_port

RETRY_SECONDS = 5.0
"""A port that is taken is tried again this often (row 17.8)."""

Routes = Mapping[str, Callable[[], Reply]]
"""Path to answer."""


class Listener(NamedTuple):
    """One address to serve on."""

    purpose: str
    """Said when it fails: "health"."""
    address: str
    port: int
    routes: Routes

    def __str__(self) -> str:
        return f"{self.purpose} server on {join_port(self.address, self.port)}"


class BindError(RuntimeError):
    """An address cannot be listened on, and `bindAddressHardFail` says that this is fatal."""


def health_routes(health: Health, metrics: Metrics) -> Routes:
    """`/healthz` and `/livez` of the health port; both are counted (row 17.9)."""

    def answer(name: str, ask: Callable[[], tuple[int, dict[str, Any]]]) -> Reply:
        status, body = ask()
        metrics.answered(name, status)
        return _json(body, status)

    return {
        "/healthz": lambda: answer("healthz", health.healthz),
        "/livez": lambda: answer("livez", health.livez),
    }


def metrics_routes(metrics: Metrics, mode: str, configuration: Any) -> Routes:
    """`/metrics`, `/proxyMode`, `/healthz`, `/configz` of the metrics port (row 20.25)."""
    return {
        "/metrics": lambda: Reply(200, metrics.exposition(), "text/plain; version=0.0.4; charset=utf-8"),
        "/proxyMode": lambda: Reply(200, mode.encode()),
        "/healthz": lambda: Reply(200, b"ok"),
        "/configz": lambda: _json({"kubeproxy.config.k8s.io": configuration}),
    }


def _json(body: Any, status: int = 200) -> Reply:
    return Reply(status, msgspec.json.encode(body), "application/json")


class StatusServer:
    """Keeps the listeners open. `start` listens at once, so that a caller knows of a taken port."""

    def __init__(
        self,
        http: HttpServer,
        listeners: Sequence[Listener],
        *,
        hard_fail: bool = False,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._http = http
        self._listeners = tuple(listeners)
        self._hard_fail = hard_fail
        self._retry_seconds = retry_seconds
        self._seats = Seats()
        self.addresses: dict[str, tuple[str, int]] = {}
        """Where each purpose is served now."""

    def start(self) -> None:
        """Listen, in the network namespace of the calling thread. Raises BindError when that is fatal."""
        missing = []
        bound: list[tuple[Listener, socket.socket]] = []
        for listener in self._listeners:
            try:
                bound.append((listener, _listen(listener)))
            except OSError as error:
                if self._hard_fail:
                    for _, sock in bound:
                        sock.close()
                    raise BindError(f"{listener}: {error.strerror}; bindAddressHardFail is set") from error
                LOGGER.error(
                    "%s: %s; it is tried again every %g s; stop what else listens there, or give another address",
                    listener,
                    error.strerror,
                    self._retry_seconds,
                )
                missing.append(listener)
        for listener, sock in bound:
            self._open(listener, sock)
        self._retry_later(missing)

    def _retry_later(self, missing: Sequence[Listener]) -> None:
        if missing:
            self._http.later(self._retry_seconds, lambda: self._retry(missing))

    def _retry(self, missing: Sequence[Listener]) -> None:
        still = []
        for listener in missing:
            try:
                sock = _listen(listener)
            except OSError:
                still.append(listener)
                continue
            self._open(listener, sock)
            LOGGER.info("%s: listening now", listener)
        self._retry_later(still)

    def _open(self, listener: Listener, sock: socket.socket) -> None:
        self.addresses[listener.purpose] = sock.getsockname()[:2]
        self._http.open(sock, _answer(listener.routes), self._seats)


def _listen(listener: Listener) -> socket.socket:
    """`::` takes IPv4 too, as it does for kube-proxy."""
    return listening(listener.address, listener.port, both_families=listener.address == "::")


def _answer(routes: Routes) -> Answer:
    """GET and HEAD of fixed paths."""

    def answer(request: Request) -> Reply:
        route = routes.get(request.path)
        if request.method not in ("GET", "HEAD"):
            return Reply(405, b"only GET and HEAD\n")
        if route is None:
            return Reply(404, f"not found; there is {', '.join(routes)}\n".encode())
        return route()

    return answer
