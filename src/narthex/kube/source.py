"""The lists of an API server as a source of events, the state of each list, and what a program knows of its source."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import ApiClient, Unreachable
from narthex.kube.events import EventCreator, EventPoster
from narthex.kube.messages import (
    WATCH_TIMES,
    BytesReceived,
    DeadlineReached,
    LineSplitter,
    LinesReceived,
    RequestRefused,
    ResponseBody,
    ResponseOpened,
    StreamEnded,
    WatchCounts,
    WatchInput,
    WatchRequest,
    WatchStep,
    WatchTimes,
)
from narthex.kube.resources import WatchedResource, of_a_proxy
from narthex.kube.watch import Watch
from narthex.model import Event, Problem, Synced
from narthex.runtime.metrics import Collector, counter, gauge
from narthex.runtime.reconciler import EventSource

if TYPE_CHECKING:
    from prometheus_client.core import Metric

GATHER_SECONDS = 0.1
"""Least time between two batches of events; the first event after a pause is passed on at once."""


class FollowedList(msgspec.Struct, kw_only=True):
    """The state of one list, for metrics. Times are in seconds since the epoch; None means never."""

    kind: str
    counts: WatchCounts
    last_list: float | None = None
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
        random_number: Callable[[], float] = random.random,
        gather: float = GATHER_SECONDS,
    ) -> None:
        """Prepare a source; requests begin with `changes`.

        `streaming` tries WatchList before ordinary lists. `newest` makes the first lists consistent reads instead of
        reads from the server's cache.
        """
        self._access = access
        self._watches = [Watch(each, random_number, times, streaming=streaming, newest=newest) for each in resources]
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
        """Connect and yield events until `stop` is set, as `follow` does."""
        with asyncio.Runner() as runner:
            api = ApiClient(self._access)
            stopped = asyncio.Event()
            batches = self.follow(api, stopped)
            _set_after(stop, runner.get_loop(), stopped)
            try:
                while (events := runner.run(anext(batches, None))) is not None:
                    yield events
                    del events
            finally:
                runner.run(batches.aclose())
                runner.run(api.aclose())

    async def follow(self, api: StreamOpener, stop: asyncio.Event) -> AsyncGenerator[list[Event], None]:
        """Yield events until `stop` is set; Synced follows once all lists have been complete.

        Also yields an empty list when only `problems` changed. A second call lists everything anew.
        """
        self._something = asyncio.Event()
        running = [asyncio.create_task(follow(watch, api, self._tell)) for watch in self._watches]
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                events = await self._next((stopping, *running), stop)
                if not stop.is_set():
                    yield events
                del events
        finally:
            for task in (stopping, *running):
                task.cancel()
            await asyncio.gather(stopping, *running, return_exceptions=True)

    async def _next(self, running: Sequence[asyncio.Task[Any]], stop: asyncio.Event) -> list[Event]:
        something = asyncio.create_task(self._something.wait())
        try:
            await asyncio.wait([something, *running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            something.cancel()
            await asyncio.gather(something, return_exceptions=True)
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
        # A part of the lists is of no use before all lists are complete.
        if (self._synced and self._waiting) or changed:
            self._something.set()

    def _note(self, watch: Watch) -> None:
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


def _set_after(stop: threading.Event, loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """Set an event of a loop once a thread's event is set."""

    def wait() -> None:
        """Wait in a thread for the end of the program, then set the event of the loop."""
        stop.wait()
        with contextlib.suppress(RuntimeError):  # The loop may be gone by then.
            loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=wait, name="watch-stop", daemon=True).start()


class OpenedResponse(Protocol):
    """A response whose head has arrived."""

    @property
    def code(self) -> int:
        """Return the status."""
        ...

    @property
    def retry_after(self) -> float | None:
        """Return the seconds of the Retry-After header, or None."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises Unreachable."""
        ...

    async def refusal(self) -> bytes:
        """Return the body of an error response."""
        ...


class StreamOpener(Protocol):
    """A client that sends GET requests."""

    def get(self, request: WatchRequest) -> AbstractAsyncContextManager[OpenedResponse]:
        """Send a GET request and yield the response. Raises Unreachable."""
        ...


_TOLERANCE = 0.05
"""Seconds by which a request may be aborted too early; moving the timeout for each chunk costs more than decoding it.
"""

_NOTHING = WatchStep()

EventHandler = Callable[[Watch, tuple[Event, ...]], object]
"""Receives the events of a watch; none if only the state of the watch changed."""


async def follow(watch: Watch, api: StreamOpener, tell: EventHandler) -> None:
    """Keep one list up to date until cancelled."""
    await _Follower(watch, api, tell).run()


