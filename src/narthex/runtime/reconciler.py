"""The reconcile loop of all long-running programs, and the thread that queues events of a blocking source for it.

A program's `reconcile` function compares the desired with the actual state and removes the differences. Events only say
when to call it, never what to do, so lost, repeated, or combined events do no harm.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from narthex.linux.background import in_background
from narthex.linux.clock import Clock, SystemClock
from narthex.model import Event
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

    def __init__(
        self, clock: Clock | None = None, *, throttle: Throttle | None = None, backoff: Backoff | None = None
    ) -> None:
        """Prepare the loop.

        Args:
            clock: Measures and waits; None: a clock of its own. Its `wake` has the same effect as the loop's.
            throttle: How far calls must be apart, so that a burst of events leads to few calls.
            backoff: How long to wait after an exception. None: exceptions end `run`.
        """
        self._clock = clock or SystemClock()
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
                until_next = ended + self._throttle.pause(ended - begun)
                while not self.stopping and (left := until_next - self._clock.now()) > 0:
                    self._clock.sleep(left)

    def stop(self) -> None:
        """End `run` after the present call."""
        self.stopping = True
        self._clock.wake()

    def wake(self) -> None:
        """Have `reconcile` called soon."""
        self._clock.wake()

    def _call(self, reconcile: Callable[[], float]) -> float:
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


_AGAIN_SECONDS = 5.0
"""Delay before the source is followed again after an exception."""


class EventSource(Protocol):
    """A source of events, for one thread at a time."""

    @property
    def problems(self) -> Sequence[Any]:
        """Return the present problems of objects."""
        ...

    def scan(self) -> Sequence[Event]:
        """Return the events since the last scan, without waiting."""
        ...

    def changes(self, stop: threading.Event) -> Iterator[Sequence[Event]]:
        """Wait for events and yield them until `stop` is set."""
        ...


class EventFeed:
    """A queue of events that a thread fills from a source."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._waiting: deque[Event] = deque()
        self._stop = threading.Event()
        self.problems: Sequence[Any] = ()

    def take(self) -> list[Event]:
        """Return all queued events in order."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    @contextmanager
    def running(self, notice: Callable[[], None]) -> Iterator[None]:
        """Scan once, then follow the source in a thread while the block runs.

        `notice` is called for each batch of events.
        """
        self._put(self._source.scan())
        with in_background("watch", lambda: self._watch(notice), self._stop.set):
            yield

    def _put(self, events: Sequence[Event]) -> None:
        self._waiting.extend(events)
        self.problems = self._source.problems

    def _watch(self, notice: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                for events in self._source.changes(self._stop):
                    self._put(events)
                    # The next batch may be hours away, and the first has all objects.
                    del events
                    notice()
            except Exception as error:
                # A fault here must not leave a proxy that is deaf and does not know it.
                LOGGER.error("following the source of objects failed: %s: %s", type(error).__name__, error)
                LOGGER.debug("where following failed", exc_info=error)
                self._stop.wait(_AGAIN_SECONDS)
