"""The DNS server's own process: objects in, changes of names out to the workers that answer.

source ─ events ─> Store ─ snapshot ─> Recorder (which names differ) ─> workers
"""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.plugins.loop import Secrets
from narthex.dns.program.elsewhere import PRIVATE
from narthex.dns.program.listeners import ListenError, places, reached_at
from narthex.dns.program.metrics import Metrics, Programmed
from narthex.dns.program.status import Ports, Readiness
from narthex.dns.program.workers import Workers
from narthex.dns.server.meter import ResolverCounts
from narthex.dns.server.speech import Setup
from narthex.dns.server.tally import Counts
from narthex.dns.zone.changes import Change, Recorder
from narthex.linux.clock import Clock, SystemClock
from narthex.model.names import NamespacedName
from narthex.model.objects import EndpointSlice
from narthex.model.store import Event, Snapshot, Store, Upsert
from narthex.model.trigger_time import TRIGGER_TIME, trigger_time
from narthex.runtime.feed import EventFeed, EventSource
from narthex.runtime.logs import LOGGER, ProblemLog
from narthex.runtime.metrics import Collector
from narthex.runtime.reconciler import Reconciler

MOST_WORKERS = 4
"""By default; more want more memory, and one answers a hundred thousand questions a second."""
_LOOK = 1.0
"""Seconds between two looks at the workers."""


class DnsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a DNS server is told."""

    blocks: tuple[ServerBlock, ...]
    workers: int = 0
    """Processes that answer; 0: one for each two processors, up to four."""
    recursion: tuple[str, ...] = PRIVATE
    """Networks whose questions may be handed on to others."""

    @property
    def number(self) -> int:
        """How many workers that means here."""
        return self.workers or max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // 2))


class Heard(Protocol):
    """What is known of a list at the API server, see `sources.kube.source.Followed`."""

    @property
    def kind(self) -> str:
        """What it lists."""
        ...

    @property
    def last_heard(self) -> float | None:
        """The last sign of life, in seconds since 1970."""
        ...

    @property
    def trouble(self) -> bool:
        """It cannot be kept up at present."""
        ...


class DnsPart:
    """The DNS server, for one run."""

    def __init__(
        self,
        settings: DnsSettings,
        source: EventSource,
        *,
        followed: Sequence[Heard] = (),
        collectors: Sequence[Collector] = (),
        reread: Callable[[], tuple[ServerBlock, ...] | None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """`followed` tells of the source's lists. `reread` is asked now and then for other server blocks, None: they
        are the same; it logs what is wrong with them. Nothing is opened yet."""
        self._settings = settings
        self._feed = EventFeed(source)
        self._followed = followed
        self._reread = reread
        self._clock = clock or SystemClock()
        self._store = Store()
        self._problems = ProblemLog()
        self._recorders: dict[int, Recorder] = {}
        self._workers: Workers | None = None
        self._blocks = settings.blocks
        self._programmed = Programmed()
        self._metrics = Metrics(self._counts, self._programmed, self._state, collectors)
        self._ports = Ports(self._metrics, self._readiness)
        self._lock = threading.Lock()
        """Held by whoever takes events in or exchanges workers."""
        self._fault: Exception | None = None
        self._reconciler = Reconciler(self._clock)
        self._latest = self._look_at = self._reload_at = 0.0
        """When questions are answered although lists are missing, and when workers and the Corefile are looked at."""
        self._ending = False
        self._opened = False
        self._started = self._clock.wall()

    @property
    def healthy(self) -> bool:
        """Whether questions are answered, by all that is known."""
        workers = self._workers
        return self._opened and workers is not None and bool(workers.pids) and not self._readiness().missing

    def run(self) -> None:
        """Serve until `stop`. Raises ListenError."""
        try:
            self._begin(self._settings.blocks)
            self._ports.open(self._settings.blocks)
            with self._feed.running(self._heard):
                self._turns()
        finally:
            self._ports.close()
            if self._workers is not None:
                self._workers.close()

    def stop(self) -> None:
        """Let `run` return, after `lameduck`. Safe from any thread, at any time."""
        self._reconciler.stop()

    def _heard(self) -> None:
        """Called by the thread that watches. It passes changes on itself: to wake the other one, which has to wait for
        Python's lock, would take as long as all the rest."""
        try:
            self._take_in()
        except Exception as error:
            self._fault = error
        if self._fault is not None or not self._opened:
            self._clock.wake()

    def _turns(self) -> None:
        patience = max((block.kubernetes.startup_timeout for block in self._blocks if block.kubernetes), default=0.0)
        now = self._clock.now()
        self._latest, self._look_at, self._reload_at = now + patience, now + _LOOK, now + self._reload_after()
        self._take_in()
        self._reconciler.run(self._turn)
        self._end()

    def _turn(self) -> float:
        """Do what is due by itself; return the seconds until the next turn."""
        self._check()
        now = self._clock.now()
        if not self._opened and (self._store.snapshot.synced or now >= self._latest):
            self._open()
        if now >= self._look_at:
            assert self._workers is not None
            with self._lock:
                self._workers.look()
            self._look_at = now + _LOOK
        if now >= self._reload_at:
            self._reload()
            self._reload_at = now + self._reload_after()
        due = min(self._look_at, self._reload_at, self._latest if not self._opened else math.inf)
        return due - self._clock.now()

    def _check(self) -> None:
        """Raises what went wrong in the thread that watches."""
        if self._fault is not None:
            raise self._fault

    def _end(self) -> None:
        self._ending = True
        lameduck = max((block.health.lameduck for block in self._blocks if block.health), default=0.0)
        until = self._clock.now() + lameduck
        while (left := until - self._clock.now()) > 0:
            # What changes meanwhile still counts, and is taken in by the thread that watches.
            self._clock.sleep(left)
            self._check()

    def _begin(self, blocks: tuple[ServerBlock, ...]) -> None:
        """Start workers for these server blocks, in the sockets of those before where they are the same."""
        self._blocks = blocks
        found = places(blocks)
        before = self._workers
        recorders = {
            number: Recorder(block.kubernetes) for number, block in enumerate(blocks) if block.kubernetes is not None
        }
        snapshot = self._store.snapshot
        for recorder in recorders.values():
            keys = {*snapshot.services, *snapshot.slices}
            recorder.update(snapshot, keys, set(snapshot.pods), int(self._clock.wall()))
        setup = Setup(
            blocks=(), listeners=(), own=reached_at(found), recursion=self._settings.recursion, probes=_secrets()
        )
        workers = Workers(blocks, found, self._settings.number, setup, lambda: _whole(recorders), before)
        try:
            workers.start()
        except BaseException:
            workers.close()
            raise
        self._recorders = recorders
        self._workers = workers
        if self._opened:
            workers.open()
        if before is not None:
            before.close()

    def _open(self) -> None:
        assert self._workers is not None
        self._workers.open()
        self._opened = True
        # The objects of the first lists stay; nobody need look through them for cycles again.
        gc.freeze()
        gc.enable()
        LOGGER.info(
            "answering at %s, by %d workers; %d Services are known%s",
            ", ".join(sorted({f"{place.address} port {place.port}" for place in self._workers.places})),
            self._settings.number,
            len(self._store.snapshot.services),
            "" if self._store.snapshot.synced or not self._recorders else ", but not all: the lists are not complete",
        )

    def _take_in(self) -> None:
        with self._lock:
            self._pass_on()

    def _pass_on(self) -> None:
        before = self._store.snapshot
        since: dict[NamespacedName, float] = {}
        for event in self._feed.take():
            self._note(event, since)
            self._store.apply(event)
        self._problems.tell(self._feed.problems)
        snapshot = self._store.snapshot
        services, pods = self._store.take_changed(), self._store.take_changed_pods()
        if snapshot is before:
            return
        now = int(self._clock.wall())
        changes = {}
        for number, recorder in self._recorders.items():
            change = recorder.update(snapshot, services, pods, now)
            if change or snapshot.synced != before.synced:
                changes[number] = change
        if changes and self._workers is not None:
            self._workers.tell(changes)
        told = self._clock.wall()
        for key, when in since.items():
            self._programmed.took(_kind(snapshot, key), told - when)

    def _note(self, event: Event, since: dict[NamespacedName, float]) -> None:
        """When the change happened that an endpoint's event is about, if that was while we were here. The same time twice
        is the same change."""
        if not (isinstance(event, Upsert) and isinstance(event.object, EndpointSlice)):
            return
        after = event.object
        when = trigger_time(after)
        if when is None or when <= self._started:
            return
        held = self._store.snapshot.slices.get(after.service)
        before = held.get(after.name) if held is not None else None
        if before is None or before.annotation(TRIGGER_TIME) != after.annotation(TRIGGER_TIME):
            since[after.service] = when

    def _reload_after(self) -> float:
        # Many servers with one Corefile are not to read it all at once.
        part = int.from_bytes(os.urandom(2), "big") / 0x8000 - 1
        found = [
            block.reload.interval + block.reload.jitter * part for block in self._blocks if block.reload is not None
        ]
        return min(found, default=1e6)

    def _reload(self) -> None:
        blocks = self._reread()
        if blocks is None:
            return
        try:
            with self._lock:
                self._begin(blocks)
            self._ports.open(blocks)
        except (ListenError, OSError) as error:
            LOGGER.error("the new Corefile is not in force: %s", error)
            return
        LOGGER.info("the Corefile has changed and is in force")

    def _counts(self) -> tuple[Counts, dict[str, ResolverCounts]]:
        workers, blocks = self._workers, self._blocks
        if workers is None:
            return Counts(), {}
        counts, resolvers = workers.counts()
        return counts, {blocks[number].zones[0]: held for number, held in resolvers.items()}

    def _readiness(self) -> Readiness:
        missing = ("kubernetes",) if self._recorders and not self._store.snapshot.synced else ()
        return Readiness(missing, self._stale(), self._ending)

    def _stale(self) -> str:
        """Which lists cannot be kept up, and for how long."""
        now = self._clock.wall()
        return ", ".join(
            f"{each.kind}: last word from the API server "
            + (f"{now - each.last_heard:.0f} s ago" if each.last_heard is not None else "never came")
            for each in self._followed
            if each.trouble
        )

    def _state(self) -> dict[str, float]:
        workers = self._workers
        heard = [each.last_heard for each in self._followed if each.last_heard is not None]
        state = {
            "panics": float(workers.restarts if workers is not None else 0),
            "narthex_dns_workers": float(len(workers.pids) if workers is not None else 0),
            "narthex_dns_services": float(len(self._store.snapshot.services)),
            "narthex_dns_synced": float(self._store.snapshot.synced),
        }
        if heard:
            state["narthex_dns_heard_age_seconds"] = max(0.0, self._clock.wall() - min(heard))
        return state


def _secrets() -> Secrets:
    return Secrets(os.urandom(16).hex(), os.urandom(16).hex())


def _whole(recorders: dict[int, Recorder]) -> dict[int, Change]:
    return {number: recorder.whole() for number, recorder in recorders.items()}


def _kind(snapshot: Snapshot, key: NamespacedName) -> str:
    """CoreDNS's words for kinds of Services."""
    service = snapshot.services.get(key)
    if service is None or not service.headless:
        return "cluster_ip"
    return "headless_with_selector" if service.selector else "headless_without_selector"
