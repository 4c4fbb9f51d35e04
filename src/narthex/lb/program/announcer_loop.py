"""The announcer's event loop: waits for heartbeats, frames, link changes, object changes, and timers.

Heartbeats are read before timeouts are checked, and frames after the election. A process that was suspended thus neither
loses live peers nor answers for addresses that others have taken over.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from narthex.lb.kernel.heartbeats import HeartbeatSockets
from narthex.lb.kernel.links import LinkChanges
from narthex.lb.kernel.packets import RawLinkTransport
from narthex.lb.program.announcing import Announcer
from narthex.lb.program.conditions import ConditionWriter
from narthex.lb.program.files import HeartbeatKeyError, PoolsFile, read_keys
from narthex.linux.clock import SystemClock
from narthex.runtime.feed import EventFeed
from narthex.runtime.logs import LOGGER, ProblemLog
from narthex.runtime.reconciler import Reconciler

RESCAN_SECONDS = 10.0
"""Interval at which links, pools, and keys are read again without a notification."""
_LINK_REST = 0.1
"""Debounce delay: link changes come in bursts."""
_SAY_EVERY = 0.5
"""Seconds between two updates of Service conditions."""
LEAVE_SECONDS = 4.0
"""Time for other nodes to take over during shutdown."""


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
