"""The node proxy's reconcile loop: events, Store, and the sync of each IP family when it is due.

    source ─ events ─> Store ─ snapshot ─> FamilySync (plan, advance, apply), once per IP family

A turn of the loop applies new events to the Store and syncs the families that are due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import msgspec

from narthex.kube.events import ClusterEvent
from narthex.linux.clock import Clock
from narthex.linux.monitor import ForeignChanges
from narthex.model import (
    AnyObject,
    Delete,
    EndpointSlice,
    Event,
    IPFamily,
    NamespacedName,
    Service,
    Snapshot,
    Store,
    Synced,
    Upsert,
)
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.health import ProxyHealth
from narthex.proxy.program.metrics import ProgrammingLatency, ProxyMetrics
from narthex.proxy.program.report import BalancingReporter, ExternalIPReporter, SyncReporter
from narthex.proxy.program.schedule import FamilySchedule, LookBudget, SyncPeriods
from narthex.proxy.program.sync import FamilySync, Look, SyncResult
from narthex.runtime.reconciler import Reconciler


class EventInbox(Protocol):
    """A queue of events from the source. Its producer calls `Proxy.notice`."""

    @property
    def problems(self) -> Sequence[Any]:
        """Return the present problems of objects."""
        ...

    def take(self) -> Sequence[Event]:
        """Return the events since the last call; Synced comes once, after the first complete list."""
        ...


class Proxy:
    """The owner of the Store and of one sync per family. `run` blocks the calling thread until `stop`."""

    def __init__(
        self,
        inbox: EventInbox,
        families: Sequence[FamilySync[Any, Any]],
        clock: Clock,
        periods: SyncPeriods,
        *,
        node_name: str = "",
        complete: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
        foreign: ForeignChanges | None = None,
        health: ProxyHealth | None = None,
        metrics: ProxyMetrics | None = None,
        follow: Callable[[Plan], float] = lambda _: math.inf,
        after_sync: Callable[[SyncResult], object] = lambda _: None,
        record: Callable[[ClusterEvent], object] = lambda _: None,
        balancing_problem: Callable[[Service], str] = lambda _: "",
    ) -> None:
        """Prepare the loop; nothing is started.

        `complete` adds the node's own addresses to a snapshot. `foreign` reports rules changed by others (row 29.9).
        `follow` receives the plan in force of each family at each turn and returns the seconds until it must be
        called again. `after_sync` receives the result of each successful sync, `record` receives Events.
        `balancing_problem` returns why a Service's request for load balancing has no effect.
        """
        self._inbox = inbox
        budget = LookBudget()
        self._halves = [FamilySchedule(family, budget) for family in families]
        self._clock = clock
        self._periods = periods
        self._node = NamespacedName("", node_name)
        self._complete = complete
        self._foreign = foreign
        self.health = health or ProxyHealth([family.family for family in families], periods.sync, clock)
        self.metrics = metrics or ProxyMetrics()
        self._follow = follow
        self._after_sync = after_sync
        self._report = SyncReporter(node_name, len(families), record)
        self._external_ips = ExternalIPReporter(node_name)
        self._balancing = BalancingReporter(balancing_problem, record)
        self._programming = ProgrammingLatency(clock.wall())
        self._store = Store()
        self._loop = Reconciler(clock)
        self._other: tuple[Callable[[IPFamily], Planner], SyncPeriods] | None = None

    @property
    def snapshot(self) -> Snapshot:
        """Return the present objects."""
        return self._store.snapshot

    @property
    def plans(self) -> list[Plan]:
        """Return the plans in force, by family. Safe from any thread."""
        return [half.sync.plan for half in self._halves if half.sync.plan is not None]

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Take turns until `stop`, or until the condition holds after a turn.

        The rules stay in the kernel (row 21.20).
        """
        self._loop.run(self.turn, until)

    def stop(self) -> None:
        """End `run` after the present turn. Safe in a signal handler."""
        self._loop.stop()

    def notice(self) -> None:
        """Wake the loop, since the inbox has events. Safe from any thread."""
        self._clock.wake()

    def _notice_foreign(self) -> None:
        """Doubt all rules until the loop has looked, even if it is busy, and wake it. Safe from any thread."""
        for half in self._halves:
            self.health.suspected(half.sync.family)
        self._clock.wake()

    @property
    def contested(self) -> bool:
        """Return True while another program changes our rules again and again."""
        return any(half.contests for half in self._halves)

    def use(self, planner: Callable[[IPFamily], Planner], periods: SyncPeriods) -> None:
        """Replace the planner and the periods at the next turn. Safe from any thread."""
        self._other = planner, periods
        self._clock.wake()

    def listening(self) -> AbstractContextManager[None]:
        """Return a context in which changes by others wake the loop."""
        return self._foreign.listening(self._notice_foreign) if self._foreign else nullcontext()

    def turn(self) -> float:
        """Apply new events and sync what is due; return the seconds until the next turn is due."""
        self._take_in()
        self._go_over()
        self._look()
        snapshot = self._complete(self._store.snapshot)
        if snapshot.synced:
            for half in self._halves:
                if not self._loop.stopping and self._clock.now() >= half.due(snapshot):
                    self._sync(half, snapshot)
        followed = [self._follow(half.sync.plan) for half in self._halves if half.sync.plan is not None]
        due = [half.due(snapshot) - self._clock.now() for half in self._halves if snapshot.synced]
        due += [delay for half in self._halves if (delay := half.sync.tend()) is not None]
        # A periodic pass also finds changes without a notification: new addresses of the node.
        return max(
            0.0, min([*due, *followed, self._foreign.interval if self._foreign else math.inf, self._periods.sync])
        )

    def _is_blocked(self, half: FamilySchedule, done: SyncResult, began: float) -> bool:
        """Note which changes were refused. Return True if none was written: they wait for a change of the objects."""
        refused = done.refused
        blocked = refused is not None and refused.everything
        self.health.refused(done.family, len(refused.services) if refused is not None else 0, blocked=blocked)
        if blocked and done.wrote:
            # The rules in force were damaged, and are repaired.
            self.metrics.synced(half.sync, done, self._clock.wall())
        if blocked and not half.suspicious:
            self.health.checked(done.family, began)
        return blocked

    def _go_over(self) -> None:
        other, self._other = self._other, None
        if other is None:
            return
        planner, periods = other
        self._periods = msgspec.structs.replace(periods, watched=self._periods.watched)
        self.health.pace(periods.sync)
        for half in self._halves:
            half.sync.use(planner(half.sync.family))
            half.seen = None
            self.health.queued(half.sync.family)

    def _look(self) -> None:
        """Check whether others may have changed our rules."""
        if self._foreign is None:
            return
        changes = self._foreign.look()
        for half in self._halves:
            count = changes.get(half.sync.family, 0)
            if not count and not half.suspicious:
                self.health.trusted(half.sync.family)
            if count:
                half.suspect(self._foreign.touched(half.sync.family), self._periods)
                self.health.suspected(half.sync.family)
                self.metrics.foreign(half.sync.family, count)

    def _take_in(self) -> None:
        before = self._store.snapshot
        snapshot = self._store.apply_all(self._inbox.take(), self._count)
        self._report.problems(self._inbox.problems)
        changed = self._store.take_changed()
        if snapshot is before:
            return
        self.health.saw_node(snapshot.nodes.get(self._node))
        self._report.node(snapshot)
        self._report.health_check_ports(snapshot, changed)
        self._external_ips.update(snapshot, changed)
        self._balancing.update(snapshot, changed)
        for half in self._halves:
            half.changed(changed, self._periods)
            if snapshot.synced:
                # Before that, the sync waits for the source, which a new process would do as well (row 17.7).
                self.health.queued(half.sync.family)
            self.metrics.queued(half.sync.family, self._clock.wall())

    def _count(self, event: Event, before: AnyObject | None) -> None:
        if isinstance(event, Synced):
            return
        if isinstance(event, Upsert) and isinstance(event.object, EndpointSlice):
            self._programming.saw(before if isinstance(before, EndpointSlice) else None, event.object)
        kind = event.kind if isinstance(event, Delete) else type(event.object).__name__
        self.metrics.changed(kind)

    def _sync(self, half: FamilySchedule, snapshot: Snapshot) -> None:
        family = half.sync.family
        began = self._clock.now()
        look = half.look(began)
        try:
            touched = half.touched if look is Look.ALL else half.unchecked
            done = half.sync.sync(snapshot, half.waiting, look=look, touched=touched)
        except Exception as error:
            half.failed(self._clock.now(), self._periods)
            # A failed write waits, even if no object changes (row 29.1).
            self.health.queued(family)
            self.metrics.failed(family)
            self._report.failed(family, error, half.earliest - half.ended)
            return
        if done.doubted_until is not None:
            half.deferred(self._clock.now(), self._periods, snapshot, done.doubted_until)
            self.health.synced(family, checked_at=None if half.suspicious else began)
            self._report.doubted(family, done.doubted_until - half.ended)
            return
        half.succeeded(self._clock.now(), self._periods, snapshot, done)
        self.metrics.verified(done)
        self._report.verified(done, self._store.snapshot)
        if self._is_blocked(half, done, began):
            return
        self.health.synced(family, checked_at=None if half.suspicious else began)
        self.metrics.synced(half.sync, done, self._clock.wall())
        self.metrics.waited(family, self._programming.written(family, self._clock.wall()))
        if all(each.seen is snapshot for each in self._halves):
            self.metrics.nothing_pending()
        self._report.synced(done)
        self._report.contested(family, half.contests)
        self._after_sync(done)
