"""The server's numbers under CoreDNS's names (row S16), so that people's dashboards and alerts hold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import narthex
from narthex.dns.program.resolver_metrics import histogram_metric, resolver_metrics
from narthex.dns.server.meter import ResolverCounts
from narthex.dns.server.tally import DURATIONS, SIZES, Counts, Histogram, histogram
from narthex.runtime.metrics import Collector, exposition

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_FAMILIES = {1: "1", 2: "2"}
PROGRAMMING = tuple(0.001 * 2**power for power in range(20))
"""Upper bounds of what it takes from a change of a Service to its names, CoreDNS's."""


class Programmed:
    """How long changes took from the API server to the workers, by kind of Service. One thread writes."""

    def __init__(self) -> None:
        self.held: dict[str, Histogram] = {}

    def took(self, kind: str, seconds: float) -> None:
        """One change."""
        self.held.setdefault(kind, histogram(PROGRAMMING)).add(PROGRAMMING, max(0.0, seconds))


class Metrics:
    """Collects when somebody looks."""

    def __init__(
        self,
        counts: Callable[[], tuple[Counts, Mapping[str, ResolverCounts]]],
        programmed: Programmed,
        state: Callable[[], Mapping[str, float]],
        others: Sequence[Collector] = (),
    ) -> None:
        """`state` gives numbers of the moment by the name of their metric, each with its explanation in `_STATE`."""
        self._counts = counts
        self._programmed = programmed
        self._state = state
        self._others = others

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return exposition(self, *self._others)

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts, resolvers = self._counts()
        yield from _answers(counts)
        yield from resolver_metrics(resolvers)
        yield histogram_metric(
            "coredns_dns_request_duration_seconds",
            "What an answer took in the server.",
            ["server", "zone", "view"],
            DURATIONS,
            {("dns://", zone, ""): held for zone, held in counts.durations.items()},
        )
        for name, text, held in (
            ("coredns_dns_request_size_bytes", "Sizes of questions.", counts.request_sizes),
            ("coredns_dns_response_size_bytes", "Sizes of answers.", counts.response_sizes),
        ):
            labelled: dict[tuple[str, ...], Histogram] = {
                ("dns://", zone, "", proto): sizes for (proto, zone), sizes in held.items()
            }
            yield histogram_metric(name, text, ["server", "zone", "view", "proto"], SIZES, labelled)
        yield histogram_metric(
            "coredns_kubernetes_dns_programming_duration_seconds",
            "From a change of a Service's endpoints to its names.",
            ["service_kind"],
            PROGRAMMING,
            {(kind,): held for kind, held in self._programmed.held.items()},
        )
        panics = CounterMetricFamily("coredns_panics", "Workers that died.")
        state = dict(self._state())
        panics.add_metric([], state.pop("panics", 0))
        yield panics
        build = GaugeMetricFamily("coredns_build_info", "What this is.", labels=["version", "revision", "goversion"])
        python = ".".join(map(str, sys.version_info[:3]))
        build.add_metric([f"narthex {narthex.__version__}", "", f"python {python}"], 1)
        yield build
        for name, text, number in (
            ("narthex_dns_lost_answers", "Answers that could not be sent.", counts.lost),
            ("narthex_dns_refused_connections", "TCP connections above the limits.", counts.refused_connections),
        ):
            counter = CounterMetricFamily(name, text)
            counter.add_metric([], number)
            yield counter
        for name, value in state.items():
            gauge = GaugeMetricFamily(name, _STATE[name])
            gauge.add_metric([], value)
            yield gauge


_STATE = {
    "narthex_dns_workers": "Processes that answer.",
    "narthex_dns_services": "Services that are known.",
    "narthex_dns_synced": "1: all lists have been complete once.",
    "narthex_dns_heard_age_seconds": "Time since the last sign of life of the slowest watch.",
}


def _answers(counts: Counts) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily

    requests = CounterMetricFamily(
        "coredns_dns_requests", "Questions.", labels=["server", "zone", "view", "proto", "family", "type"]
    )
    responses = CounterMetricFamily(
        "coredns_dns_responses", "Answers.", labels=["server", "zone", "view", "rcode", "plugin"]
    )
    asked: dict[tuple[str, str, str, str], int] = {}
    answered: dict[tuple[str, str, str], int] = {}
    for (proto, family, zone, type_, code, plugin), number in counts.answers.items():
        key = (zone, proto, _FAMILIES[family], type_)
        asked[key] = asked.get(key, 0) + number
        given = (zone, code, plugin)
        answered[given] = answered.get(given, 0) + number
    for (zone, proto, family_text, type_), number in sorted(asked.items()):
        requests.add_metric(["dns://", zone, "", proto, family_text, type_], number)
    for (zone, code, plugin), number in sorted(answered.items()):
        responses.add_metric(["dns://", zone, "", code, plugin], number)
    yield requests
    yield responses
