"""The controller process: leader election, status ports, metrics, and signals."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.kube.access import Access
from narthex.kube.events import EventWriter
from narthex.kube.leader_election import Leader
from narthex.kube.lease import LEASE_TIMES, LeaseTimes
from narthex.kube.origin import EventPoster, SourceMetrics
from narthex.lb.program.controller import LoadBalancerController, LoadBalancerSettings
from narthex.linux.clock import Clock, SystemClock
from narthex.runtime.http.messages import HttpResponse, SlowResponse
from narthex.runtime.logs import LOGGER
from narthex.runtime.metrics import counter, exposition, gauge, metrics_reply
from narthex.runtime.process import run_until_signal
from narthex.runtime.status import StatusListener

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTROLLER = "narthex-lb-controller"
_STUCK_SECONDS = 120.0
"""A controller without an iteration for this long is stuck: each step has a much shorter timeout."""
_MOST_EVENTS = 10_000
"""The first run may assign thousands of addresses."""


class ControllerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Ports and Lease of a controller process."""

    address: str
    healthz_port: int
    metrics_port: int
    lease_namespace: str
    lease_name: str = CONTROLLER
    times: LeaseTimes = LEASE_TIMES


def serve(access: Access, settings: LoadBalancerSettings, place: ControllerOptions) -> None:
    """Run the controller until SIGTERM or SIGINT. Raises StartError."""
    host = os.uname().nodename
    clock = SystemClock()
    leader = Leader(access, place.lease_namespace, place.lease_name, f"{host}_{uuid.uuid4()}", place.times)
    events = EventWriter(EventPoster(access), host, clock, CONTROLLER, _MOST_EVENTS)
    controller = LoadBalancerController(access, settings, leader, events, clock)
    metrics = ControllerMetrics(controller, leader, clock)
    with events.running():
        LOGGER.info("candidate for the Lease %s/%s", place.lease_namespace, place.lease_name)
        run_until_signal(controller, _listeners(controller, leader, metrics, clock, place))
    LOGGER.info("stopped; addresses stay as they are")


def _listeners(
    controller: LoadBalancerController,
    leader: Leader,
    metrics: ControllerMetrics,
    clock: Clock,
    place: ControllerOptions,
) -> tuple[StatusListener, ...]:
    def healthz() -> HttpResponse:
        """Return the health of the controller."""
        idle = clock.now() - controller.counts.turn_at
        well = not controller.counts.turn_at or idle < _STUCK_SECONDS
        body: dict[str, Any] = {"healthy": well, "leading": leader.term > 0, "leader": leader.holder}
        return HttpResponse(200 if well else 503, msgspec.json.encode(body), "application/json")

    def exposition() -> SlowResponse:
        """Return the metrics."""
        return SlowResponse(lambda: metrics_reply(metrics.exposition()))

    return (
        StatusListener("health", place.address, place.healthz_port, {"/healthz": healthz, "/livez": healthz}),
        StatusListener("metrics", place.address, place.metrics_port, {"/metrics": exposition, "/healthz": healthz}),
    )


class ControllerMetrics:
    """Collector of the controller's metrics: MetalLB's names where they exist (row M9), and our own."""

    def __init__(self, controller: LoadBalancerController, leader: Leader, clock: Clock) -> None:
        self._controller = controller
        self._leader = leader
        self._clock = clock

    def exposition(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return exposition(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        counts, leads = self._controller.counts, self._leader.term > 0
        yield gauge("narthex_lb_leader", "1 if this controller is the leader.", leads)
        # Only the leader allocates, so the others have no usage to report.
        uses = counts.uses if leads else ()
        usable = [use for use in uses if not use.refused]
        total: dict[tuple[str, ...], float] = {(use.name,): use.total for use in usable}
        yield gauge("metallb_allocator_addresses_total", "Addresses that the pool can assign.", total, "pool")
        in_use: dict[tuple[str, ...], float] = {(use.name,): use.in_use for use in usable}
        yield gauge("metallb_allocator_addresses_in_use_total", "Addresses that Services have.", in_use, "pool")
        refused: dict[tuple[str, ...], float] = {(use.name,): bool(use.refused) for use in uses}
        yield gauge("narthex_lb_pool_refused", "1 if the pool cannot be used.", refused, "pool")
        states = (("given", counts.given), ("waiting", counts.waiting), ("foreign", counts.foreign))
        services: dict[tuple[str, ...], float] = {(state,): number if leads else 0 for state, number in states}
        yield gauge("narthex_lb_services", "Services of type LoadBalancer, by state.", services, "state")
        yield counter("narthex_lb_allocations", "Address assignments to Services.", counts.allocations)
        yield counter("narthex_lb_cleared", "Address removals from Services.", counts.cleared)
        writes: dict[tuple[str, ...], float] = {
            (result,): number for result, number in sorted(dict(self._controller.results).items())
        }
        yield counter("narthex_lb_writes", "Service writes by result.", writes, "result")
        yield from SourceMetrics(self._controller.followed, self._clock.wall).collect()
