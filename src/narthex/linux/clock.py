"""Time, and waiting that can be interrupted. Code that needs either takes a `Clock`, so that tests need not wait."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from typing import Protocol


class Clock(Protocol):
    """A clock with an interruptible sleep."""

    def now(self) -> float:
        """Return seconds on a monotonic clock."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch."""
        ...

    def sleep(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return True if `wake` ended the wait or was called before."""
        ...

    def wake(self) -> None:
        """End the present or the next `sleep` at once. Safe from any thread and in a signal handler."""
        ...


class SystemClock:
    """The machine's clock.

    `wake` uses an eventfd: the lock of `threading.Event` is not safe in a signal handler that interrupts the waiting
    thread.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._files: frozenset[int] = frozenset()

    def __del__(self) -> None:
        # Without files left there was none to open.
        if hasattr(self, "_event"):
            os.close(self._event)

    def now(self) -> float:
        """Return seconds on a monotonic clock."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return True if `wake` or data in a watched file ended the wait."""
        ready = {file for file, _ in self._poll.poll(max(0.0, min(seconds, 1e6)) * 1000)}
        if self._event in ready:
            os.eventfd_read(self._event)
        return bool(ready)

    def wake(self) -> None:
        """End the present or the next `sleep` at once."""
        os.eventfd_write(self._event, 1)

    def watch_files(self, files: Iterable[int]) -> None:
        """Let data in these files end a sleep as `wake` does. They replace the files of the previous call."""
        desired = frozenset(files)
        for file in self._files - desired:
            self._poll.unregister(file)
        for file in desired:
            # The number of a closed file may belong to a new one by now.
            self._poll.register(file, select.POLLIN)
        self._files = desired
