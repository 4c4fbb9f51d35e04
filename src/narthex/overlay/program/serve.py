"""The overlay as a process of its own: signals, and a port that tells how it is."""

from __future__ import annotations

import msgspec

from narthex.kube.decoders import make_known
from narthex.overlay.program.part import OverlayOrigin, OverlayPart
from narthex.overlay.program.settings import OverlaySettings
from narthex.runtime.http import Reply, Slow
from narthex.runtime.logs import LOGGER
from narthex.runtime.metrics import exposition, metrics_reply
from narthex.runtime.process import run_until_signal
from narthex.runtime.status import Listener, Routes


def serve_overlay(settings: OverlaySettings, origin: OverlayOrigin, healthz: tuple[str, int] | None) -> None:
    """Keep the overlay up until SIGTERM or SIGINT. `healthz`: address and port. Raises StartError."""
    make_known()
    part = OverlayPart(settings, origin)
    run_until_signal(part, [Listener("health", *healthz, routes(part))] if healthz is not None else ())
    LOGGER.info("overlay: stopped; what is in force stays")


def routes(part: OverlayPart) -> Routes:
    """What the port answers: `/healthz` as long as the process is there, `/readyz` by the last look, `/metrics`."""

    def ready() -> Reply:
        body = msgspec.json.encode(part.figures.state())
        return Reply(200 if part.ready else 503, body, "application/json")

    return {
        "/healthz": lambda: Reply(200, b"ok"),
        "/readyz": ready,
        "/metrics": lambda: Slow(lambda: metrics_reply(exposition(part.figures))),
    }
