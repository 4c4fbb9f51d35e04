"""`narthex lb controller`: gives addresses to Services of type LoadBalancer, as long as it leads.

A term begins with reading everything anew, since another controller may have written until just now. Then, whenever
something changes and now and then, all is decided again from what there is (`lb/allocate.py`), and what differs is
written. Nothing is remembered that matters (`lb/ledger.py`), so it may end at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from narthex.kube.access import Access
from narthex.kube.events import Events, Happening
from narthex.kube.leader_election import Leader
from narthex.kube.resources import ADDRESS_POOLS, ALL_SERVICES, NAMESPACES, NODES, SERVICE_CIDRS
from narthex.kube.source import Followed, KubeSource
from narthex.lb.allocate import AllocationInput, allocate
from narthex.lb.ledger import AllocationLedger
from narthex.lb.pool_usage import (
    PoolUse,
    namespace_labels,
    reserved_addresses,
    usage,
)
from narthex.lb.pools import Pools, validate_pools
from narthex.lb.program.files import PoolsFile
from narthex.lb.program.status_writes import ServerUnavailable, StatusWriter, WriteOutcome, held_by_unreadable
from narthex.lb.service_status import AllocationDecision, ServiceEvent, required_changes
from narthex.linux.clock import Clock
from narthex.model.names import NamespacedName
from narthex.model.objects import IPAddressPool, Service
from narthex.model.store import Snapshot, Store
from narthex.runtime.feed import Feed
from narthex.runtime.logs import LOGGER, printable
from narthex.runtime.problems import Problems
from narthex.runtime.reconciler import Reconciler

LOOK_SECONDS = 5.0
"""Everything is decided again this often, though nothing seems to have changed."""
_FILE_SECONDS = 1.0
"""The file with the pools is looked at this often."""
_AGAIN_SECONDS = 1.0
"""Rest after a server that does not answer."""


class LoadBalancerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller was told."""

    balancer_class: str = ""
    config: Path | None = None
    """File with the pools; None: they are custom resources."""
    cluster_cidrs: tuple[str, ...] = ()


class ControllerCounts(msgspec.Struct, kw_only=True):
    """What the controller shows of itself."""

    uses: tuple[PoolUse, ...] = ()
    given: int = 0
    """Services that have what they ask for."""
    waiting: int = 0
    """Services that are refused something."""
    foreign: int = 0
    """Services whose status another controller writes."""
    allocations: int = 0
    cleared: int = 0
    turn_at: float = 0.0
    """Of the clock, when it last looked for work."""


class LoadBalancerController:
    """One controller. `run` belongs to one thread; `stop` may be called from any, and from a signal handler."""

    def __init__(
        self, access: Access, settings: LoadBalancerSettings, leader: Leader, events: Events, clock: Clock
    ) -> None:
        self._access = access
        self._settings = settings
        self._leader = leader
        self._events = events
        self._clock = clock
        self._file = PoolsFile(settings.config) if settings.config is not None else None
        self._loop = Reconciler(clock)
        self._resources = ExitStack()
        """Of the present term."""
        self._number = 0
        """Of the present term; 0 while another process leads."""
        self._term: _Term | None = None
        self.counts = ControllerCounts()
        self.followed: tuple[Followed, ...] = ()
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
            return LOOK_SECONDS
        return self._term.turn(lambda: 0.0 if self._loop.stopping else self._leader.allowance(number))

    def _begin_term(self) -> _Term:
        """Start to follow the API server, until `_resources` is closed."""
        kinds = [ALL_SERVICES, NAMESPACES, NODES, SERVICE_CIDRS, *([] if self._file is not None else [ADDRESS_POOLS])]
        source = KubeSource(self._access, kinds, newest=True)
        self.followed = source.followed
        writer = StatusWriter(self._access, self._clock)
        self._resources.callback(writer.close)
        self.results = writer.results
        feed = Feed(source)
        self._resources.enter_context(feed.running(self._loop.wake))
        return _Term(
            self._settings, self._file, source, feed, writer, self._events, self.counts, self._access, self._clock
        )


