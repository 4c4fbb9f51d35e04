"""The overlay as a process of its own: signals, and a port that tells how it is."""

from __future__ import annotations

import msgspec

from narthex.node.shapes import make_known
from narthex.overlay.program.figures import Figures
from narthex.overlay.program.part import OverlayOrigin, OverlayPart
from narthex.overlay.program.settings import OverlaySettings
from narthex.proxy.program.machine import StartError
from narthex.proxy.program.status import BindError, Listener, Routes, StatusServer
from narthex.runtime.http import HttpServer, Reply, Slow
from narthex.runtime.logs import LOGGER
from narthex.runtime.signals import ended_by_signal


def serve_overlay(settings: OverlaySettings, origin: OverlayOrigin, healthz: tuple[str, int] | None) -> None:
    """Keep the overlay up until SIGTERM or SIGINT. `healthz`: address and port. Raises StartError."""
    make_known()
    part = OverlayPart(settings, origin)
    http = HttpServer()
    try:
        if healthz is not None:
            StatusServer(http).serve([Listener("health", *healthz, routes(part))], hard_fail=True)
        with ended_by_signal(part.stop):
            part.run()
    except BindError as error:
        raise StartError(str(error)) from error
    finally:
        http.stop()
    LOGGER.info("overlay: stopped; what is in force stays")


def routes(part: OverlayPart) -> Routes:
    """What the port answers: `/healthz` as long as the process is there, `/readyz` by the last look, `/metrics`."""

    def ready() -> Reply:
        body = msgspec.json.encode(part.figures.state())
        return Reply(200 if part.ready else 503, body, "application/json")

    return {
        "/healthz": lambda: Reply(200, b"ok"),
        "/readyz": ready,
        "/metrics": lambda: Slow(
            lambda: Reply(200, exposition(part.figures), "text/plain; version=0.0.4; charset=utf-8")
        ),
    }


def exposition(figures: Figures) -> bytes:
    """The figures in Prometheus' text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(figures)
    return generate_latest(registry)