class _Follower:
    def __init__(self, watch: Watch, api: StreamOpener, tell: EventHandler) -> None:
        self._watch = watch
        self._api = api
        self._tell = tell
        self._now = asyncio.get_running_loop().time
        self._events: list[Event] = []

    async def run(self) -> None:
        """List and watch until the task is cancelled; publish each step and sleep until the next one is due."""
        try:
            step = self._watch.take(DeadlineReached(), self._now())
            while True:
                self._publish(step)
                # What has been published is not kept while the watch waits: after a list, this is all objects.
                request = step.request
                del step
                if request is not None:
                    step = await self._request(request)
                else:
                    await asyncio.sleep(self._watch.wake_at - self._now())
                    step = self._watch.take(DeadlineReached(), self._now())
        finally:
            # The watch counts them as seen.
            if self._events:
                self._publish(_NOTHING)

    def _publish(self, step: WatchStep) -> None:
        self._events.extend(step.events)
        events, self._events = tuple(self._events), []
        self._tell(self._watch, events)

    async def _request(self, request: WatchRequest) -> WatchStep:
        """Send a request and return the step that ends it."""
        try:
            async with asyncio.timeout_at(self._watch.wake_at) as limit, self._api.get(request) as answer:
                if answer.code != 200:
                    body = await answer.refusal()
                    return self._take(RequestRefused(answer.code, body, answer.retry_after))
                self._publish(self._take(ResponseOpened()))
                limit.reschedule(self._watch.wake_at)
                return await (self._lines(answer, limit) if request.lines else self._body(answer, limit))
        except TimeoutError:
            return self._take(DeadlineReached())
        except Unreachable as error:
            return self._take(StreamEnded(str(error)))

    async def _lines(self, answer: OpenedResponse, limit: asyncio.Timeout) -> WatchStep:
        splitter = LineSplitter()
        counts = self._watch.counts
        seen = counts.bookmarks, counts.lists
        async for chunk in answer.chunks():
            lines = splitter.feed(chunk)
            step = self._take(LinesReceived(lines) if lines else BytesReceived())
            if step.over:
                return step
            self._events.extend(step.events)
            del chunk, lines, step
            # A streaming list is thousands of chunks of which nothing follows before the last.
            if self._events or seen != (counts.bookmarks, counts.lists):
                seen = counts.bookmarks, counts.lists
                self._publish(_NOTHING)
            self._put_off(limit)
        return self._take(StreamEnded())

    async def _body(self, answer: OpenedResponse, limit: asyncio.Timeout) -> WatchStep:
        parts: list[bytes] = []
        async for chunk in answer.chunks():
            parts.append(chunk)
            self._take(BytesReceived())
            self._put_off(limit)
        return self._take(ResponseBody(b"".join(parts)))

    def _put_off(self, limit: asyncio.Timeout) -> None:
        if abs(self._watch.wake_at - (limit.when() or 0.0)) > _TOLERANCE:
            limit.reschedule(self._watch.wake_at)

    def _take(self, input: WatchInput) -> WatchStep:
        return self._watch.take(input, self._now())


class Origin(NamedTuple):
    """The source of a program's objects and the API server behind it."""

    source: EventSource
    creator: EventCreator | None = None
    """Stores Events. None: there is no API server, and nodes need no Node object."""
    collectors: tuple[Collector, ...] = ()
    access: Access | None = None
    """The API server, for parts that follow other lists or write objects. None: all objects come from `source`."""


def api_origin(access: Access, node_name: str, relist: float, wall: Callable[[], float]) -> Origin:
    """Return the lists of a node proxy at an API server, with a full list every `relist` seconds.

    `wall` returns the time of day.
    """
    source = KubeSource(access, of_a_proxy(node_name), times=msgspec.structs.replace(WATCH_TIMES, relist=relist))
    return Origin(source, EventPoster(access), (SourceMetrics(source.followed, wall),), access)


class SourceMetrics:
    """A collector of metrics about the lists of a source."""

    def __init__(self, followed: Sequence[FollowedList], wall: Callable[[], float]) -> None:
        self._followed = followed
        self._wall = wall

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, for prometheus-client."""
        now = self._wall()

        def by_kind(number: Callable[[FollowedList], float | None]) -> dict[str, float]:
            """Return the figure of each followed list by its kind; leave out lists without a figure."""
            return {each.kind: found for each in self._followed if (found := number(each)) is not None}

        for name, text, times in (
            ("list", "the last complete list", by_kind(lambda each: each.last_list)),
            ("event", "the last object that was added, changed or deleted", by_kind(lambda each: each.last_event)),
            ("word", "the last sign of life of the watch", by_kind(lambda each: each.last_heard)),
        ):
            ages = {kind: max(0.0, now - when) for kind, when in times.items()}
            yield gauge(f"narthex_source_last_{name}_age_seconds", f"Time since {text}.", ages, "kind")
        for metric, name, text, numbers in (
            (gauge, "objects", "Objects that are known.", by_kind(lambda each: each.objects)),
            (gauge, "broken_objects", "Objects that cannot be used.", by_kind(lambda each: each.broken)),
            (gauge, "trouble", "1: the list cannot be kept up at present.", by_kind(lambda each: each.trouble)),
            (counter, "lists", "Complete lists.", by_kind(lambda each: each.counts.lists)),
            (counter, "watches", "Watches that were opened.", by_kind(lambda each: each.counts.watches)),
            (counter, "events", "Objects added, changed or deleted.", by_kind(lambda each: each.counts.events)),
        ):
            yield metric(f"narthex_source_{name}", text, numbers, "kind")
        failures: dict[tuple[str, ...], float] = {
            (each.kind, reason): number
            for each in self._followed
            for reason, number in sorted(dict(each.counts.failures).items())
        }
        text = "Requests that failed, by status code or kind of failure."
        yield counter("narthex_source_failures", text, failures, "kind", "reason")
