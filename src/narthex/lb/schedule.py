"""When to repeat gratuitous announcements, and when to probe for other hosts that use an address.

A gratuitous announcement can be lost, or reach a switch that is still starting. MetalLB repeats it for five seconds (row
A7), which users found too short. Probes detect other users of the address whose unicast replies a switch would hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, count

ANNOUNCE_AFTER = (0.0, 1.1, 2.2, 3.3, 4.4, 5.5, 10.0, 20.0, 30.0, 45.0, 60.0)
"""Seconds after the address was acquired."""
PROBE_AFTER = (2.0, 15.0)
PROBE_EVERY = 60.0


class _Times:
    """Times that pass one after the other."""

    def __init__(self, times: Iterator[float]) -> None:
        self._times = times
        self.next = next(times)

    def passed(self, now: float) -> bool:
        """Return True if at least one more time has passed."""
        due = now >= self.next
        while now >= self.next:
            self.next = next(self._times, math.inf)
        return due


class AnnouncementSchedule:
    """Due announcements and probes of each owned address. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._announcements: dict[str, _Times] = {}
        self._probes: dict[str, _Times] = {}

    def begin(self, addresses: Iterable[str], now: float) -> None:
        """Start the schedule of addresses that were acquired or must be announced again."""
        for address in addresses:
            self._announcements[address] = _Times(now + seconds for seconds in ANNOUNCE_AFTER)
            self._probes[address] = _Times(
                now + seconds for seconds in chain(PROBE_AFTER, (PROBE_EVERY * number for number in count(1)))
            )

    def end(self, addresses: Iterable[str]) -> None:
        """Stop the schedule of addresses: a released address is announced by its next owner only (row A7)."""
        for address in addresses:
            self._announcements.pop(address, None)
            self._probes.pop(address, None)

    def announcements(self, now: float) -> list[str]:
        """Return the addresses to announce now, and advance their schedule."""
        return [address for address, times in self._announcements.items() if times.passed(now)]

    def probes(self, now: float) -> list[str]:
        """Return the addresses to probe now, and advance their schedule."""
        return [address for address, times in self._probes.items() if times.passed(now)]

    def next_due(self) -> float:
        """Return when the next announcement or probe is due."""
        return min((each.next for each in (*self._announcements.values(), *self._probes.values())), default=math.inf)
