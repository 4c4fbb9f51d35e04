"""When to repeat gratuitous announcements, and when to probe for other hosts that use an address.

A gratuitous announcement can be lost, or reach a switch that is still starting. MetalLB repeats it for five seconds (row
A7), which users found too short. Probes detect other users of the address whose unicast replies a switch would hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

ANNOUNCE_AFTER = (0.0, 1.1, 2.2, 3.3, 4.4, 5.5, 10.0, 20.0, 30.0, 45.0, 60.0)
"""Seconds after the address was acquired."""
PROBE_AFTER = (2.0, 15.0)
PROBE_EVERY = 60.0


class _Plan(msgspec.Struct):
    since: float
    announced: int = 0
    probed: int = 0

    @property
    def announce_at(self) -> float:
        """Time of the next announcement."""
        return self.since + ANNOUNCE_AFTER[self.announced] if self.announced < len(ANNOUNCE_AFTER) else math.inf

    @property
    def probe_at(self) -> float:
        """Time of the next probe."""
        late = self.probed - len(PROBE_AFTER)
        return self.since + (PROBE_AFTER[self.probed] if late < 0 else PROBE_EVERY * (late + 1))


class AnnouncementSchedule:
    """Due announcements and probes of each owned address. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._plans: dict[str, _Plan] = {}

    def begin(self, addresses: Iterable[str], now: float) -> None:
        """Start the schedule of addresses that were acquired or must be announced again."""
        for address in addresses:
            self._plans[address] = _Plan(since=now)

    def end(self, addresses: Iterable[str]) -> None:
        """Stop the schedule of addresses: a released address is announced by its next owner only (row A7)."""
        for address in addresses:
            self._plans.pop(address, None)

    def announcements(self, now: float) -> list[str]:
        """Return the addresses to announce now, and advance their schedule."""
        found = []
        for address, plan in self._plans.items():
            if now >= plan.announce_at:
                found.append(address)
                while now >= plan.announce_at:
                    plan.announced += 1
        return found

    def probes(self, now: float) -> list[str]:
        """Return the addresses to probe now, and advance their schedule."""
        found = []
        for address, plan in self._plans.items():
            if now >= plan.probe_at:
                found.append(address)
                while now >= plan.probe_at:
                    plan.probed += 1
        return found

    def next_due(self) -> float:
        """Return when the next announcement or probe is due."""
        return min((min(plan.announce_at, plan.probe_at) for plan in self._plans.values()), default=math.inf)
