"""The driver of watches: sends their requests, passes them the responses, and waits between requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from narthex.kube.client import StreamedResponse, Unreachable
from narthex.kube.exchange import (
    BytesReceived,
    DeadlineReached,
    LinesReceived,
    RequestRefused,
    ResponseBody,
    ResponseOpened,
    StreamEnded,
    WatchInput,
    WatchRequest,
    WatchStarted,
    WatchStep,
)
from narthex.kube.messages import LineSplitter
from narthex.kube.watch import Watch
from narthex.model.store import Event


class StreamOpener(Protocol):
    """A client that sends GET requests."""

    def get(self, request: WatchRequest) -> AbstractAsyncContextManager[StreamedResponse]:
        """Send a GET request and yield the response. Raises Unreachable."""
        ...


_TOLERANCE = 0.05
"""Seconds by which a request may be aborted too early; moving the timeout for each chunk costs more than decoding it.
"""

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
        """Drive the watch until cancelled."""
        try:
            step = self._watch.take(WatchStarted(), self._now())
            while True:
                self._publish(step)
                if step.request is not None:
                    step = await self._request(step.request)
                else:
                    await asyncio.sleep(self._watch.wake_at - self._now())
                    step = self._watch.take(DeadlineReached(), self._now())
        finally:
            # The watch counts them as seen.
            if self._events:
                self._publish(WatchStep())

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

    async def _lines(self, answer: StreamedResponse, limit: asyncio.Timeout) -> WatchStep:
        splitter = LineSplitter()
        counts = self._watch.counts
        seen = counts.bookmarks, counts.lists
        async for chunk in answer.chunks():
            lines = splitter.feed(chunk)
            step = self._take(LinesReceived(lines) if lines else BytesReceived())
            if step.over:
                return step
            self._events.extend(step.events)
            # A streaming list is thousands of chunks of which nothing follows before the last.
            if self._events or seen != (counts.bookmarks, counts.lists):
                seen = counts.bookmarks, counts.lists
                events, self._events = tuple(self._events), []
                self._tell(self._watch, events)
            self._put_off(limit)
        return self._take(StreamEnded())

    async def _body(self, answer: StreamedResponse, limit: asyncio.Timeout) -> WatchStep:
        parts: list[bytes] = []
        async for chunk in answer.chunks():
            parts.append(chunk)
            self._take(BytesReceived())
            self._put_off(limit)
        return self._take(ResponseBody(b"".join(parts)))

    def _put_off(self, limit: asyncio.Timeout) -> None:
        """Move the timeout to `wake_at`."""
        if abs(self._watch.wake_at - (limit.when() or 0.0)) > _TOLERANCE:
            limit.reschedule(self._watch.wake_at)

    def _take(self, input: WatchInput) -> WatchStep:
        return self._watch.take(input, self._now())