class _Term:
    """What one term works with, from its first list to its end."""

    def __init__(
        self,
        settings: LoadBalancerSettings,
        file: PoolsFile | None,
        source: KubeSource,
        feed: Feed,
        writer: StatusWriter,
        events: Events,
        counts: ControllerCounts,
        access: Access,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._file = file
        self._source = source
        self._feed = feed
        self._problems = Problems()
        self._writer = writer
        self._events = events
        self._counts = counts
        self._access = access
        self._store = Store()
        self._ledger = AllocationLedger()
        self._told: dict[NamespacedName, frozenset[ServiceEvent]] = {}
        self._refusals: dict[NamespacedName, str] = {}
        self._settled: tuple[tuple[object, ...], Pools] | None = None
        self._patience = LOOK_SECONDS if file is None else _FILE_SECONDS
        self._seen: tuple[Snapshot | None, tuple[IPAddressPool, ...] | None] = None, None
        self._idle_until = 0.0

    def turn(self, allowance: Callable[[], float]) -> float:
        """Decide, and write what differs; the seconds until the next look."""
        for event in self._feed.take():
            self._store.apply(event)
        self._problems.tell(self._feed.problems)
        snapshot = self._store.snapshot
        objects = self._objects(snapshot)
        if not snapshot.synced or objects is None:
            return self._patience
        if snapshot is self._seen[0] and objects == self._seen[1] and self._clock.now() < self._idle_until:
            return self._patience
        self._seen, self._idle_until = (snapshot, objects), 0.0
        pools = self._pools(snapshot, objects)
        self._ledger.see(snapshot.services.values(), pools, self._clock.now())
        services = self._ledger.shown(snapshot.services.values())
        unreadable = self._unreadable(snapshot)
        if unreadable is None:
            return _AGAIN_SECONDS
        decisions = allocate(
            AllocationInput(
                services=services.values(),
                pools=pools,
                namespaces=namespace_labels(snapshot),
                balancer_class=self._settings.balancer_class,
                unreadable=unreadable,
                pools_unreadable=self._broken("IPAddressPool") > 0,
                promised=self._ledger.promised,
                withheld=self._ledger.withheld,
                settled=self._ledger.settled,
                overwritten=self._ledger.overwritten,
            )
        )
        self._ledger.decided(decisions)
        self._count(services, pools, decisions)
        self._writer.forget(lambda key: key in snapshot.services)
        self._told = {key: told for key, told in self._told.items() if key in decisions}
        try:
            wait = min([LOOK_SECONDS, *self._write(services, decisions, allowance)])
        except ServerUnavailable:
            return _AGAIN_SECONDS
        self._idle_until = self._clock.now() + wait
        return min(self._patience, wait)

    def _write(
        self,
        services: Mapping[NamespacedName, Service],
        decisions: Mapping[NamespacedName, AllocationDecision],
        allowance: Callable[[], float],
    ) -> list[float]:
        """Write what differs; for how long some of it has to wait."""
        waits = []
        for key, decision in decisions.items():
            service = services[key]
            todo = required_changes(service, decision)
            self._say(service, todo.standing)
            if todo.status is None and todo.pool is None:
                self._ledger.confirm(service, decision)
                continue
            if wait := self._writer.waits(service):
                waits.append(wait)
                continue
            if allowance() <= 0:
                raise ServerUnavailable
            # A first run with very many Services takes minutes.
            self._counts.turn_at = self._clock.now()
            if todo.status is not None:
                self._ledger.promise(service, decision.addresses, self._clock.now())
            outcome = self._writer.write(service, todo, allowance, partial(self._ledger.done, service))
            if outcome is not WriteOutcome.DONE:
                if outcome is WriteOutcome.REFUSED:
                    self._ledger.refused(service)
                waits.append(self._writer.waits(service))
                continue
            for told in todo.events:
                self._tell(service, told)
                self._counts.allocations += told.reason == "IPAllocated"
                self._counts.cleared += told.reason == "ClearAssignment"
        return waits

    def _objects(self, snapshot: Snapshot) -> tuple[IPAddressPool, ...] | None:
        """The pools; None while nobody knows them."""
        if self._file is None:
            return tuple(pool for _, pool in sorted(snapshot.address_pools.items()))
        found = self._file.current()
        return found.pools if self._file.ever_good else None

    def _pools(self, snapshot: Snapshot, objects: tuple[IPAddressPool, ...]) -> Pools:
        around = reserved_addresses(snapshot, self._settings.cluster_cidrs)
        key = (objects, around)
        if self._settled is None or self._settled[0] != key:
            self._settled = key, validate_pools(objects, around)
            self._say_refused(self._settled[1])
        return self._settled[1]

    def _say_refused(self, pools: Pools) -> None:
        refusals = {each.object.key: each.reason for each in pools.refused}
        for each in pools.refused:
            if self._refusals.get(each.object.key) != each.reason:
                LOGGER.warning("pool %s is refused: %s", each.object.name, printable(each.reason))
                if self._file is None:
                    self._events.tell(
                        Happening(
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

    def _unreadable(self, snapshot: Snapshot) -> Mapping[NamespacedName, tuple[str, ...]] | None:
        """What Services hold that cannot be used for a fault in them; None when nobody can tell."""
        if not self._broken("Service"):
            return {}
        return held_by_unreadable(self._access, lambda key: key in snapshot.services)

    def _broken(self, kind: str) -> int:
        return sum(each.broken for each in self._source.followed if each.kind == kind)

    def _say(self, service: Service, standing: tuple[ServiceEvent, ...]) -> None:
        """Tell what stands, once."""
        before = self._told.get(service.key, frozenset())
        self._told[service.key] = frozenset(standing)
        for told in standing:
            if told not in before:
                self._tell(service, told)

    def _tell(self, service: Service, told: ServiceEvent) -> None:
        LOGGER.log(30 if told.warning else 20, "%s: %s: %s", service.key, told.reason, printable(told.text))
        self._events.tell(
            Happening(
                kind="Service",
                object=service.key,
                uid=service.uid,
                warning=told.warning,
                reason=told.reason,
                action="AllocateAddress",
                note=told.text,
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
