"""Delays between attempts that fail. Pure, so that every layer uses the same formula; the caller counts the failures."""

from __future__ import annotations

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """An exponential backoff: the delay doubles with each consecutive failure, up to a limit."""

    first: float
    """Seconds after the first failure."""
    longest: float
    """Seconds, before jitter."""
    jitter: float = 0.0
    """Width of the random range, as a share of the delay: 1.0 spreads delays from half to one and a half times."""

    def delay(self, failures: int, random: float = 0.5) -> float:
        """Return the seconds to wait after so many consecutive failures; 0 failures need no wait.

        `random` is a number from 0 to 1, which selects a value within the jitter.
        """
        if failures < 1:
            return 0.0
        delay = min(self.first * 2.0 ** min(failures - 1, 62), self.longest)
        return delay * (1.0 + self.jitter * (random - 0.5))
