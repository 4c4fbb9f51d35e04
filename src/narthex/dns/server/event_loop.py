"""The event loop of a worker: descriptors, timers, and files that it follows, in one thread.

A wake-up costs a quarter of asyncio's.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable
from pathlib import Path

from narthex.runtime.files import FileStamp, file_stamp

EventCallback = Callable[[], None]
RESOLV_CONF_INTERVAL = 5.0
"""Seconds between two checks of a resolv.conf."""
_MAX_BYTES = 64 * 1024 * 1024
"""Blocklists have some ten thousand lines; a file of a million lines is still smaller."""


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


class FollowedFile:
    """Passes the text of a file to `take` at the start and after each change."""

    def __init__(
        self,
        loop: EventLoop,
        path: str,
        interval: float,
        take: Callable[[str | None], None],
        warn: Callable[[str], None],
    ) -> None:
        """`interval` is in seconds; 0 reads the file only once. `take` gets None if the file cannot be read."""
        self._loop = loop
        self._path = path
        self._interval = interval
        self._take = take
        self._warn = warn
        self._stamp: FileStamp | None = None
        self._timer: EventTimer | None = None

    def open(self) -> None:
        """Read the file and start to poll it."""
        self._stamp = file_stamp(self._path)
        self._read()
        self._schedule()

    def close(self) -> None:
        """Stop polling."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._interval > 0:
            self._timer = self._loop.at(self._loop.now() + self._interval, self._poll)

    def _poll(self) -> None:
        stamp = file_stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._read()
        self._schedule()

    def _read(self) -> None:
        try:
            self._take(read_text(self._path))
        except OSError as error:
            self._warn(f"{self._path} cannot be read: {error.strerror or error}")
            self._take(None)


def read_text(path: str) -> str:
    """Return the text of a file. Raises OSError."""
    with Path(path).open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise OSError(f"it is larger than {_MAX_BYTES} bytes")
    return raw.decode("utf-8", errors="replace")
