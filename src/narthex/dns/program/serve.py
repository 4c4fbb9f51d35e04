"""The main process of the DNS server: reads objects and sends changes of names to the workers, which answer queries.

source ─ events ─> Store ─ snapshot ─> ZoneTracker ─ changes ─> workers
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from narthex.dns.corefile.settings import KubernetesSettings, ServerBlock
from narthex.dns.plugins.loop import LoopProbeSecrets
from narthex.dns.program.configuration import CorefileSource, DnsConfigurationError
from narthex.dns.program.listeners import ListenError, listen_addresses, reached_at
from narthex.dns.program.metrics import PROGRAMMING, server_metrics
from narthex.dns.program.status import Readiness, StatusEndpoints
from narthex.dns.program.worker_protocol import WorkerSetup
from narthex.dns.program.workers import WorkerPool
from narthex.dns.server.counters import AnswerCounts, BucketCounts, ResolverCounts, empty_buckets
from narthex.dns.server.dispatcher import DEFAULT_RECURSION_NETWORKS
from narthex.dns.zone.changes import ZoneChange, ZoneTracker
from narthex.linux.clock import Clock, SystemClock
from narthex.linux.privileges import allow_many_files
from narthex.model import (
    TRIGGER_TIME,
    EndpointSlice,
    Event,
    NamespacedName,
    Snapshot,
    Store,
    Synced,
    Upsert,
    network,
    trigger_time,
)
from narthex.runtime.logs import LOGGER, ProblemLog, start_logging
from narthex.runtime.metrics import exposition
from narthex.runtime.process import ended_by_signal
from narthex.runtime.reconciler import EventFeed, EventSource, Reconciler

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from narthex.kube.access import Access
    from narthex.kube.source import FollowedList

MAX_WORKERS = 4
"""Limit of the default number; each takes memory, and one answers a hundred thousand queries per second."""
Reread = Callable[[], tuple[ServerBlock, ...] | None]
"""Returns the server blocks if they have changed, and logs errors."""
_DRAIN_SECONDS = 1.0
"""Time for queries that have arrived before they were sent elsewhere, and for upstream servers to answer them."""
_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the workers."""


class DnsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a DNS server."""

    blocks: tuple[ServerBlock, ...]
    workers: int = 0
    """Number of worker processes; 0: one for each two processors, up to `MAX_WORKERS`."""
    recursion: tuple[str, ...] = DEFAULT_RECURSION_NETWORKS
    """Networks whose clients may use recursion."""

    @property
    def number(self) -> int:
        """The effective number of workers on this machine."""
        return self.workers or max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))


class DnsServer:
    """A DNS server, which runs once."""

    def __init__(
        self,
        settings: DnsSettings,
        source: EventSource,
        *,
        followed: Sequence[FollowedList] = (),
        reread: Reread = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        """Create the server. Nothing is opened yet.

        Args:
            settings: Settings of the server.
            source: Source of the objects.
            followed: States of the source's watches.
            reread: Called at the intervals of plugin `reload`.
            clock: Clock and sleep of the main loop.
        """
        self._settings = settings
        self._feed = EventFeed(source)
        self._followed = followed
        self._reread = reread
        self._lists_namespaces = bool(followed)
        """An API server has an object for each namespace; manifests rarely do."""
        self._clock = clock or SystemClock()
        self._store = Store()
        self._problems = ProblemLog()
        self._trackers: dict[int, ZoneTracker] = {}
        self._workers: WorkerPool | None = None
        self._blocks = settings.blocks
        self._programming: dict[str, BucketCounts] = {}
        self._endpoints = StatusEndpoints(lambda: exposition(self), self._readiness)
        self._lock = threading.Lock()
        """Held while events are processed or workers are replaced."""
        self._fault: Exception | None = None
        self._reconciler = Reconciler(self._clock)
        self._open_at = self._check_at = self._reload_at = 0.0
        """Times of the start with incomplete lists, the next check of the workers, and that of the Corefile."""
        self._terminating = False
        self._opened = False
        self._on_open: Callable[[], None] | None = None
        self._on_stop: Callable[[], None] | None = None
        self._started = self._clock.wall()

    @property
    def healthy(self) -> bool:
        """True while queries are answered from complete data."""
        workers = self._workers
        return self._opened and workers is not None and bool(workers.pids) and not self._readiness().missing

    def run(self, on_open: Callable[[], None] | None = None, on_stop: Callable[[], None] | None = None) -> None:
        """Serve until `stop`. Raises ListenError, and what the callbacks raise.

        `on_open` is called once queries are answered, to attract them, and `on_stop` at the end, to send them elsewhere; queries are
        answered for a moment longer.
        """
        self._on_open, self._on_stop = on_open, on_stop
        try:
            self._begin(self._settings.blocks)
            self._endpoints.open(self._settings.blocks)
            with self._feed.running(self._on_events):
                self._turns()
        finally:
            self._endpoints.close()
            if self._workers is not None:
                self._workers.close()

    def stop(self) -> None:
        """Make `run` return after the `lameduck` time. May be called from any thread at any time."""
        self._reconciler.stop()

    def _on_events(self) -> None:
        """Process events, in the thread of the source.

        Waking the main thread, which would have to wait for the GIL, would take as long as all the rest.
        """
        try:
            self._process_events()
        except Exception as error:
            self._fault = error
        if self._fault is not None or not self._opened:
            self._clock.wake()

    def _turns(self) -> None:
        patience = max((block.kubernetes.startup_timeout for block in self._blocks if block.kubernetes), default=0.0)
        now = self._clock.now()
        self._open_at, self._check_at, self._reload_at = (
            now + patience,
            now + _CHECK_INTERVAL,
            now + self._reload_after(),
        )
        self._process_events()
        self._reconciler.run(self._turn)
        self._shut_down()

    def _turn(self) -> float:
        self._check()
        now = self._clock.now()
        if not self._opened and (self._store.snapshot.synced or now >= self._open_at):
            self._open()
        if now >= self._check_at:
            assert self._workers is not None
            with self._lock:
                self._workers.check()
            self._check_at = now + _CHECK_INTERVAL
        if now >= self._reload_at:
            self._reload()
            self._reload_at = now + self._reload_after()
        due = min(self._check_at, self._reload_at, self._open_at if not self._opened else math.inf)
        return due - self._clock.now()

    def _check(self) -> None:
        """Raise the error of the source's thread, if there is one."""
        if self._fault is not None:
            raise self._fault

    def _shut_down(self) -> None:
        self._terminating = True
        lameduck = max((block.health.lameduck for block in self._blocks if block.health), default=0.0)
        if self._on_stop is not None and self._opened:
            self._on_stop()
            lameduck = max(lameduck, _DRAIN_SECONDS)
        until = self._clock.now() + lameduck
        while (left := until - self._clock.now()) > 0:
            # The source's thread still processes changes.
            self._clock.sleep(left)
            self._check()

    def _begin(self, blocks: tuple[ServerBlock, ...]) -> None:
        """Start workers for server blocks. Those of the previous Corefile hand over their sockets."""
        self._blocks = blocks
        listen = listen_addresses(blocks)
        before = self._workers
        trackers = {
            number: ZoneTracker(block.kubernetes, lists_namespaces=self._lists_namespaces)
            for number, block in enumerate(blocks)
            if block.kubernetes is not None
        }
        snapshot = self._store.snapshot
        for tracker in trackers.values():
            keys = {*snapshot.services, *snapshot.slices}
            tracker.update(snapshot, keys, set(snapshot.pods), int(self._clock.wall()))
        setup = WorkerSetup(
            blocks=(), listeners=(), own=reached_at(listen), recursion=self._settings.recursion, probes=draw_secrets()
        )

        def zones() -> dict[int, ZoneChange]:
            """Return each block's whole zone, for a worker that starts or starts again."""
            return {number: tracker.whole() for number, tracker in trackers.items()}

        workers = WorkerPool(blocks, listen, self._settings.number, setup, zones, before)
        try:
            workers.start()
        except BaseException:
            workers.close()
            raise
        self._trackers = trackers
        self._workers = workers
        if self._opened:
            workers.open()
        if before is not None:
            before.close()

    def _open(self) -> None:
        assert self._workers is not None
        self._workers.open()
        self._opened = True
        if self._on_open is not None:
            self._on_open()
        # The objects of the initial lists stay, so the garbage collector need not traverse them.
        gc.freeze()
        gc.enable()
        LOGGER.info(
            "answering at %s with %d workers; %d Services are known%s",
            ", ".join(sorted({f"{each.address} port {each.port}" for each in self._workers.listen})),
            self._settings.number,
            len(self._store.snapshot.services),
            "" if self._store.snapshot.synced or not self._trackers else "; the initial lists are not complete",
        )

    def _process_events(self) -> None:
        with self._lock:
            self._update_zones()

    def _update_zones(self) -> None:
        before = self._store.snapshot
        since: dict[NamespacedName, float] = {}
        for event in self._feed.take():
            self._note_trigger(event, since)
            self._store.apply(event)
        self._problems.update(self._feed.problems)
        snapshot = self._store.snapshot
        services, pods = self._store.take_changed(), self._store.take_changed_pods()
        if snapshot is before:
            return
        now = int(self._clock.wall())
        changes = {}
        for number, tracker in self._trackers.items():
            change = tracker.update(snapshot, services, pods, now)
            if change or snapshot.synced != before.synced:
                changes[number] = change
        if changes and self._workers is not None:
            self._workers.update(changes)
        sent = self._clock.wall()
        for key, when in since.items():
            buckets = self._programming.setdefault(_service_kind(snapshot, key), empty_buckets(PROGRAMMING))
            buckets.add(PROGRAMMING, max(0.0, sent - when))

    def _note_trigger(self, event: Event, since: dict[NamespacedName, float]) -> None:
        """Note the time of the change behind an event of endpoints, unless it is older than this process or known."""
        if not (isinstance(event, Upsert) and isinstance(event.object, EndpointSlice)):
            return
        after = event.object
        when = trigger_time(after)
        if when is None or when <= self._started:
            return
        slices = self._store.snapshot.slices.get(after.service)
        before = slices.get(after.name) if slices is not None else None
        if before is None or before.annotation(TRIGGER_TIME) != after.annotation(TRIGGER_TIME):
            since[after.service] = when

    def _reload_after(self) -> float:
        # Jitter, so that the servers with the same Corefile do not reload it at the same time.
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
            self._endpoints.open(blocks)
        except (ListenError, OSError) as error:
            LOGGER.error("the new Corefile cannot be applied; the previous one stays in force: %s", error)
            return
        LOGGER.info("the Corefile has changed and is in force")

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics, for prometheus-client."""
        return server_metrics(*self._counts(), self._programming, self._state())

    def _counts(self) -> tuple[AnswerCounts, dict[str, ResolverCounts]]:
        workers, blocks = self._workers, self._blocks
        if workers is None:
            return AnswerCounts(), {}
        counts, resolvers = workers.counts()
        return counts, {blocks[number].zones[0]: chain for number, chain in resolvers.items()}

    def _readiness(self) -> Readiness:
        missing = ("kubernetes",) if self._trackers and not self._store.snapshot.synced else ()
        return Readiness(missing, self._stale(), self._terminating)

    def _stale(self) -> str:
        """Return which watches cannot be maintained, and since when."""
        now = self._clock.wall()
        return ", ".join(
            f"{each.kind}: last message from the API server "
            + (f"{now - each.last_heard:.0f} s ago" if each.last_heard is not None else "never received")
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


def draw_secrets() -> LoopProbeSecrets:
    """Draw the loop probe secrets of all workers."""
    return LoopProbeSecrets(os.urandom(16).hex(), os.urandom(16).hex())


def _service_kind(snapshot: Snapshot, key: NamespacedName) -> str:
    """Return the kind of a Service as CoreDNS labels it."""
    service = snapshot.services.get(key)
    if service is None or not service.headless:
        return "cluster_ip"
    return "headless_with_selector" if service.selector else "headless_without_selector"


def serve(
    source: CorefileSource, manifests: Path | None, kubeconfig: str, master: str, workers: int, recursion: Sequence[str]
) -> None:
    """Serve until SIGTERM or SIGINT. Raises DnsConfigurationError and ListenError."""
    start_logging(sys.stderr)
    allow_many_files()
    for problem in source.problems:
        LOGGER.warning("%s", problem)
    try:
        networks = tuple(network(text) for text in recursion) or DEFAULT_RECURSION_NETWORKS
    except ValueError as error:
        raise DnsConfigurationError(f"--recursion-for: {error}") from error
    settings = DnsSettings(blocks=source.blocks, workers=workers, recursion=networks)
    server = build_server(settings, manifests, kubeconfig, master, source)
    # The initial lists leave no garbage to collect; the server enables collection when it starts to answer.
    gc.disable()
    with ended_by_signal(server.stop):
        server.run()
    LOGGER.info("stopped")


def build_server(
    settings: DnsSettings, manifests: Path | None, kubeconfig: str, master: str, source: CorefileSource | None = None
) -> DnsServer:
    """Build a server, which is not started. Raises DnsConfigurationError."""
    reread = source.reread if source is not None else lambda: None
    sections = _kubernetes_sections(settings)
    if not sections:
        return DnsServer(settings, NoObjects(), reread=reread)
    if manifests is not None:
        from narthex.kube.manifests import ManifestSource

        return DnsServer(settings, ManifestSource(manifests), reread=reread)
    chosen = next((each for each in sections if each.kubeconfig or each.endpoint), sections[0])
    for section in sections:
        if (section.kubeconfig, section.endpoint) not in ((chosen.kubeconfig, chosen.endpoint), ("", "")):
            raise DnsConfigurationError(
                f"kubernetes {section.zones[0]}: there is one API server for all sections; give all the same endpoint "
                "and kubeconfig"
            )
    kubeconfig, master = kubeconfig or chosen.kubeconfig, master or chosen.endpoint
    if not (kubeconfig or master or os.environ.get("KUBERNETES_SERVICE_HOST")):
        raise DnsConfigurationError("nothing to follow: give --kubeconfig, --master or --manifests (this is not a pod)")
    from narthex.kube.access import AccessError, access_to, read_kubeconfig

    try:
        if kubeconfig:
            read_kubeconfig(Path(kubeconfig).expanduser())
    except AccessError as error:
        raise DnsConfigurationError(str(error)) from error
    access = access_to(kubeconfig, master)
    return follow_api_server(settings, access, reread)


def follow_api_server(settings: DnsSettings, access: Access, reread: Reread) -> DnsServer:
    """Build a server for the objects of an API server, which is not started."""
    from narthex.kube.resources import of_names
    from narthex.kube.source import KubeSource

    sections = _kubernetes_sections(settings)
    source = KubeSource(
        access,
        of_names(
            endpoints=any(section.endpoints for section in sections),
            pods=any(section.pods == "verified" for section in sections),
        ),
        gather=0.0,
    )
    return DnsServer(settings, source, followed=source.followed, reread=reread)


def _kubernetes_sections(settings: DnsSettings) -> list[KubernetesSettings]:
    return [block.kubernetes for block in settings.blocks if block.kubernetes is not None]


class NoObjects:
    """The source of a server without plugin `kubernetes`: no objects, and no changes."""

    problems: Sequence[object] = ()

    def scan(self) -> Sequence[Event]:
        """Return the end of the initial lists."""
        return [Synced()]

    def changes(self, stop: threading.Event) -> Iterator[Sequence[Event]]:
        """Wait until `stop`."""
        stop.wait()
        return iter(())
