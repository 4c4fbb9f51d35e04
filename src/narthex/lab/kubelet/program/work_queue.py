"""A thread that runs tasks in sequence, immediately or later."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import traceback
from collections.abc import Callable

Task = Callable[[], object]


class WorkQueue:
    """Tasks in the order of their due times. `post`, `after`, and `stop` are safe from any thread."""

    def __init__(self, name: str) -> None:
        self._tasks: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._news = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current task."""
        with self._news:
            self._stopped = True
            self._news.notify()

    def post(self, task: Task) -> None:
        """Run a task after those posted before."""
        self.after(0.0, task)

    def after(self, seconds: float, task: Task) -> None:
        """Run a task after a delay in seconds."""
        moment = time.monotonic() + seconds if seconds > 0 else 0.0
        with self._news:
            heapq.heappush(self._tasks, (moment, next(self._numbers), task))
            self._news.notify()

    @property
    def idle(self) -> bool:
        """True if no task runs or is due."""
        with self._news:
            return not self._busy and not (self._tasks and self._tasks[0][0] <= time.monotonic())

    _busy = False

    def _run(self) -> None:
        while True:
            with self._news:
                self._busy = False
                while not self._stopped and (wait := self._wait()) != 0:
                    self._news.wait(wait)
                if self._stopped:
                    return
                self._busy = True
                _, _, task = heapq.heappop(self._tasks)
            try:
                task()
            except Exception:
                # The other tasks continue.
                traceback.print_exc()

    def _wait(self) -> float | None:
        """Return the seconds until the next task, None if there is none."""
        return max(0.0, self._tasks[0][0] - time.monotonic()) if self._tasks else None
