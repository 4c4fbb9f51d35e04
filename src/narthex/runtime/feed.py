"""A thread that follows a blocking source and queues its events for a loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from narthex.linux.background import in_background
from narthex.model.store import Event
from narthex.runtime.logs import LOGGER

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
                    notice()
            except Exception as error:
                # A fault here must not leave a proxy that is deaf and does not know it.
                LOGGER.error("following the source of objects failed: %s: %s", type(error).__name__, error)
                LOGGER.debug("where following failed", exc_info=error)
                self._stop.wait(_AGAIN_SECONDS)
