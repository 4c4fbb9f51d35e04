"""When a family is synced: after a change, after a failure with backoff, and periodically to repair drift. Pure."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import msgspec

from narthex.model import NamespacedName, Snapshot
from narthex.model.backoff import Backoff
from narthex.netfilter.ast import TouchedPart
from narthex.proxy.program.sync import FamilySync, Look, SyncResult

FIRST_RETRY = 1.0
"""Seconds from the first failed sync to the next; the delay doubles up to the sync period."""
READ_BACK_SHARE = 20
"""Periodic read-backs take at most one part in this many of the time, however many rules there are."""
SHORTEST_DEFERRAL, LONGEST_DEFERRAL = 0.05, 1.0
"""Seconds by which a check is deferred after one that found nothing: as long as that one took, within these limits."""
CONTEST_REPAIRS = 5
"""So many repairs within `CONTEST_SECONDS` mean that another program competes for our rules."""
CONTEST_SECONDS = 10.0
CONTEST_SHARE = 20
"""`CONTEST_SECONDS` is at least the time of so many repairs: a contest must not last because each repair takes long."""
CONTEST_BACKOFF = Backoff(1.0, 30.0)
"""Between repairs while another program competes, so that the two do not rewrite each other's rules all the time.

It is for rules that the other program wrote. A user misses rules that it only removed, so they return at once.
"""
LOOK_SHARE, VAIN_LOOK_SHARE = 0.5, 0.25
"""Share of the time for looks and repairs while another program competes; the second after a look that found nothing missing."""
PARTS_SHARE = 0.25
"""Share of the time for checks of touched parts only, out of `LOOK_SHARE`, so that a look at everything comes in the end."""
SELDOM = 10
"""Factor of the read-back period if the kernel sends notifications."""


class SyncPeriods(msgspec.Struct, frozen=True):
    """Seconds between syncs."""

    minimum: float = 0.0
    """From the end of one sync to the start of the next; changes in between are synced together (row 21.2)."""
    sync: float = 30.0
    """Period of read-backs, which repair drift; also the longest backoff."""
    watched: bool = False
    """The kernel sends notifications of changed rules, so read-backs may be rarer."""


class LookBudget:
    """The time that looks at the rules of all families may take while another program competes."""

    def __init__(self) -> None:
        self._seconds: dict[FamilySchedule, float] = {}

    def rest(self, family: FamilySchedule, seconds: float, share: float) -> float:
        """Return for how long a family is not looked at after a look of some seconds, so that all looks keep to a share."""
        self._seconds[family] = seconds
        return max(LONGEST_DEFERRAL, sum(self._seconds.values()) / share - seconds)


class FamilySchedule:
    """The sync of one family and the time when it is due."""

    def __init__(self, sync: FamilySync[Any, Any], budget: LookBudget) -> None:
        self.sync = sync
        self._budget = budget
        self.waiting: frozenset[NamespacedName] = frozenset()
        """Services that may differ since the last successful sync."""
        self.seen: Snapshot | None = None
        """The snapshot of the last successful sync."""
        self.ended = -math.inf
        """End of the last sync, successful or not."""
        self.earliest = -math.inf
        """The next sync must not start before: end of the minimum period or of the backoff."""
        self.suspicious = False
        """Others may have changed rules since these were last read or written."""
        self.touched: frozenset[TouchedPart] | None = None
        """What they may have changed; None: anything."""
        self.repairs: deque[float] = deque(maxlen=CONTEST_REPAIRS)
        """Times of the last repairs."""
        self.contests = 0
        """Repairs since another program began to compete for our rules; 0: none does."""
        self.settled_at = -math.inf
        """The next repair must not start before, unless rules are missing."""
        self.unchecked: frozenset[TouchedPart] = frozenset()
        """What others touched in a contest. It may lack rules, so its check need not wait until `settled_at`."""
        self.parts_check_at = -math.inf
        """It must not start before this time."""
        self.may_miss = False
        """The same holds for all rules."""
        self.look_at = -math.inf
        """A look at all of them must not start before this time."""
        self.read_anyway = math.inf
        """When the next periodic read-back is due."""
        self.failures = 0

    @property
    def read_back_at(self) -> float:
        """Return when the kernel must be read."""
        if not self.suspicious:
            return self.read_anyway
        parts = self.parts_check_at if self.unchecked else math.inf
        return min(self.settled_at, parts, self.look_at if self.may_miss else math.inf)

    def look(self, now: float) -> Look:
        """Return what a sync that starts now looks for in the kernel."""
        if now < self.read_back_at:
            return Look.NOTHING
        if now >= self.settled_at:
            return Look.ALL
        is_due = not self.suspicious or (self.may_miss and now >= self.look_at)
        return Look.MISSING if is_due else Look.MISSING_PARTS

    def due(self, snapshot: Snapshot) -> float:
        """Return the time from which on a sync is useful."""
        desired = self.read_back_at if snapshot is self.seen else -math.inf
        return max(desired, self.earliest)

    def changed(self, services: frozenset[NamespacedName], periods: SyncPeriods) -> None:
        """Note changed Services. They may remove the cause of a failure, so a long backoff is cut to the first delay."""
        self.waiting |= services
        self._cut_backoff(periods)

    def suspect(self, touched: frozenset[TouchedPart] | None, periods: SyncPeriods) -> None:
        """Note that others may have changed these chains and sets (None: anything).

        A long backoff after a failure is cut to the first delay, since Services may be without rules.
        """
        self._cut_backoff(periods)
        if not self.suspicious:
            self.touched = touched
        else:
            self.touched = None if self.touched is None or touched is None else self.touched | touched
        self.suspicious = True
        if self.contests and touched:
            self.unchecked |= touched
        elif self.contests:
            self.may_miss = True

    def _cut_backoff(self, periods: SyncPeriods) -> None:
        """Cut a long backoff after failures to the first delay."""
        if self.failures:
            self.earliest = min(self.earliest, self.ended + max(FIRST_RETRY, periods.minimum))

    def succeeded(self, now: float, periods: SyncPeriods, snapshot: Snapshot, done: SyncResult) -> None:
        """Note a successful sync that ended at `now`."""
        self._ended(now, periods, snapshot)
        if "read" in done.seconds:
            self.unchecked, self.may_miss = frozenset(), done.inconclusive or (done.parts_only and self.may_miss)
            self.suspicious = done.deferred or self.may_miss
            if not self.may_miss:
                self.touched = None
            if done.parts_only:
                self.parts_check_at = now + max(LONGEST_DEFERRAL, done.total / PARTS_SHARE - done.total)
                self.look_at = max(self.look_at, now) + done.total / LOOK_SHARE
            elif self.contests:
                share = VAIN_LOOK_SHARE if done.deferred else LOOK_SHARE
                self.look_at = now + self._budget.rest(self, done.total, share)
            share = READ_BACK_SHARE * done.seconds["read"]
            self.read_anyway = now + max(periods.sync, share) * (SELDOM if periods.watched else 1)
            if done.drift:
                self._repaired(now, max(CONTEST_SECONDS, CONTEST_SHARE * done.total))
            elif not (done.first or done.deferred or done.parts_only):
                # Others change what stands next to our rules; a storm of that must not take all of the processor.
                wait = min(max(done.seconds["read"], SHORTEST_DEFERRAL), LONGEST_DEFERRAL)
                self.settled_at = max(self.settled_at, now + wait)

    def deferred(self, now: float, periods: SyncPeriods, snapshot: Snapshot, until: float) -> None:
        """Note a sync that wrote nothing, since the snapshot is doubted until a time."""
        self._ended(now, periods, snapshot)
        self.suspicious, self.touched = False, None
        self.read_anyway = until

    def _ended(self, now: float, periods: SyncPeriods, snapshot: Snapshot) -> None:
        self.waiting, self.seen, self.failures = frozenset(), snapshot, 0
        self.ended, self.earliest = now, now + periods.minimum

    def _repaired(self, now: float, window: float) -> None:
        """Note a repair: at once after most changes by others, with backoff once there are many within the window."""
        since_last = now - self.repairs[-1] if self.repairs else math.inf
        self.repairs.append(now)
        if self.contests and since_last > max(2 * CONTEST_BACKOFF.longest, window):
            self.contests = 0
        if self.contests or (len(self.repairs) == CONTEST_REPAIRS and now - self.repairs[0] <= window):
            self.contests += 1
        self.settled_at = now + CONTEST_BACKOFF.delay(self.contests)

    def failed(self, now: float, periods: SyncPeriods) -> None:
        """Note a failed sync that ended at `now`, and back off."""
        self.seen = None
        self.ended = now
        self.earliest = now + max(periods.minimum, min(periods.sync, FIRST_RETRY * 2**self.failures))
        self.failures = min(self.failures + 1, 32)
