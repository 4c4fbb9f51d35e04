"""Time, and waiting that can be cut short. Everything that needs either takes a `Clock`, so that tests need not wait."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from typing import Protocol


class Clock(Protocol):
    """What a loop has to know about time."""

    def now(self) -> float:
        """Seconds that only ever grow; for distances, not for dates."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, for people and metrics."""
        ...

    def sleep(self, seconds: float) -> bool:
        """Wait, at most this long; True when `wake` ended it early, or had been called before."""
        ...

    def wake(self) -> None:
        """End the present or the next `sleep` at once. May be called from any thread and from a signal handler."""
        ...


class SystemClock:
    """The machine's clock.

    It wakes through an eventfd and not through `threading.Event`, whose lock is not safe to take in a signal handler
    that interrupts the very thread which waits.
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
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> bool:
        ready = {file for file, _ in self._poll.poll(max(0.0, min(seconds, 1e6)) * 1000)}
        if self._event in ready:
            os.eventfd_read(self._event)
        return bool(ready)

    def wake(self) -> None:
        os.eventfd_write(self._event, 1)

    def watch_files(self, files: Iterable[int]) -> None:
        """Let data that waits in these files end a sleep as `wake` does, and no longer that of files named before."""
        wanted = frozenset(files)
        for file in self._files - wanted:
            self._poll.unregister(file)
        for file in wanted:
            # The number of a closed file may belong to a new one by now.
            self._poll.register(file, select.POLLIN)
        self._files = wanted
