"""The announcer as a part of a node: sockets, the loop around `Announcer`, status, and metrics.

Works in the network namespace of the thread that calls `run`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.kube.origin import Origin
from narthex.kube.resources import of_an_announcer
from narthex.kube.source import KubeSource
from narthex.lb.heartbeat import HeartbeatTimes, Membership
from narthex.lb.kernel.heartbeats import HeartbeatSockets
from narthex.lb.kernel.links import LinkChanges
from narthex.lb.kernel.packets import RawLinkTransport
from narthex.lb.program import announcer_status
from narthex.lb.program.announcing import Announcer
from narthex.lb.program.files import HeartbeatKeyError, PoolsFile, read_keys
from narthex.lb.program.status_writes import ConditionWriter
from narthex.linux.clock import SystemClock
from narthex.runtime.configuration.values import AnnouncerConfiguration
from narthex.runtime.http.messages import HttpResponse
from narthex.runtime.logs import LOGGER, ProblemLog
from narthex.runtime.process import StartError
from narthex.runtime.reconciler import EventFeed, Reconciler
from narthex.runtime.status import StatusPaths

if TYPE_CHECKING:
    from prometheus_client.core import Metric

RESCAN_SECONDS = 10.0
"""Interval at which links, pools, and keys are read again without a notification."""

_LINK_REST = 0.1
"""Debounce delay: link changes come in bursts."""

_SAY_EVERY = 0.5
"""Seconds between two updates of Service conditions."""

LEAVE_SECONDS = 4.0
"""Time for other nodes to take over during shutdown."""


PATH = "/announcer"
"""Path of its state on the status port."""
_LATE = 3 * RESCAN_SECONDS
"""Seconds without an iteration after which the part is unhealthy."""


def origin_of(origin: Origin, *, pools: bool) -> Origin:
    """Return the source of an announcer's objects: the proxy's directory, or separate watches on the same API server.

    `pools` is True if the pools are custom resources.
    """
    if origin.access is None:
        return origin
    return origin._replace(source=KubeSource(origin.access, of_an_announcer(pools=pools)))


class AnnouncerPart:
    """One run of the announcer."""

    def __init__(
        self,
        node_name: str,
        configuration: AnnouncerConfiguration,
        origin: Origin,
        status: StatusPaths | None = None,
        times: HeartbeatTimes | None = None,
    ) -> None:
        """Configure the announcer.

        `origin` has the objects, and the API server for conditions; `status` the ports that expose its state.
        """
        self._node = node_name
        self._configuration = configuration
        self._origin = origin
        self._status = status
        self._times = times or HeartbeatTimes()
        self._clock = SystemClock()
        self._reconciler = Reconciler(self._clock)
        self._lock = threading.Lock()
        self._announcing: Announcer | None = None
        self._loop: AnnouncerLoop | None = None

    @property
    def healthy(self) -> bool:
        """True if the loop is running and the objects are synced."""
        announcing, loop = self._announcing, self._loop
        if announcing is None or loop is None:
            return False
        return announcing.snapshot.synced and time.monotonic() - loop.turned < _LATE

    def stop(self) -> None:
        """End `run` after other nodes have taken over its addresses."""
        self._reconciler.stop()

    def state(self) -> dict[str, Any]:
        """Return the current state as data (`docs/reference/announcer.md`)."""
        with self._lock:
            if self._announcing is None:
                return {"node": self._node, "running": False}
            state: dict[str, Any] = msgspec.to_builtins(announcer_status.status(self._announcing, time.monotonic()))
        return state

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        with self._lock:
            return tuple(announcer_status.metrics(self._announcing)) if self._announcing else ()

    def run(self) -> None:
        """Announce addresses until `stop`. Raises StartError."""
        with ExitStack() as stack:
            try:
                keys = read_keys(self._configuration.key_file)
                heartbeats = HeartbeatSockets(self._configuration.port)
                stack.callback(heartbeats.close)
                transport = RawLinkTransport(self._configuration.exclude_interfaces, _Once().warn)
                stack.callback(transport.close)
                changes = LinkChanges()
                stack.callback(changes.close)
            except HeartbeatKeyError as error:
                raise StartError(str(error)) from error
            except OSError as error:
                why = f"the announcer cannot open its sockets: {error.strerror or error}"
                raise StartError(f"{why}; it needs root (CAP_NET_RAW), and its UDP port for itself") from error
            now = time.monotonic()
            run = int.from_bytes(os.urandom(8)) | 1
            membership = Membership(self._node, run, keys, now, self._times)
            announcing = Announcer(
                self._node,
                membership,
                transport,
                heartbeats.send,
                ignore_exclude_label=self._configuration.ignore_exclude_label,
            )
            feed = EventFeed(self._origin.source)
            pools = PoolsFile(Path(self._configuration.pools_file)) if self._configuration.pools_file else None
            writer = None
            if self._origin.access is not None:
                writer = ConditionWriter(self._origin.access)
                stack.enter_context(writer.running())
            if self._status is not None:
                self._status.offer(
                    PATH, lambda: HttpResponse(200, msgspec.json.encode(self.state()), "application/json")
                )
                stack.callback(self._status.withdraw, PATH)
            stack.enter_context(feed.running(self._reconciler.wake))
            loop = AnnouncerLoop(
                announcing, transport, heartbeats, changes, feed,
                lock=self._lock, clock=self._clock, key_file=self._configuration.key_file, pools=pools, conditions=writer,
            )  # fmt: skip
            with self._lock:
                self._announcing, self._loop = announcing, loop
            stack.callback(self._forget)
            loop.run(self._reconciler)

    def _forget(self) -> None:
        with self._lock:
            self._announcing = self._loop = None


class _Once:
    """Logs each warning once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, what: str) -> None:
        """Log a warning unless it was logged before."""
        if what not in self._said and len(self._said) < 1000:
            self._said.add(what)
            LOGGER.warning("announcer: %s", what)


