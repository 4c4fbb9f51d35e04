"""A cluster's API server, a bad network and the clients of one proxy, in made-up time: an hour takes milliseconds."""

import math
from datetime import UTC, datetime
from typing import Any

from narthex.kube.messages import (
    BytesReceived,
    DeadlineReached,
    LineSplitter,
    LinesReceived,
    RequestRefused,
    ResponseBody,
    ResponseOpened,
    StreamEnded,
)
from narthex.kube.watch import Watch
from narthex.lab.api.api import ApiHandler, error_response
from narthex.lab.api.errors import StatusError
from narthex.lab.api.reads import PRESENT, WatchCursor
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import ApiRequest
from narthex.model.store import Store, Synced

BOOKMARK_SECONDS = 60.0


class Link:
    """One request and its answer. `fate` is what becomes of it: (what, a number)."""

    def __init__(self, server: "Server", request: Any, fate: tuple[str, int], now: float) -> None:
        what, self.number = fate
        self.frozen = what == "silence"
        self.cut = self.number if what == "cut" else math.inf
        self.garble = what == "garbage"
        self.splitter = LineSplitter()
        self.ends_at = self.bookmark_at = math.inf
        self.cursor: Any = None
        self.first: list[Any] = []
        if self.frozen:
            return
        if what == "refuse":
            self.first = [StreamEnded("connection refused")]
        elif what == "status":
            self.first = [RequestRefused(self.number, error_response(StatusError(self.number, "", "fault")).body, 7.0)]
        else:
            self._answer(server, request, now)

    def _answer(self, server: "Server", request: Any, now: float) -> Any:
        reply = server.answer(request)
        if isinstance(reply, WatchCursor):
            self.cursor = reply
            self.ends_at = now + reply.timeout
            self.bookmark_at = now + BOOKMARK_SECONDS if server.abilities.bookmarks else math.inf
            self.first = [ResponseOpened()]
        elif reply.status != 200:
            self.first = [RequestRefused(reply.status, reply.body)]
        elif self.cut < len(reply.body):
            self.first = [ResponseOpened(), BytesReceived(), StreamEnded("connection reset")]
        else:
            self.first = [
                ResponseOpened(),
                BytesReceived(),
                ResponseBody(reply.body[: len(reply.body) // 2] if self.garble else reply.body),
            ]

    def spoil(self, fate: tuple[str, int]) -> None:
        """Let something happen to a stream that is open."""
        what, number = fate
        self.frozen = self.frozen or what == "silence"
        self.garble = what == "garbage"
        self.cut = number if what == "cut" else self.cut
        if what in ("refuse", "status"):
            self.cut = 0

    def next(self) -> float:
        """When something comes by itself."""
        return math.inf if self.frozen else min(self.ends_at, self.bookmark_at)

    def inputs(self, now: float) -> Any:
        """What the client sees now."""
        if self.frozen:
            return
        first, self.first = self.first, []
        yield from first
        if self.cursor is None:
            return
        data = b"".join(self.cursor.lines())
        if now >= self.bookmark_at:
            self.bookmark_at = now + BOOKMARK_SECONDS
            data += self.cursor.bookmark() or b""
        if self.garble and data:
            data, self.garble = data[:-3] + b'"{\n', False
        if data:
            yield BytesReceived()
        if lines := self.splitter.feed(data[: int(min(self.cut, len(data)))]):
            yield LinesReceived(lines)
        if len(data) > self.cut or self.cut == 0:
            yield StreamEnded("connection reset")
        elif self.cursor.broken or now >= self.ends_at:
            yield StreamEnded()
        self.cut -= len(data)


class Server:
    """Data, and what the server can do."""

    def __init__(self, abilities: Any = PRESENT) -> None:
        self.api = ApiHandler(Registry(lambda: datetime(2026, 1, 1, tzinfo=UTC), bytes), abilities)

    @property
    def data(self) -> Any:
        return self.api.registry.store

    @data.setter
    def data(self, data: Any) -> None:
        self.api.registry.store = data

    @property
    def abilities(self) -> Any:
        return self.api.abilities

    @abilities.setter
    def abilities(self, abilities: Any) -> None:
        self.api.abilities = abilities

    def answer(self, request: Any) -> Any:
        return self.api.answer(ApiRequest("GET", request.path, dict(request.query), {}))


class Client:
    """One Watch and its connection."""

    def __init__(
        self, server: Server, resource: Any, chance: Any, fates: Any = lambda: ("", 0), **options: Any
    ) -> None:
        self.server = server
        self.watch = Watch(resource, chance, **options)
        self.fates = fates
        self.link: Any = None
        self.events: list[Any] = []
        self.requests: list[Any] = []
        self.inputs = 0

    def start(self, now: float) -> None:
        self._do(self.watch.take(DeadlineReached(), now), now)

    def _do(self, step: Any, now: float) -> Any:
        self.events.extend(step.events)
        if step.request is not None:
            self.requests.append(step.request)
            self.link = Link(self.server, step.request, self.fates(), now)
        elif step.over:
            self.link = None
        return step.over

    def settle(self, now: float) -> None:
        """Take in all that can be had at this moment."""
        while self.link is not None:
            link = self.link
            for each in link.inputs(now):
                self.inputs += 1
                if self._do(self.watch.take(each, now), now):
                    break
            if self.link is link:
                return

    def next(self) -> float:
        """When something happens by itself."""
        return min(self.watch.wake_at, self.link.next() if self.link else math.inf)

    def turn(self, now: float) -> None:
        self.settle(now)
        if now >= self.watch.wake_at:
            self._do(self.watch.take(DeadlineReached(), now), now)
            self.settle(now)


class World:
    """A server, and clients that follow it; `now` moves by `run` only."""

    def __init__(self, server: Server, clients: list[Client]) -> None:
        self.server = server
        self.clients = clients
        self.now = 0.0
        self.store = Store()
        self.turns = 0
        for client in clients:
            client.start(0.0)
        self.run(0.0)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end, due = self.now + seconds, self.clients
        while True:
            for client in due:
                client.turn(self.now)
                for event in client.events:
                    self.store.apply(event)
                client.events.clear()
            if all(client.watch.synced for client in self.clients):
                self.store.apply(Synced())
            times = {client: client.next() for client in self.clients}
            following = min(times.values())
            self.turns += 1
            assert self.turns < 100_000, "the clients spin"
            if following > end:
                break
            self.now = max(self.now, following)
            due = [client for client, time in times.items() if time <= self.now]
        self.now = end
