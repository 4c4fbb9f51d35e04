"""The controller as a process: its election, its status ports, its signals."""

from __future__ import annotations

import os
import uuid
from typing import Any

import msgspec

from narthex.kube.access import Access
from narthex.kube.events import EventWriter
from narthex.kube.leader_election import Leader
from narthex.kube.lease import TIMES, Times
from narthex.lb.program.controller import Controller, Settings
from narthex.lb.program.metrics import ControllerMetrics
from narthex.linux.clock import Clock, SystemClock
from narthex.proxy.program.api_server import EventPoster
from narthex.proxy.program.status import BindError, Listener, StatusServer
from narthex.runtime.http import HttpServer, Reply, Slow
from narthex.runtime.logs import LOGGER
from narthex.runtime.signals import ended_by_signal

CONTROLLER = "narthex-lb-controller"
_STUCK_SECONDS = 120.0
"""A controller that has not looked for work for so long is stuck: each of its steps has a limit far below."""
_MOST_EVENTS = 10_000
"""A first run may give thousands of addresses at once."""


class StartError(RuntimeError):
    """It cannot begin; the message says why."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a controller is found, and what it competes for."""

    address: str
    healthz_port: int
    metrics_port: int
    lease_namespace: str
    lease_name: str = CONTROLLER
    times: Times = TIMES


def serve(access: Access, settings: Settings, place: Place) -> None:
    """Be the controller until SIGTERM or SIGINT. Raises StartError."""
    host = os.uname().nodename
    clock = SystemClock()
    leader = Leader(access, place.lease_namespace, place.lease_name, f"{host}_{uuid.uuid4()}", place.times)
    events = EventWriter(EventPoster(access), host, clock, CONTROLLER, _MOST_EVENTS)
    controller = Controller(access, settings, leader, events, clock)
    metrics = ControllerMetrics(controller, leader, clock)
    http = HttpServer()
    status = StatusServer(http)
    try:
        status.serve(_listeners(controller, leader, metrics, clock, place), hard_fail=True)
        with events.running(), ended_by_signal(controller.stop):
            LOGGER.info("standing for election: Lease %s/%s", place.lease_namespace, place.lease_name)
            controller.run()
    except BindError as error:
        raise StartError(str(error)) from error
    finally:
        http.stop()
    LOGGER.info("stopped; addresses stay as they are")


def _listeners(
    controller: Controller, leader: Leader, metrics: ControllerMetrics, clock: Clock, place: Place
) -> tuple[Listener, ...]:
    def healthz() -> Reply:
        idle = clock.now() - controller.counts.turn_at
        well = not controller.counts.turn_at or idle < _STUCK_SECONDS
        body: dict[str, Any] = {"healthy": well, "leading": leader.term > 0, "leader": leader.holder}
        return Reply(200 if well else 503, msgspec.json.encode(body), "application/json")

    def exposition() -> Slow:
        return Slow(lambda: Reply(200, metrics.exposition(), "text/plain; version=0.0.4; charset=utf-8"))

    return (
        Listener("health", place.address, place.healthz_port, {"/healthz": healthz, "/livez": healthz}),
        Listener("metrics", place.address, place.metrics_port, {"/metrics": exposition, "/healthz": healthz}),
    )
