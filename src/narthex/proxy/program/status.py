"""The status ports of the proxy and of a node: `/healthz`, `/livez`, `/metrics`, `/proxyMode`, and `/configz`.

A proxy that runs alone gives kube-proxy's answers. Those of a node also list the state of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.metrics import ProxyMetrics, indicators
from narthex.proxy.program.settings import ProxySettings
from narthex.runtime.http import HttpResponse, SlowResponse
from narthex.runtime.http.server import HttpServer
from narthex.runtime.metrics import Collector, metrics_reply
from narthex.runtime.status import PartReport, RouteHandler, Routes, StatusListener, StatusServer


def health_routes(health: ProcessHealth, metrics: ProxyMetrics) -> Routes:
    """Return the routes `/healthz` and `/livez` of the health port; both are counted (row 17.9)."""

    def answer(name: str, ask: Callable[[], tuple[int, dict[str, Any]]]) -> HttpResponse:
        """Count and return the response of one health check."""
        status, body = ask()
        metrics.answered(name, status)
        return _json(body, status)

    return {"/healthz": lambda: answer("healthz", health.healthz), "/livez": lambda: answer("livez", health.livez)}


def metrics_routes(
    metrics: ProxyMetrics, health: ProcessHealth, mode: str, configurations: Mapping[str, Any]
) -> Routes:
    """Return the routes of the metrics port (row 20.25). `configurations` is the content of `/configz`, by name."""
    return {
        "/metrics": lambda: SlowResponse(lambda: metrics_reply(metrics.exposition())),
        "/metrics/slis": lambda: SlowResponse(lambda: metrics_reply(indicators(health.livez()[0] == 200))),
        "/proxyMode": lambda: HttpResponse(200, mode.encode()),
        "/healthz": lambda: HttpResponse(200, b"ok"),
        "/configz": lambda: _json(configurations),
    }


def _json(body: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(status, msgspec.json.encode(body), "application/json")


PROXY = "proxy"
"""The part whose health load balancers use."""

Reports = Callable[[], Mapping[str, PartReport]]


class ProcessHealth:
    """The health of a process with one or more parts. The proxy may be absent or stopped."""

    def __init__(self, reports: Reports, proxy: ProxyHealth | None = None) -> None:
        """Prepare the answers. `reports` is empty if a proxy runs alone."""
        self._reports = reports
        self._proxy = proxy

    def healthz(self) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body for `/healthz`.

        If the process has a proxy, the status is the proxy's, since load balancers send traffic for Services by it.
        Otherwise all parts must be healthy.
        """
        reports = self._reports()
        if self._proxy is not None:
            status, body = self._proxy.healthz()
        else:
            awaited = not reports or PROXY in reports
            status, body = _answer(not awaited and all(report.healthy for report in reports.values()))
        return status, {**body, **_parts(reports)}

    def livez(self) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body for `/livez`: 503 if a part runs but makes no progress.

        A new process could help then. A part that has ended is restarted by this process and does not count.
        """
        reports = self._reports()
        if not reports and self._proxy is not None:
            return self._proxy.livez()
        stuck = {name for name, report in reports.items() if report.running and not report.healthy}
        if self._proxy is not None and self._proxy.livez()[0] == 200:
            stuck.discard(PROXY)
        status, body = _answer(bool(reports) and not stuck)
        return status, {**body, **_parts(reports)}


class StatusPorts:
    """The status ports of a process. Safe from any thread."""

    def __init__(self, reports: Reports = dict, collectors: Iterable[Collector] = ()) -> None:
        """Prepare the ports.

        `reports` returns the state of the node's parts; `collectors` provide metrics while there is no proxy.
        """
        self._reports = reports
        self._collectors = tuple(collectors)
        self._http = HttpServer()
        self._server = StatusServer(self._http)
        self._shown: dict[str, Any] = {}
        # The ports look into these two at each request. They are updated, so there is always a handler.
        self._health: dict[str, RouteHandler] = {}
        self._metrics: dict[str, RouteHandler] = {}
        self.hide()

    def serve(self, settings: ProxySettings) -> None:
        """Listen where the settings say, and show them. Raises BindError."""
        self._shown["kubeproxy.config.k8s.io"] = settings.configuration
        self._shown["narthex"] = settings.own_configuration
        self._server.serve(list(self._listeners(settings)), hard_fail=settings.bind_address_hard_fail)

    def show(self, proxy: Proxy, mode: str) -> None:
        """Answer for this proxy from now on."""
        health = ProcessHealth(self._reports, proxy.health)
        self._health.update(health_routes(health, proxy.metrics))
        self._metrics.update(metrics_routes(proxy.metrics, health, mode, self._shown))

    def hide(self) -> None:
        """Answer without a proxy from now on."""
        health, metrics = ProcessHealth(self._reports), ProxyMetrics(more=self._collectors)
        self._health.update(health_routes(health, metrics))
        self._metrics.update(metrics_routes(metrics, health, "", self._shown))

    def offer(self, path: str, answer: RouteHandler) -> None:
        """Answer at one more path of both ports, until it is withdrawn: in clusters, the metrics port listens on loopback only."""
        self._metrics[path] = self._health[path] = answer

    def withdraw(self, path: str) -> None:
        """Stop answering at a path."""
        self._metrics.pop(path, None)
        self._health.pop(path, None)

    def stop(self) -> None:
        """Close the ports."""
        self._http.stop()

    def _listeners(self, settings: ProxySettings) -> Iterator[StatusListener]:
        if settings.healthz:
            yield StatusListener("health", *settings.healthz, self._health)
        if settings.metrics:
            yield StatusListener("metrics", *settings.metrics, self._metrics)


def _answer(healthy: bool) -> tuple[int, dict[str, Any]]:
    return 200 if healthy else 503, {"healthy": healthy}


def _parts(reports: Mapping[str, PartReport]) -> dict[str, Any]:
    return {"parts": msgspec.to_builtins(reports)} if reports else {}
