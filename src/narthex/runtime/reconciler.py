"""The reconcile loop of all long-running programs.

A program's `reconcile` function compares the desired with the actual state and removes the differences. Events only say
when to call it, never what to do, so lost, repeated, or combined events do no harm.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from narthex.linux.clock import Clock
from narthex.model.backoff import Backoff
from narthex.runtime.logs import LOGGER


class Throttle(msgspec.Struct, frozen=True):
    """The least time between the end of one call and the next: a share of the call's duration, within limits."""

    share: float = 0.0
    least: float = 0.0
    """Seconds."""
    longest: float = 0.0
    """Seconds."""

    def pause(self, duration: float) -> float:
        """Return the seconds to wait after a call that took `duration` seconds."""
        return min(max(self.least, self.share * duration), self.longest)


class Reconciler:
    """Calls a function when an event or a deadline asks for it, until `stop`.

    `run` belongs to one thread. `wake` and `stop` are safe from any thread and in a signal handler, also before `run`.
    """

    def __init__(self, clock: Clock, *, throttle: Throttle | None = None, backoff: Backoff | None = None) -> None:
        """Prepare the loop.

        Args:
            clock: Measures and waits. Its `wake` has the same effect as the loop's.
            throttle: How far calls must be apart, so that a burst of events leads to few calls.
            backoff: How long to wait after an exception. None: exceptions end `run`.
        """
        self._clock = clock
        self._throttle = throttle
        self._backoff = backoff
        self._failures = 0
        self.stopping = False

    def run(self, reconcile: Callable[[], float], until: Callable[[], bool] = lambda: False) -> None:
        """Call `reconcile` until `stop`, or until the condition holds after a call.

        `reconcile` does what is to be done now and returns the seconds until it must be called again without an event.
        """
        while not self.stopping:
            begun = self._clock.now()
            wait = self._call(reconcile)
            if until():
                return
            ended = self._clock.now()
            self._clock.sleep(wait)
            if self._throttle is not None:
                self._sleep_until(ended + self._throttle.pause(ended - begun))

    def stop(self) -> None:
        """End `run` after the present call."""
        self.stopping = True
        self._clock.wake()

    def wake(self) -> None:
        """Have `reconcile` called soon."""
        self._clock.wake()

    def _call(self, reconcile: Callable[[], float]) -> float:
        """Return the seconds until the next call is due."""
        try:
            wait = reconcile()
        except Exception as error:
            if self._backoff is None:
                raise
            self._failures += 1
            wait = self._backoff.delay(self._failures)
            LOGGER.error("reconciling failed, next attempt in %g s: %s", wait, error, exc_info=error)
        else:
            self._failures = 0
        return wait

    def _sleep_until(self, time: float) -> None:
        while not self.stopping and (left := time - self._clock.now()) > 0:
            self._clock.sleep(left)
