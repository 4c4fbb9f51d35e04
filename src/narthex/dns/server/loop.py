"""A worker's loop: descriptors and appointments, one thread, nothing else. A quarter of asyncio's cost per wake-up."""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable

Callback = Callable[[], None]


class Appointment:
    """Something to call at a time."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """It does not happen; fine when it has already happened."""
        self.callback = None


class EventLoop:
    """The `Loop` of `dns.seam`. `run` blocks until `stop`."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[int, tuple[Callback | None, Callback | None]] = {}
        self._due: list[tuple[float, int, Appointment]] = []
        self._order = itertools.count()
        self._now = time.monotonic()
        self._stopped = False

    def now(self) -> float:
        """Monotonic seconds, read when the loop last woke up."""
        return self._now

    def register(self, fd: int, readable: Callback | None, writable: Callback | None = None) -> None:
        """Call back while `fd` is readable or writable; registering again replaces; two Nones take it out."""
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
        """Take `fd` out; unknown ones are let be. To be called before the descriptor is closed."""
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def at(self, when: float, callback: Callback) -> Appointment:
        """Call once at `when` (monotonic seconds) or soon after."""
        made = Appointment(callback)
        heapq.heappush(self._due, (when, next(self._order), made))
        return made

    def stop(self) -> None:
        """End `run` after the present turn."""
        self._stopped = True

    def run(self) -> None:
        """Turn after turn."""
        while not self._stopped:
            self.turn()

    def turn(self, longest: float | None = None) -> None:
        """Wait for the next descriptor or appointment, at most `longest` seconds, and call back."""
        while self._due and self._due[0][2].callback is None:
            heapq.heappop(self._due)
        if self._due:
            wait = max(0.0, self._due[0][0] - time.monotonic())
            longest = wait if longest is None else min(wait, longest)
        ready = self._poll.poll(longest)
        self._now = time.monotonic()
        for fd, events in ready:
            readable, writable = self._watched.get(fd, (None, None))
            if readable is not None and events & ~select.EPOLLOUT:
                readable()
                # It may have taken the descriptor out, or put in another of this number.
                if self._watched.get(fd, (None, None)) != (readable, writable):
                    continue
            if writable is not None and events & ~select.EPOLLIN:
                writable()
        while self._due and self._due[0][0] <= self._now:
            callback = heapq.heappop(self._due)[2].callback
            if callback is not None:
                callback()

    def close(self) -> None:
        """Give the poller back."""
        self._poll.close()
