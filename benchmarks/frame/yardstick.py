"""How quick this machine is right now: a fixed piece of pure Python, timed.

Shared machines swing by a factor of two within minutes and say so nowhere. A bar in seconds is meant for a machine of speed
1; on a slower moment it grows with what the yardstick takes. Ratios need none of this.
"""

from __future__ import annotations

import time

REFERENCE = 0.0195
"""Seconds that the work takes on the quiet two-core machine for which bars in seconds are meant (CPython 3.11)."""
_TURNS = 5


def _work() -> int:
    table: dict[tuple[str, int], int] = {}
    for number in range(40_000):
        key = (f"service-{number & 1023}", number & 7)
        table[key] = table.get(key, 0) + number
    return len(table)


def speed() -> float:
    """Of this moment beside the reference: 1 is the same, 0.5 half as fast. Takes about 0.1 s."""
    best = float("inf")
    for _ in range(_TURNS):
        start = time.perf_counter()
        _work()
        best = min(best, time.perf_counter() - start)
    return REFERENCE / best


def slowness() -> float:
    """What a bar in seconds is multiplied by: 1 or more."""
    return max(1.0, 1.0 / speed())
