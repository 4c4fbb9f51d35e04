"""When to say again who has an address, and when to ask whether somebody else has it.

A gratuitous announcement can be lost, or meet a switch that has just started; MetalLB repeats it for five seconds (row A7),
which users found too short. Questions find what no announcement tells: on a switch nobody hears an answer that goes to
somebody else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

ANNOUNCE_AFTER = (0.0, 1.1, 2.2, 3.3, 4.4, 5.5, 10.0, 20.0, 30.0, 45.0, 60.0)
"""Seconds since the address was gained."""
PROBE_AFTER = (2.0, 15.0)
PROBE_EVERY = 60.0


class _Plan(msgspec.Struct):
    since: float
    announced: int = 0
    probed: int = 0

    @property
    def announce_at(self) -> float:
        return self.since + ANNOUNCE_AFTER[self.announced] if self.announced < len(ANNOUNCE_AFTER) else math.inf

    @property
    def probe_at(self) -> float:
        late = self.probed - len(PROBE_AFTER)
        return self.since + (PROBE_AFTER[self.probed] if late < 0 else PROBE_EVERY * (late + 1))


class AnnouncementSchedule:
    """What is due for each address that is answered for. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._plans: dict[str, _Plan] = {}

    def begin(self, addresses: Iterable[str], now: float) -> None:
        """These have just been gained, or everybody should hear of them as if they were."""
        for address in addresses:
            self._plans[address] = _Plan(since=now)

    def end(self, addresses: Iterable[str]) -> None:
        """Nothing more is said about these: after it is lost, an address is another's to announce (row A7)."""
        for address in addresses:
            self._plans.pop(address, None)

    def announcements(self, now: float) -> list[str]:
        """Addresses to announce now; each is due again at its own time."""
        found = []
        for address, plan in self._plans.items():
            if now >= plan.announce_at:
                found.append(address)
                while now >= plan.announce_at:
                    plan.announced += 1
        return found

    def probes(self, now: float) -> list[str]:
        """Addresses to ask for now."""
        found = []
        for address, plan in self._plans.items():
            if now >= plan.probe_at:
                found.append(address)
                while now >= plan.probe_at:
                    plan.probed += 1
        return found

    def next_due(self) -> float:
        """When one of both has something."""
        return min((min(plan.announce_at, plan.probe_at) for plan in self._plans.values()), default=math.inf)
