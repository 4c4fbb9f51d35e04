"""The lists of an API server as a source of events, and the state of each list."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import ApiClient
from narthex.kube.exchange import WATCH_TIMES, WatchCounts, WatchTimes
from narthex.kube.resources import WatchedResource
from narthex.kube.session import follow
from narthex.kube.watch import Watch
from narthex.model.problem import Problem
from narthex.model.store import Event, Synced

GATHER_SECONDS = 0.1
"""Least time between two batches of events; the first event after a pause is passed on at once."""


class FollowedList(msgspec.Struct, kw_only=True):
    """The state of one list, for metrics. Times are in seconds since the epoch; None means never."""

    kind: str
    counts: WatchCounts
    last_list: float | None = None
    """The last complete list."""
    last_event: float | None = None
    """The last object that was added, changed, or deleted."""
    last_heard: float | None = None
    """The last data of the watch, including bookmarks."""
    objects: int = 0
    broken: int = 0
    """Objects that cannot be used; `problems` has the reasons."""
    synced: bool = False
    trouble: bool = False
    """The list cannot be kept up to date at present."""


class KubeSource:
    """Follows lists of one API server. One thread at a time runs `changes`; any thread may read the rest."""

    def __init__(
        self,
        access: Access,
        resources: Sequence[WatchedResource],
        *,
        times: WatchTimes = WATCH_TIMES,
        streaming: bool = True,
        newest: bool = False,
        chance: Callable[[], float] = random.random,
        gather: float = GATHER_SECONDS,
    ) -> None:
        """Prepare a source; requests begin with `changes`.

        `streaming` tries WatchList before ordinary lists. `newest` makes the first lists consistent reads instead of
        reads from the server's cache.
        """
        self._access = access
        self._watches = [Watch(each, chance, times, streaming=streaming, newest=newest) for each in resources]
        self.followed = tuple(FollowedList(kind=each.resource.kind, counts=each.counts) for each in self._watches)
        self._gather = gather
        self._seen = [WatchCounts() for _ in self._watches]
        self._waiting: list[Event] = []
        self._something = asyncio.Event()
        self._tell_again_at = -math.inf
        self._synced = False
        self._problems: tuple[Problem, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the present problems: first those of the server, then those of objects."""
        return self._problems

    def scan(self) -> list[Event]:
        """Return no events: all come from `changes`, so that a proxy starts while its server is down."""
        return []

    def changes(self, stop: threading.Event) -> Iterator[list[Event]]:
        """Connect and yield events until `stop` is set; Synced follows once all lists have been complete.

        Also yields an empty list when only `problems` changed. A second call lists everything anew.
        """
        with asyncio.Runner() as runner:
            self._something = asyncio.Event()
            api = ApiClient(self._access)
            running = runner.run(self._start(api, stop))
            try:
                while not stop.is_set():
                    events = runner.run(self._next(running, stop))
                    if not stop.is_set():
                        yield events
            finally:
                runner.run(_end(api, running))

    async def _start(self, api: ApiClient, stop: threading.Event) -> list[asyncio.Task[None]]:
        loop = asyncio.get_running_loop()
        something = self._something

        def wait() -> None:
            stop.wait()
            with contextlib.suppress(RuntimeError):  # The loop may be gone by then.
                loop.call_soon_threadsafe(something.set)

        threading.Thread(target=wait, name="watch-stop", daemon=True).start()
        return [asyncio.create_task(follow(watch, api, self._tell)) for watch in self._watches]

    async def _next(self, running: Sequence[asyncio.Task[None]], stop: threading.Event) -> list[Event]:
        """Return the next batch of events."""
        something = asyncio.create_task(self._something.wait())
        await asyncio.wait([something, *running], return_when=asyncio.FIRST_COMPLETED)
        something.cancel()
        for task in running:
            if task.done():
                task.result()
        loop = asyncio.get_running_loop()
        if not stop.is_set() and (rest := self._tell_again_at - loop.time()) > 0:
            await asyncio.sleep(rest)
        self._tell_again_at = loop.time() + self._gather
        self._something.clear()
        events, self._waiting = self._waiting, []
        return events

    def _tell(self, watch: Watch, events: tuple[Event, ...]) -> None:
        self._waiting.extend(events)
        self._note(watch)
        problems = tuple(each.trouble for each in self._watches if each.trouble is not None)
        problems += tuple(problem for each in self._watches for problem in each.cache.problems)
        changed, self._problems = problems != self._problems, problems
        if not self._synced and all(each.synced for each in self._watches):
            self._synced = True
            self._waiting.append(Synced())
        # Before all lists are there nobody can do anything with a part of them.
        if (self._synced and self._waiting) or changed:
            self._something.set()

    def _note(self, watch: Watch) -> None:
        """Update the state of a list."""
        index = self._watches.index(watch)
        noted, before, counts = self.followed[index], self._seen[index], watch.counts
        now = time.time()
        if counts.heard != before.heard:
            noted.last_heard = now
        if counts.events != before.events:
            noted.last_event = now
        if counts.lists != before.lists:
            noted.last_list = now
        self._seen[index] = msgspec.structs.replace(counts)
        noted.objects, noted.broken = len(watch.cache), watch.cache.broken
        noted.synced, noted.trouble = watch.synced, watch.trouble is not None


async def _end(api: ApiClient, running: Sequence[asyncio.Task[None]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await api.close()
