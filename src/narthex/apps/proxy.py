"""The node proxy's loop: events, Store, and each family's sync when it is due.

    source ─ events ─> Store ─ snapshot ─> FamilySync (plan, render, diff, apply), once per IP family

Events say when, never what. A turn of the loop takes in what is new and syncs the families that are due; between
turns it sleeps until the next one can be, or until it is woken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from narthex.apps.health import Health
from narthex.apps.metrics import Metrics
from narthex.apps.report import Reporter
from narthex.apps.sync import FamilySync, Sync
from narthex.host.clock import Clock
from narthex.model.events import Delete, Event, Synced
from narthex.model.names import NamespacedName
from narthex.state.store import Snapshot, Store

FIRST_RETRY = 1.0
"""Seconds until a failed sync is tried again; doubled each time, up to the sync period."""
READ_BACK_SHARE = 20
"""Reading the kernel back takes at most one part in this many of the time, also where there are very many rules."""


class Inbox(Protocol):
    """Where the loop finds what its source has told. Whoever fills it calls `Proxy.notice`."""

    @property
    def problems(self) -> Sequence[Any]:
        """What is wrong with the objects at present."""
        ...

    def take(self) -> Sequence[Event]:
        """What came since the last call; Synced comes once, after the first complete list."""
        ...


class Periods(msgspec.Struct, frozen=True):
    """Seconds between syncs."""

    minimum: float = 0.0
    """From the end of one sync to the start of the next; changes in between are one sync (row 21.2)."""
    sync: float = 30.0
    """The kernel is read back and healed this often; also the longest wait after a failure."""


class _Half:
    """When one family is due."""

    def __init__(self, sync: FamilySync[Any, Any]) -> None:
        self.sync = sync
        self.waiting: frozenset[NamespacedName] = frozenset()
        """Services that may differ since the last good sync."""
        self.seen: Snapshot | None = None
        """The snapshot of the last good sync."""
        self.ended = -math.inf
        """When the last sync ended, good or not."""
        self.earliest = -math.inf
        """Not before this: the minimum period, or the wait after a failure."""
        self.read_back_at = math.inf
        self.failures = 0

    def due(self, snapshot: Snapshot) -> float:
        """The time from which a sync makes sense."""
        wanted = self.read_back_at if snapshot is self.seen else -math.inf
        return max(wanted, self.earliest)

    def changed(self, services: frozenset[NamespacedName], periods: Periods) -> None:
        """A change came in. It may mend what failed, so a long wait is cut to the first one."""
        self.waiting |= services
        if self.failures:
            self.earliest = min(self.earliest, self.ended + max(FIRST_RETRY, periods.minimum))

    def succeeded(self, now: float, periods: Periods, snapshot: Snapshot, done: Sync) -> None:
        """Note a good sync that ended now."""
        self.waiting, self.seen, self.failures = frozenset(), snapshot, 0
        self.ended, self.earliest = now, now + periods.minimum
        if "read" in done.seconds:
            self.read_back_at = now + max(periods.sync, READ_BACK_SHARE * done.seconds["read"])

    def failed(self, now: float, periods: Periods) -> None:
        """Note a sync that failed now; wait longer each time."""
        self.seen = None
        self.ended = now
        self.earliest = now + max(periods.minimum, min(periods.sync, FIRST_RETRY * 2**self.failures))
        self.failures = min(self.failures + 1, 32)


class Proxy:
    """Owns the Store. Starts nothing by itself: `run` blocks the calling thread until `stop`."""

    def __init__(
        self,
        inbox: Inbox,
        families: Sequence[FamilySync[Any, Any]],
        clock: Clock,
        periods: Periods,
        *,
        node_name: str = "",
        complete: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
        health: Health | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`complete` adds to a snapshot what the node itself knows better (its own addresses)."""
        self._inbox = inbox
        self._halves = [_Half(family) for family in families]
        self._clock = clock
        self._periods = periods
        self._node = NamespacedName("", node_name)
        self._complete = complete
        self.health = health or Health([family.family for family in families], periods.sync, clock)
        self.metrics = metrics or Metrics()
        self._report = Reporter(node_name, len(families))
        self._store = Store()
        self._stopping = False

    def run(self) -> None:
        """Turn after turn, until stopped. The rules stay (row 21.20)."""
        while not self._stopping:
            self._clock.sleep(self.turn())

    def stop(self) -> None:
        """End `run` after the present turn. Safe in a signal handler."""
        self._stopping = True
        self._clock.wake()

    def notice(self) -> None:
        """There is something in the inbox. Safe from any thread."""
        self._clock.wake()

    def turn(self) -> float:
        """Take in what is new, sync what is due; return the seconds until the next turn makes sense."""
        self._take_in()
        snapshot = self._complete(self._store.snapshot)
        if snapshot.synced:
            for half in self._halves:
                if not self._stopping and self._clock.now() >= half.due(snapshot):
                    self._sync(half, snapshot)
        due = [half.due(snapshot) - self._clock.now() for half in self._halves if snapshot.synced]
        # A turn now and then also finds what nobody gives notice of: new addresses of the node.
        return max(0.0, min([*due, self._periods.sync]))

    def _take_in(self) -> None:
        before = self._store.snapshot
        for event in self._inbox.take():
            self._count(event)
        self._report.problems(self._inbox.problems)
        snapshot = self._store.snapshot
        changed = self._store.take_changed()
        if snapshot is before:
            return
        self.health.saw_node(snapshot.nodes.get(self._node))
        self._report.node(snapshot)
        for half in self._halves:
            half.changed(changed, self._periods)
            self.health.queued(half.sync.family)
            self.metrics.queued(half.sync.family, self._clock.wall())

    def _count(self, event: Event) -> None:
        before = self._store.snapshot
        if self._store.apply(event) is before or isinstance(event, Synced):
            return
        kind = event.kind if isinstance(event, Delete) else type(event.object).__name__
        self.metrics.changed(kind)

    def _sync(self, half: _Half, snapshot: Snapshot) -> None:
        family = half.sync.family
        read_back = self._clock.now() >= half.read_back_at
        try:
            done = half.sync.sync(snapshot, half.waiting, read_back=read_back)
        except Exception as error:
            half.failed(self._clock.now(), self._periods)
            self.metrics.failed(family)
            self._report.failed(family, error, half.earliest - half.ended)
            return
        half.succeeded(self._clock.now(), self._periods, snapshot, done)
        self.health.synced(family)
        self.metrics.synced(half.sync, done, self._clock.wall())
        if all(each.seen is snapshot for each in self._halves):
            self.metrics.nothing_pending()
        self._report.synced(done)
