"""Virtual time: an asyncio loop that never waits, and the clock of the simulated process.

One thread runs everything. Whenever no task can continue, the loop moves its time to the next deadline.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

WALL_CLOCK_START = 1_700_000_000.0


class StalledError(Exception):
    """No task can continue, and no deadline will change that."""


class _TimeSelector(selectors.BaseSelector):
    """A selector without files: to wait for a time is to move the clock there."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by the timeout; no file is ever ready. Raises StalledError without a timeout."""
        if timeout is None:
            raise StalledError("every task waits for another one")
        self.now += max(0.0, timeout)
        return []

    # The loop registers the two ends of its wake-up pipe; nothing is ever sent there.

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Keep the file; it is never watched."""
        self._keys[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget the file and return its key."""
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the registered files and their keys."""
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time, which starts at 0."""

    def __init__(self) -> None:
        """Create the loop."""
        self._selected = _TimeSelector()
        super().__init__(self._selected)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._selected.now

    def pass_time(self, seconds: float) -> None:
        """Let time pass within the present task, as a slow system call does. Deadlines of others become overdue."""
        self._selected.now += seconds


class VirtualClock:
    """The clock of a simulated process. Its loop waits with `wait`, since a blocking sleep would stop the world."""

    def __init__(self, loop: VirtualLoop) -> None:
        """Create the clock of a process; each process has its own, since `wake` wakes only that one."""
        self._loop = loop
        self._woken = asyncio.Event()
        self.wall_offset = WALL_CLOCK_START

    def now(self) -> float:
        """Return seconds on the monotonic clock."""
        return self._loop.time()

    def wall(self) -> float:
        """Return seconds since the epoch; `wall_offset` moves them."""
        return self._loop.time() + self.wall_offset

    def sleep(self, seconds: float) -> bool:
        """Let time pass without waiting for events."""
        self._loop.pass_time(max(0.0, seconds))
        return False

    def wake(self) -> None:
        """End the present or next `wait`."""
        self._woken.set()

    async def wait(self, seconds: float) -> None:
        """Wait for at most `seconds`, or until `wake`."""
        if seconds > 0 and not self._woken.is_set():
            timeout = None if seconds == float("inf") else seconds
            try:
                async with asyncio.timeout(timeout):
                    await self._woken.wait()
            except TimeoutError:
                pass
        self._woken.clear()
        # A turn that asks for the next one at once must not keep the others from running.
        await asyncio.sleep(0)
