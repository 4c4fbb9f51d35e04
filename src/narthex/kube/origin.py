"""The origin of a program's objects: an API server or another source.

It includes the metrics of the followed lists and a way to post Events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import writing
from narthex.kube.events import EventCreator
from narthex.kube.exchange import WATCH_TIMES
from narthex.kube.resources import of_a_proxy
from narthex.kube.source import FollowedList, KubeSource
from narthex.runtime.metrics import Collector, counter, gauge
from narthex.runtime.reconciler import EventSource

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_EVENT_SECONDS = 10.0


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


class EventPoster:
    """Posts Events, each over a connection of its own, since they are rare.

    For one thread at a time, without an asyncio loop.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    def create_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Post an event. Raises ApiError if the server did not store it."""
        asyncio.run(self._create(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", event))

    async def _create(self, path: str, event: dict[str, Any]) -> None:
        async with writing(self._access, _EVENT_SECONDS) as writer:
            await writer.create(path, event)


class SourceMetrics:
    """A collector of metrics about the lists of a source."""

    def __init__(self, followed: Sequence[FollowedList], wall: Callable[[], float]) -> None:
        self._followed = followed
        self._wall = wall

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, for prometheus-client."""
        now = self._wall()

        def by_kind(number: Callable[[FollowedList], float | None]) -> dict[str, float]:
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
