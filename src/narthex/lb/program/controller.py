"""`narthex lb controller`: allocates addresses to Services of type LoadBalancer while it is the leader.

A term starts with fresh lists, since another controller may have written until just now. On every change, and
periodically, all Services are allocated from the current objects (`lb/allocate.py`) and differences are written. It keeps
no essential state (`lb/ledger.py`), so it may stop at any moment.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.kube.access import Access
from narthex.kube.events import ClusterEvent, ClusterEventRecorder, EventPoster, EventWriter
from narthex.kube.leader_election import LEASE_TIMES, Leader, LeaseTimes
from narthex.kube.resources import of_an_allocator
from narthex.kube.source import FollowedList, KubeSource, SourceMetrics
from narthex.lb.allocate import AllocationInput, allocate
from narthex.lb.ledger import AllocationLedger
from narthex.lb.pools import Pools, PoolUse, namespace_labels, reserved_addresses, usage, validate_pools
from narthex.lb.program.files import PoolsFile
from narthex.lb.program.status_writes import ServerUnavailable, StatusWriter, WriteOutcome
from narthex.lb.released import ReleasedAddresses
from narthex.lb.service_status import AllocationDecision, ServiceEvent, required_changes
from narthex.linux.clock import Clock, SystemClock
from narthex.model import IPAddressPool, NamespacedName, Service, Snapshot, Store
from narthex.runtime.http import HttpResponse, SlowResponse
from narthex.runtime.logs import LOGGER, ProblemLog, printable
from narthex.runtime.metrics import counter, exposition, gauge, metrics_reply
from narthex.runtime.process import run_until_signal
from narthex.runtime.reconciler import EventFeed, Reconciler
from narthex.runtime.status import StatusListener

if TYPE_CHECKING:
    from prometheus_client.core import Metric

RESYNC_SECONDS = 5.0
"""Interval of full allocations without changes."""
_FILE_SECONDS = 1.0
_RETRY_SECONDS = 1.0


class LoadBalancerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a controller."""

    load_balancer_class: str = ""
    config: Path | None = None
    """File with the pools; None: custom resources."""
    cluster_cidrs: tuple[str, ...] = ()


class ControllerCounts(msgspec.Struct, kw_only=True):
    """Counters and state for metrics and health checks."""

    uses: tuple[PoolUse, ...] = ()
    given: int = 0
    """Services whose request is fulfilled."""
    waiting: int = 0
    """Services whose request is refused."""
    foreign: int = 0
    """Services whose status another controller writes."""
    allocations: int = 0
    cleared: int = 0
    turn_at: float = 0.0


class LoadBalancerController:
    """The controller. `run` belongs to one thread; `stop` may be called from any thread and from signal handlers."""

    def __init__(
        self, access: Access, settings: LoadBalancerSettings, leader: Leader, events: ClusterEventRecorder, clock: Clock
    ) -> None:
        self._access = access
        self._settings = settings
        self._leader = leader
        self._events = events
        self._clock = clock
        self._file = PoolsFile(settings.config) if settings.config is not None else None
        self._loop = Reconciler(clock)
        self._resources = ExitStack()
        """Resources of the current term."""
        self._number = 0
        """Number of the current term; 0 while another process leads."""
        self._term: _Term | None = None
        self.counts = ControllerCounts()
        self.followed: tuple[FollowedList, ...] = ()
        self.results: Mapping[str, int] = {}

    def stop(self) -> None:
        """End `run`."""
        self._loop.stop()

    def run(self) -> None:
        """Stand for election and allocate addresses while this process leads, until `stop`."""
        with self._leader.running(self._loop.wake), self._resources:
            self._loop.run(self._reconcile)

    def _reconcile(self) -> float:
        self.counts.turn_at = self._clock.now()
        number = self._leader.term
        if number != self._number:
            self._resources.close()
            self._number, self._term = number, self._begin_term() if number else None
        if self._term is None:
            return RESYNC_SECONDS
        return self._term.turn(lambda: 0.0 if self._loop.stopping else self._leader.allowance(number))

    def _begin_term(self) -> _Term:
        """Start to follow the API server, until `_resources` is closed."""
        source = KubeSource(self._access, of_an_allocator(pools=self._file is None), newest=True)
        self.followed = source.followed
        writer = StatusWriter(self._access, self._clock)
        self._resources.callback(writer.close)
        self.results = writer.results
        feed = EventFeed(source)
        self._resources.enter_context(feed.running(self._loop.wake))
        return _Term(self._settings, self._file, source, feed, writer, self._events, self.counts, self._clock)


