"""Metrics in the Prometheus text format.

Programs count in plain numbers. They import prometheus-client, which takes a tenth of a second to load, at the first scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from narthex.runtime.http import HttpResponse

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Collector(Protocol):
    """A source of metrics, for prometheus-client."""

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics. Called from the thread that answers the scrape."""
        ...


Values = float | Mapping[str, float] | Mapping[tuple[str, ...], float]
"""One value, values by the value of the label, or values by the values of all labels."""


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a gauge with its help text."""
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a counter with its help text; the exposition adds `_total` to the name."""
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def untyped(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a metric whose name is exposed as it is, for counters of other programs without `_total`."""
    from prometheus_client.core import UnknownMetricFamily

    return _filled(UnknownMetricFamily(name, text, labels=labels), values)


def _filled(family: Any, values: Values) -> Metric:
    for key, value in values.items() if isinstance(values, Mapping) else (((), values),):
        family.add_metric([key] if isinstance(key, str) else list(key), float(value))
    return family  # type: ignore[no-any-return]


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
