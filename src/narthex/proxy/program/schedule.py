"""When a family is synced: at once where something changed, later where that failed, now and then to be sure.

Pure arithmetic over times that the loop hands in.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from narthex.model.names import NamespacedName
from narthex.model.store import Snapshot
from narthex.proxy.program.sync import FamilySync, SyncResult

FIRST_RETRY = 1.0
"""Seconds until a failed sync is tried again; doubled each time, up to the sync period."""
READ_BACK_SHARE = 20
"""Reading the kernel back takes at most one part in this many of the time, also where there are very many rules."""
REST_AT_ONCE = 5.0
"""Seconds of rest that may be owed for reading: a few changes by others are all mended at once, many must wait."""
SELDOM = 10
"""Where the kernel tells of changes, reading it back without a reason is this much rarer."""


class SyncPeriods(msgspec.Struct, frozen=True):
    """Seconds between syncs."""

    minimum: float = 0.0
    """From the end of one sync to the start of the next; changes in between are one sync (row 21.2)."""
    sync: float = 30.0
    """The kernel is read back and mended this often; also the longest wait after a failure."""
    watched: bool = False
    """The kernel tells when rules have changed, so it need not be read so often to know."""


class FamilySchedule:
    """One family of a proxy: its sync, and when that is due."""

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
        self.suspicious = False
        """Somebody may have changed rules since they were last read or written."""
        self.rested = -math.inf
        """When the rest that reading has earned is over. A read-back for a reason comes little before that."""
        self.read_anyway = math.inf
        """When the next read-back without a reason is due."""
        self.failures = 0

    @property
    def read_back_at(self) -> float:
        """When the kernel is to be read."""
        return self.rested - REST_AT_ONCE if self.suspicious else self.read_anyway

    def due(self, snapshot: Snapshot) -> float:
        """The time from which a sync makes sense."""
        wanted = self.read_back_at if snapshot is self.seen else -math.inf
        return max(wanted, self.earliest)

    def changed(self, services: frozenset[NamespacedName], periods: SyncPeriods) -> None:
        """A change came in. It may mend what failed, so a long wait is cut to the first one."""
        self.waiting |= services
        if self.failures:
            self.earliest = min(self.earliest, self.ended + max(FIRST_RETRY, periods.minimum))

    def succeeded(self, now: float, periods: SyncPeriods, snapshot: Snapshot, done: SyncResult) -> None:
        """Note a good sync that ended now."""
        self.waiting, self.seen, self.failures = frozenset(), snapshot, 0
        self.ended, self.earliest = now, now + periods.minimum
        if "read" in done.seconds:
            rest = READ_BACK_SHARE * done.seconds["read"]
            self.suspicious = False
            if not done.first:
                self.rested = max(self.rested, now) + rest
            self.read_anyway = now + max(periods.sync, rest) * (SELDOM if periods.watched else 1)

    def failed(self, now: float, periods: SyncPeriods) -> None:
        """Note a sync that failed now; wait longer each time."""
        self.seen = None
        self.ended = now
        self.earliest = now + max(periods.minimum, min(periods.sync, FIRST_RETRY * 2**self.failures))
        self.failures = min(self.failures + 1, 32)