class _Term:
    def __init__(
        self,
        settings: LoadBalancerSettings,
        file: PoolsFile | None,
        source: KubeSource,
        feed: EventFeed,
        writer: StatusWriter,
        events: ClusterEventRecorder,
        counts: ControllerCounts,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._file = file
        self._source = source
        self._feed = feed
        self._problems = ProblemLog()
        self._writer = writer
        self._events = events
        self._counts = counts
        self._store = Store()
        self._ledger = AllocationLedger()
        self._released = ReleasedAddresses()
        self._reported: dict[NamespacedName, frozenset[ServiceEvent]] = {}
        self._refusals: dict[NamespacedName, str] = {}
        self._settled: tuple[tuple[object, ...], Pools] | None = None
        self._poll_seconds = RESYNC_SECONDS if file is None else _FILE_SECONDS
        self._last_input: tuple[Snapshot | None, tuple[IPAddressPool, ...] | None] = None, None
        self._idle_until = 0.0

    def turn(self, allowance: Callable[[], float]) -> float:
        """Allocate and write differences; return the seconds until the next run."""
        for event in self._feed.take():
            self._store.apply(event)
        self._problems.update(self._feed.problems)
        snapshot = self._store.snapshot
        objects = self._objects(snapshot)
        if not snapshot.synced or objects is None:
            return self._poll_seconds
        if snapshot is self._last_input[0] and objects == self._last_input[1] and self._clock.now() < self._idle_until:
            return self._poll_seconds
        self._last_input, self._idle_until = (snapshot, objects), 0.0
        pools = self._pools(snapshot, objects)
        self._ledger.observe(snapshot.services.values(), pools, self._clock.now())
        services = self._ledger.with_pending(snapshot.services.values())
        broken = self._broken("Service")
        unreadable = self._writer.held_by_unreadable(lambda key: key in snapshot.services) if broken else {}
        if unreadable is None:
            return _RETRY_SECONDS
        decisions = allocate(
            AllocationInput(
                services=services.values(),
                pools=pools,
                namespaces=namespace_labels(snapshot),
                load_balancer_class=self._settings.load_balancer_class,
                unreadable=unreadable,
                pools_unreadable=self._broken("IPAddressPool") > 0,
                pending=self._ledger.pending,
                superseded=self._ledger.superseded,
                settled=self._ledger.settled,
                overwritten=self._ledger.overwritten,
                held_back=self._released.observe(services.values(), self._clock.now()),
            )
        )
        self._ledger.drop_unmet(decisions)
        self._count(services, pools, decisions)
        self._writer.forget(lambda key: key in snapshot.services)
        self._reported = {key: event for key, event in self._reported.items() if key in decisions}
        try:
            wait = min([RESYNC_SECONDS, *self._write(services, decisions, allowance)])
        except ServerUnavailable:
            return _RETRY_SECONDS
        self._idle_until = self._clock.now() + wait
        return min(self._poll_seconds, wait)

    def _write(
        self,
        services: Mapping[NamespacedName, Service],
        decisions: Mapping[NamespacedName, AllocationDecision],
        allowance: Callable[[], float],
    ) -> list[float]:
        """Write differences; return the delays of Services that must wait."""
        waits = []
        for key, decision in decisions.items():
            service = services[key]
            todo = required_changes(service, decision)
            self._report_standing(service, todo.standing)
            if todo.status is None and todo.pool is None:
                self._ledger.confirm(service, decision)
                continue
            if wait := self._writer.waits(service):
                waits.append(wait)
                continue
            if allowance() <= 0:
                raise ServerUnavailable
            # The first run with very many Services takes minutes.
            self._counts.turn_at = self._clock.now()
            if todo.status is not None:
                self._ledger.record_write(service, decision.addresses, self._clock.now())
            outcome = self._writer.write(service, todo, allowance, partial(self._ledger.write_succeeded, service))
            if outcome is not WriteOutcome.DONE:
                if outcome is WriteOutcome.REFUSED:
                    self._ledger.write_rejected(service)
                waits.append(self._writer.waits(service))
                continue
            for event in todo.events:
                self._record_event(service, event)
                self._counts.allocations += event.reason == "IPAllocated"
                self._counts.cleared += event.reason == "ClearAssignment"
        return waits

    def _objects(self, snapshot: Snapshot) -> tuple[IPAddressPool, ...] | None:
        """Return the pools; None while they are unknown."""
        if self._file is None:
            return tuple(pool for _, pool in sorted(snapshot.address_pools.items()))
        found = self._file.current()
        return found.pools if self._file.ever_good else None

    def _pools(self, snapshot: Snapshot, objects: tuple[IPAddressPool, ...]) -> Pools:
        around = reserved_addresses(snapshot, self._settings.cluster_cidrs)
        key = (objects, around)
        if self._settled is None or self._settled[0] != key:
            self._settled = key, validate_pools(objects, around)
            self._report_refused_pools(self._settled[1])
        return self._settled[1]

    def _report_refused_pools(self, pools: Pools) -> None:
        refusals = {each.object.key: each.reason for each in pools.refused}
        for each in pools.refused:
            if self._refusals.get(each.object.key) != each.reason:
                LOGGER.warning("pool %s is refused: %s", each.object.name, printable(each.reason))
                if self._file is None:
                    self._events.record(
                        ClusterEvent(
                            kind="IPAddressPool",
                            api_version="metallb.io/v1beta1",
                            object=each.object.key,
                            uid=each.object.uid,
                            reason="PoolRefused",
                            action="AllocateAddress",
                            note=each.reason,
                        )
                    )
        for key in self._refusals.keys() - refusals.keys():
            LOGGER.info("pool %s is refused no more", key.name)
        self._refusals = refusals

    def _broken(self, kind: str) -> int:
        return sum(each.broken for each in self._source.followed if each.kind == kind)

    def _report_standing(self, service: Service, standing: tuple[ServiceEvent, ...]) -> None:
        before = self._reported.get(service.key, frozenset())
        self._reported[service.key] = frozenset(standing)
        for event in standing:
            if event not in before:
                self._record_event(service, event)

    def _record_event(self, service: Service, event: ServiceEvent) -> None:
        LOGGER.log(30 if event.warning else 20, "%s: %s: %s", service.key, event.reason, printable(event.text))
        self._events.record(
            ClusterEvent(
                kind="Service",
                object=service.key,
                uid=service.uid,
                warning=event.warning,
                reason=event.reason,
                action="AllocateAddress",
                note=event.text,
            )
        )

    def _count(
        self,
        services: Mapping[NamespacedName, Service],
        pools: Pools,
        decisions: Mapping[NamespacedName, AllocationDecision],
    ) -> None:
        counts = self._counts
        counts.uses = usage(pools, services.values(), decisions)
        counts.foreign = sum(each.foreign for each in decisions.values())
        counts.waiting = sum(each.refusal is not None for each in decisions.values())
        counts.given = sum(
            bool(each.addresses) and each.refusal is None and not each.foreign for each in decisions.values()
        )


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
    collector = ControllerMetrics(controller, leader, clock)

    def healthz() -> HttpResponse:
        """Return 503 if the control loop has not turned for `_STUCK_SECONDS`; the body names the leader."""
        idle = clock.now() - controller.counts.turn_at
        well = not controller.counts.turn_at or idle < _STUCK_SECONDS
        body: dict[str, Any] = {"healthy": well, "leading": leader.term > 0, "leader": leader.holder}
        return HttpResponse(200 if well else 503, msgspec.json.encode(body), "application/json")

    def metrics() -> SlowResponse:
        """Return the exposition, collected outside of the event loop."""
        return SlowResponse(lambda: metrics_reply(collector.exposition()))

    listeners = (
        StatusListener("health", place.address, place.healthz_port, {"/healthz": healthz, "/livez": healthz}),
        StatusListener("metrics", place.address, place.metrics_port, {"/metrics": metrics, "/healthz": healthz}),
    )
    with events.running():
        LOGGER.info("candidate for the Lease %s/%s", place.lease_namespace, place.lease_name)
        run_until_signal(controller, listeners)
    LOGGER.info("stopped; addresses stay as they are")


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
        total = {use.name: use.total for use in usable}
        yield gauge("metallb_allocator_addresses_total", "Addresses that the pool can assign.", total, "pool")
        in_use = {use.name: use.in_use for use in usable}
        yield gauge("metallb_allocator_addresses_in_use_total", "Addresses that Services have.", in_use, "pool")
        refused = {use.name: bool(use.refused) for use in uses}
        yield gauge("narthex_lb_pool_refused", "1 if the pool cannot be used.", refused, "pool")
        services = {"given": counts.given, "waiting": counts.waiting, "foreign": counts.foreign}
        services = {state: number if leads else 0 for state, number in services.items()}
        yield gauge("narthex_lb_services", "Services of type LoadBalancer, by state.", services, "state")
        yield counter("narthex_lb_allocations", "Address assignments to Services.", counts.allocations)
        yield counter("narthex_lb_cleared", "Address removals from Services.", counts.cleared)
        writes = dict(sorted(dict(self._controller.results).items()))
        yield counter("narthex_lb_writes", "Service writes by result.", writes, "result")
        yield from SourceMetrics(self._controller.followed, self._clock.wall).collect()
