"""The current state of the page: one thread follows the objects, another one counts connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from narthex.lab.ui.picture import picture
from narthex.model.problem import Problem
from narthex.model.store import Event, Snapshot, Store

ConnectionCounts = dict[str, int]
"""New connections by Service (`shop/web`) since the start of the nodes' proxies."""

COUNT_SECONDS = 1.0
_COALESCE_SECONDS = 0.2
"""Changes are drawn together when they come closer than this."""
_AGAIN_SECONDS = 2.0


class Source(Protocol):
    """Objects as events: manifests or an API server."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Objects that could not be decoded."""
        ...

    def scan(self) -> list[Event]:
        """Return all objects as events."""
        ...

    def changes(self, stop: threading.Event) -> Iterator[list[Event]]:
        """Yield later events, until `stop` is set."""
        ...


class Board:
    """The current state. Its methods are thread-safe; `begin` and `end` are called once."""

    def __init__(self, title: str, source: Source, count: Callable[[], ConnectionCounts | None] | None = None) -> None:
        """Create a board. `count` asks the nodes for connections and returns None if none can be asked."""
        self._title = title
        self._source = source
        self._count = count
        self._store = Store()
        self._lock = threading.Lock()
        self._turn = 0
        self._messages: dict[str, tuple[int, bytes]] = {}
        """By kind of event: when it was put up, and its JSON."""
        self.stop = threading.Event()
        self._threads = [threading.Thread(target=self._follow, name="picture", daemon=True)]
        if count is not None:
            self._threads.append(threading.Thread(target=self._count_on, name="counts", daemon=True))

    def begin(self) -> None:
        """Start to follow the objects."""
        self._draw()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the threads and all streams of events."""
        self.stop.set()

    @property
    def snapshot(self) -> Snapshot:
        """The current objects."""
        return self._store.snapshot

    def news(self, since: int) -> tuple[int, Sequence[tuple[str, bytes]]]:
        """Return the current turn, and kind and JSON of each message that is newer than turn `since`."""
        with self._lock:
            return self._turn, [(kind, body) for kind, (turn, body) in self._messages.items() if turn > since]

    def _put(self, kind: str, content: object) -> None:
        body = msgspec.json.encode(content)
        with self._lock:
            if kind not in self._messages or self._messages[kind][1] != body:
                self._turn += 1
                self._messages[kind] = (self._turn, body)

    def _draw(self) -> None:
        drawn = picture(self._store.snapshot)
        # A cluster may have many invalid objects; the first ones are enough.
        problems = [str(problem) for problem in self._source.problems[:20]]
        self._put("picture", {"title": self._title, "problems": problems, "counted": self._count is not None, **drawn})

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._store.apply(event)
        self._draw()

    def _follow(self) -> None:
        while not self.stop.is_set():
            try:
                self._take(self._source.scan())
                for events in self._source.changes(self.stop):
                    self._take(events)
                    self.stop.wait(_COALESCE_SECONDS)
            except OSError as error:
                self._put("trouble", {"message": f"the objects cannot be followed: {error}"})
            self.stop.wait(_AGAIN_SECONDS)

    def _count_on(self) -> None:
        assert self._count is not None, "only then there is a thread for it"
        while not self.stop.is_set():
            found = self._count()
            self._put("counts", {"known": found is not None, "services": found or {}})
            self.stop.wait(COUNT_SECONDS)
