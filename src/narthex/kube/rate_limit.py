"""How often requests are made at most: `clientConnection.qps` and `burst` (row 27.2)."""

from __future__ import annotations

DEFAULT_QPS, DEFAULT_BURST = 5.0, 10


class RateLimiter:
    """A bucket of tokens. 0 stands for the defaults, a negative `qps` for no limit."""

    def __init__(self, qps: float, burst: int) -> None:
        self._qps = qps or DEFAULT_QPS
        self._burst = float(burst or DEFAULT_BURST)
        self._left = self._burst
        self._at: float | None = None

    def wait(self, now: float) -> float:
        """Take a token; the seconds until it may be used."""
        if self._qps < 0:
            return 0.0
        passed = now - self._at if self._at is not None else 0.0
        self._at = now
        self._left = min(self._burst, self._left + passed * self._qps) - 1
        return max(0.0, -self._left / self._qps)
