"""Metrics in the Prometheus text format.

Programs count in plain numbers. They import prometheus-client, which takes a tenth of a second to load, at the first scrape.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from narthex.runtime.http.messages import HttpResponse

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Collector(Protocol):
    """A source of metrics, for prometheus-client."""

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics. Called from the thread that answers the scrape."""
        ...


def exposition(*collectors: Collector) -> bytes:
    """Return the metrics of all collectors in the Prometheus text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def metrics_reply(text: bytes) -> HttpResponse:
    """Return the answer to a scrape."""
    return HttpResponse(200, text, CONTENT_TYPE)
