"""From a source that blocks to a loop that must not: one thread watches, the inbox is in between."""

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
"""Wait before watching again, after watching broke off."""


class EventSource(Protocol):
    """A source that can be looked at and waited for, by one thread at a time."""

    @property
    def problems(self) -> Sequence[Any]:
        """What is wrong with the objects at present."""
        ...

    def scan(self) -> Sequence[Event]:
        """What is new since the last scan."""
        ...

    def changes(self, stop: threading.Event) -> Iterator[Sequence[Event]]:
        """Scans again and again, when it makes sense; yields what is new until `stop` is set."""
        ...


class EventFeed:
    """An inbox that a thread fills."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._waiting: deque[Event] = deque()
        self._stop = threading.Event()
        self.problems: Sequence[Any] = ()

    def take(self) -> list[Event]:
        """All events that wait, in order."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    @contextmanager
    def running(self, notice: Callable[[], None]) -> Iterator[None]:
        """Look once, then watch in a thread until the block ends. `notice` is called for each change."""
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
                LOGGER.error("watching the source of objects broke off: %s: %s", type(error).__name__, error)
                LOGGER.debug("where watching broke off", exc_info=error)
                self._stop.wait(_AGAIN_SECONDS)
