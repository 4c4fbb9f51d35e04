"""A Watch whose clock and inputs are set by hand, and the inputs."""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from typing import Any

import msgspec

from narthex.kube.messages import (
    DeadlineReached,
    LinesReceived,
    RequestRefused,
    ResponseBody,
    ResponseOpened,
    StreamEnded,
    WatchInput,
    WatchStep,
)
from narthex.kube.resources import SERVICE_CIDRS, WatchedResource
from narthex.kube.watch import Watch
from narthex.lab.api.api import error_response
from narthex.lab.api.errors import StatusError
from narthex.model.store import Event, Synced, Upsert

MIDDLE = 0.5


class Table:
    """A Watch of ServiceCIDRs, which are short, and a clock that is set by hand."""

    def __init__(self, resource: WatchedResource = SERVICE_CIDRS, **options: Any) -> None:
        self.watch = Watch(resource, lambda: MIDDLE, **options)
        self.now = 0.0
        self.asked: Any = None
        self.events: list[Event] = []

    def __call__(self, *inputs: WatchInput, after: float = 0.0) -> WatchStep:
        """Pass inputs, each `after` so many seconds, and return what the last of them makes it do."""
        for each in inputs:
            self.now += after
            step = self.watch.take(each, self.now)
            self.events += step.events
            if step.request is not None:
                self.asked = step.request
            elif step.over:
                self.asked = None
        return step

    @property
    def query(self) -> dict[str, str]:
        return dict(self.asked.query)

    @property
    def delay(self) -> float:
        assert self.asked is None, "it is not backing off"
        return self.watch.wake_at - self.now

    @property
    def held(self) -> KeysView[str]:
        found: dict[str, None] = {}
        for each in self.events:
            assert not isinstance(each, Synced)
            found[str(each.object.key) if isinstance(each, Upsert) else f"-{each.key}"] = None
        return found.keys()


def cidr(name: str, version: int = 1, cidrs: Sequence[str] = ("10.96.0.0/16",)) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "spec": {"cidrs": list(cidrs)}}


def page(version: int | str, *items: Mapping[str, Any], follow: str = "") -> ResponseBody:
    meta = {"resourceVersion": str(version)} | ({"continue": follow} if follow else {})
    return ResponseBody(msgspec.json.encode({"metadata": meta, "items": items}))


def line(type: str, raw: Any) -> LinesReceived:
    return LinesReceived(msgspec.json.encode({"type": type, "object": raw}))


def bookmark(version: int | str, end: bool = False) -> LinesReceived:
    meta = {"resourceVersion": str(version)} | ({"annotations": {"k8s.io/initial-events-end": "true"}} if end else {})
    return line("BOOKMARK", {"metadata": meta})


def status(code: int, reason: str, message: str, **details: Any) -> bytes:
    return error_response(StatusError(code, reason, message, details)).body


def failure(code: int, **more: Any) -> RequestRefused:
    return RequestRefused(code, status(code, **{"reason": "", "message": ""} | more))


TOO_LARGE = RequestRefused(504, status(504, "Timeout", "Too large resource version: 9, current: 5"))
GONE = RequestRefused(410, status(410, "Expired", "too old"))
LOST = StreamEnded("connection reset")


def listing(**options: Any) -> Table:
    table = Table(streaming=False, **options)
    table(DeadlineReached())
    return table


def watching(version: int | str = 100, *items: Mapping[str, Any], **options: Any) -> Table:
    """A table that has a list and watches."""
    table = listing(**options)
    table(ResponseOpened(), page(version, *items), ResponseOpened())
    return table


def streaming() -> Table:
    table = Table()
    table(DeadlineReached(), ResponseOpened())
    return table