class AnnouncerLoop:
    """The event loop of one thread."""

    def __init__(
        self,
        announcing: Announcer,
        transport: RawLinkTransport,
        heartbeats: HeartbeatSockets,
        changes: LinkChanges,
        feed: EventFeed,
        *,
        lock: AbstractContextManager[object],
        clock: SystemClock,
        key_file: str,
        pools: PoolsFile | None = None,
        conditions: ConditionWriter | None = None,
    ) -> None:
        """Set up the loop. `lock` is held during each iteration."""
        self._announcing = announcing
        self._transport = transport
        self._heartbeats = heartbeats
        self._changes = changes
        self._feed = feed
        self._lock = lock
        self._clock = clock
        self._key_file = key_file
        self._key_fault = ""
        self._pools = pools
        self._conditions = conditions
        self._look_at = 0.0
        """When to read links, pools, and keys again."""
        self._problems = ProblemLog()
        self._say_at = 0.0
        self.turned = clock.now()
        """Time of the last iteration."""

    def run(self, reconciler: Reconciler) -> None:
        """Iterate until the reconciler stops, then until other nodes have taken over or LEAVE_SECONDS have passed."""
        self._watch()
        reconciler.run(self._turn)
        limit = self._clock.now() + LEAVE_SECONDS
        with self._lock:
            self._announcing.leave()
        if not self._announcing.finished:
            Reconciler(self._clock).run(
                lambda: min(self._turn(), limit - self._clock.now()),
                until=lambda: self._announcing.finished or self._clock.now() >= limit,
            )
        with self._lock:
            self._announcing.end(self._clock.now())

    def _turn(self) -> float:
        """Do everything that is due; return the seconds until the next iteration."""
        timeout = self._announcing.membership.times.timeout
        now = self._clock.now()
        with self._lock:
            stood = self._announcing.membership.seconds_since_sent(now)
            if stood > timeout:
                self._announcing.resume_after_stall(now, stood)
            self._take_in(now)
            self._announcing.turn(now)
            self._announcing.answer(now)
            if self._conditions is not None and now >= self._say_at:
                self._say_at = now + _SAY_EVERY
                self._conditions.want(self._announcing.conditions(now))
            self.turned = self._clock.now()
        return min(self._announcing.next_due(self.turned), self._look_at) - self.turned

    def _take_in(self, now: float) -> None:
        if self._changes.drain():
            self._look_at = min(self._look_at, now + _LINK_REST)
        if now >= self._look_at:
            self._look_at = now + RESCAN_SECONDS
            self._look(now)
        self._announcing.apply_events(self._feed.take())
        self._problems.update(self._feed.problems)
        self._announcing.handle_heartbeats(list(self._heartbeats.received()), list(self._heartbeats.refusals()), now)

    def _look(self, now: float) -> None:
        if self._announcing.rescan_links(now):
            self._watch()
        if self._pools is not None:
            found = self._pools.current()
            self._announcing.use_pools(found.pools, found.advertisements)
        try:
            self._announcing.membership.keys = read_keys(self._key_file)
            self._key_fault = ""
        except HeartbeatKeyError as error:
            if str(error) != self._key_fault:
                self._key_fault = str(error)
                LOGGER.error("announcer: %s; the previous key stays in use", error)

    def _watch(self) -> None:
        self._clock.watch_files((self._changes.fileno(), *self._heartbeats.files, *self._transport.files))
