"""Drives watches over the network: makes their requests, hands them what comes, and waits when they want to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from narthex.kube.client import Answer, Unreachable
from narthex.kube.exchange import Body, Due, Ended, Heard, Input, Lines, Opened, Refused, Request, Start, Step
from narthex.kube.messages import Splitter
from narthex.kube.watch import Watch
from narthex.model.store import Event


class Getter(Protocol):
    """The way to the server."""

    def get(self, request: Request) -> AbstractAsyncContextManager[Answer]:
        """The answer to a request; Unreachable when there is none."""
        ...


_TOLERANCE = 0.05
"""Seconds by which a request may be given up too soon; setting the time for each chunk anew costs more than decoding it."""

Tell = Callable[[Watch, tuple[Event, ...]], object]
"""Called with what a watch has found out, perhaps nothing but a change of its own state."""


async def follow(watch: Watch, api: Getter, tell: Tell) -> None:
    """Keep one list up, until cancelled."""
    await _Follower(watch, api, tell).run()


class _Follower:
    def __init__(self, watch: Watch, api: Getter, tell: Tell) -> None:
        self._watch = watch
        self._api = api
        self._tell = tell
        self._now = asyncio.get_running_loop().time
        self._events: list[Event] = []

    async def run(self) -> None:
        try:
            step = self._watch.take(Start(), self._now())
            while True:
                self._publish(step)
                if step.request is not None:
                    step = await self._request(step.request)
                else:
                    await asyncio.sleep(self._watch.wake_at - self._now())
                    step = self._watch.take(Due(), self._now())
        finally:
            # The watch counts them as told.
            if self._events:
                self._publish(Step())

    def _publish(self, step: Step) -> None:
        self._events.extend(step.events)
        events, self._events = tuple(self._events), []
        self._tell(self._watch, events)

    async def _request(self, request: Request) -> Step:
        """Make a request; the step that ends it."""
        try:
            async with asyncio.timeout_at(self._watch.wake_at) as limit, self._api.get(request) as answer:
                if answer.code != 200:
                    body = await answer.refusal()
                    return self._take(Refused(answer.code, body, answer.retry_after))
                self._publish(self._take(Opened()))
                limit.reschedule(self._watch.wake_at)
                return await (self._lines(answer, limit) if request.lines else self._body(answer, limit))
        except TimeoutError:
            return self._take(Due())
        except Unreachable as error:
            return self._take(Ended(str(error)))

    async def _lines(self, answer: Answer, limit: asyncio.Timeout) -> Step:
        splitter = Splitter()
        counts = self._watch.counts
        told = counts.bookmarks, counts.lists
        async for chunk in answer.chunks():
            lines = splitter.feed(chunk)
            step = self._take(Lines(lines) if lines else Heard())
            if step.over:
                return step
            self._events.extend(step.events)
            # A streaming list is thousands of chunks of which nothing follows before the last.
            if self._events or told != (counts.bookmarks, counts.lists):
                told = counts.bookmarks, counts.lists
                events, self._events = tuple(self._events), []
                self._tell(self._watch, events)
            self._put_off(limit)
        return self._take(Ended())

    async def _body(self, answer: Answer, limit: asyncio.Timeout) -> Step:
        parts: list[bytes] = []
        async for chunk in answer.chunks():
            parts.append(chunk)
            self._take(Heard())
            self._put_off(limit)
        return self._take(Body(b"".join(parts)))

    def _put_off(self, limit: asyncio.Timeout) -> None:
        """Wait until `wake_at` now."""
        if abs(self._watch.wake_at - (limit.when() or 0.0)) > _TOLERANCE:
            limit.reschedule(self._watch.wake_at)

    def _take(self, input: Input) -> Step:
        return self._watch.take(input, self._now())
