"""When a family is synced: after a change, after a failure with backoff, and periodically to repair drift. Pure."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from narthex.model.objects import NamespacedName
from narthex.model.store import Snapshot
from narthex.proxy.program.sync import FamilySync, SyncResult

FIRST_RETRY = 1.0
"""Seconds from the first failed sync to the next; the delay doubles up to the sync period."""
READ_BACK_SHARE = 20
"""Reading the kernel back takes at most one part in this many of the time, however many rules there are."""
REST_AT_ONCE = 5.0
"""Seconds by which a read-back may exceed that share: a few changes by others are repaired at once, many must wait."""
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


class FamilySchedule:
    """The sync of one family and the time when it is due."""

    def __init__(self, sync: FamilySync[Any, Any]) -> None:
        self.sync = sync
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
        self.rested = -math.inf
        """From when on reading keeps within its share of the time."""
        self.read_anyway = math.inf
        """When the next periodic read-back is due."""
        self.failures = 0

    @property
    def read_back_at(self) -> float:
        """Return when the kernel must be read."""
        return self.rested - REST_AT_ONCE if self.suspicious else self.read_anyway

    def due(self, snapshot: Snapshot) -> float:
        """Return the time from which on a sync is useful."""
        desired = self.read_back_at if snapshot is self.seen else -math.inf
        return max(desired, self.earliest)

    def changed(self, services: frozenset[NamespacedName], periods: SyncPeriods) -> None:
        """Note changed Services. They may remove the cause of a failure, so a long backoff is cut to the first delay."""
        self.waiting |= services
        if self.failures:
            self.earliest = min(self.earliest, self.ended + max(FIRST_RETRY, periods.minimum))

    def succeeded(self, now: float, periods: SyncPeriods, snapshot: Snapshot, done: SyncResult) -> None:
        """Note a successful sync that ended at `now`."""
        self.waiting, self.seen, self.failures = frozenset(), snapshot, 0
        self.ended, self.earliest = now, now + periods.minimum
        if "read" in done.seconds:
            rest = READ_BACK_SHARE * done.seconds["read"]
            self.suspicious = False
            if not done.first:
                self.rested = max(self.rested, now) + rest
            self.read_anyway = now + max(periods.sync, rest) * (SELDOM if periods.watched else 1)

    def failed(self, now: float, periods: SyncPeriods) -> None:
        """Note a failed sync that ended at `now`, and back off."""
        self.seen = None
        self.ended = now
        self.earliest = now + max(periods.minimum, min(periods.sync, FIRST_RETRY * 2**self.failures))
        self.failures = min(self.failures + 1, 32)
