"""The origin of a program's objects: an API server or another source.

It includes the metrics of the followed lists and a way to post Events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import ApiClient, Unreachable
from narthex.kube.events import EventCreator
from narthex.kube.exchange import WATCH_TIMES
from narthex.kube.resources import of_a_proxy
from narthex.kube.source import FollowedList, KubeSource
from narthex.model.problem import quoted
from narthex.runtime.metrics import Collector
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
    """Metrics of the source."""
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
        """Post an event. Raises RuntimeError if the server did not store it."""
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        try:
            code, said = asyncio.run(self._post(path, msgspec.json.encode(event)))
        except (Unreachable, TimeoutError) as error:
            raise RuntimeError(str(error) or f"no answer within {_EVENT_SECONDS:g} s") from error
        if code not in (200, 201):
            raise RuntimeError(f"{path}: status {code}: {quoted(said.decode(errors='replace'))}")

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        api = ApiClient(self._access)
        try:
            async with asyncio.timeout(_EVENT_SECONDS):
                return await api.post(path, body)
        finally:
            await api.close()


class SourceMetrics:
    """A collector of metrics about the lists of a source."""

    def __init__(self, followed: Sequence[FollowedList], wall: Callable[[], float]) -> None:
        self._followed = followed
        self._wall = wall

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, for prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._wall()
        for name, text, times in (
            ("list", "the last complete list", [each.last_list for each in self._followed]),
            (
                "event",
                "the last object that was added, changed or deleted",
                [each.last_event for each in self._followed],
            ),
            ("word", "the last sign of life of the watch", [each.last_heard for each in self._followed]),
        ):
            gauge = GaugeMetricFamily(f"narthex_source_last_{name}_age_seconds", f"Time since {text}.", labels=["kind"])
            for each, when in zip(self._followed, times, strict=True):
                # Never is no number.
                if when is not None:
                    gauge.add_metric([each.kind], max(0.0, now - when))
            yield gauge
        for name, text, numbers in (
            ("objects", "Objects that are known.", [each.objects for each in self._followed]),
            ("broken_objects", "Objects that cannot be used.", [each.broken for each in self._followed]),
            ("trouble", "1: the list cannot be kept up at present.", [int(each.trouble) for each in self._followed]),
        ):
            gauge = GaugeMetricFamily(f"narthex_source_{name}", text, labels=["kind"])
            for each, number in zip(self._followed, numbers, strict=True):
                gauge.add_metric([each.kind], number)
            yield gauge
        for name, text, numbers in (
            ("lists", "Complete lists.", [each.counts.lists for each in self._followed]),
            ("watches", "Watches that were opened.", [each.counts.watches for each in self._followed]),
            ("events", "Objects added, changed or deleted.", [each.counts.events for each in self._followed]),
        ):
            counter = CounterMetricFamily(f"narthex_source_{name}", text, labels=["kind"])
            for each, number in zip(self._followed, numbers, strict=True):
                counter.add_metric([each.kind], number)
            yield counter
        failures = CounterMetricFamily(
            "narthex_source_failures",
            "Requests that failed, by status code or kind of failure.",
            labels=["kind", "reason"],
        )
        for each in self._followed:
            for reason, number in sorted(dict(each.counts.failures).items()):
                failures.add_metric([each.kind, reason], number)
        yield failures
