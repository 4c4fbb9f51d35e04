"""Metrics of the server and of its plugins, under the names of CoreDNS (row S16) so that dashboards and alerts keep working."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import narthex
from narthex.dns.server.counters import (
    DURATIONS,
    SIZES,
    AnswerCounts,
    BucketCounts,
    CacheCounts,
    ResolverCounts,
    UpstreamCounts,
    empty_buckets,
)
from narthex.runtime.metrics import Collector, exposition

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, Metric

PROGRAMMING = tuple(0.001 * 2**power for power in range(20))
"""Upper bounds in seconds of the buckets of programming durations, as in CoreDNS."""
_SERVER = "dns://"
_BLOCK_LABELS = ("server", "zones", "view")
_GAUGES = {
    "narthex_dns_workers": "Worker processes that answer queries.",
    "narthex_dns_services": "Services in the cache.",
    "narthex_dns_synced": "1 once all initial lists are complete.",
    "narthex_dns_heard_age_seconds": "Seconds since the last message of the slowest watch.",
}


class ProgrammingDurations:
    """Time from the change of a Service's endpoints until all workers have it, by kind of Service. One thread writes."""

    def __init__(self) -> None:
        self.by_kind: dict[str, BucketCounts] = {}

    def observe(self, kind: str, seconds: float) -> None:
        """Record one change."""
        self.by_kind.setdefault(kind, empty_buckets(PROGRAMMING)).add(PROGRAMMING, max(0.0, seconds))


class DnsMetrics:
    """Collects the metrics of a server on each scrape."""

    def __init__(
        self,
        counts: Callable[[], tuple[AnswerCounts, Mapping[str, ResolverCounts]]],
        programming: ProgrammingDurations,
        state: Callable[[], Mapping[str, float]],
        others: Sequence[Collector] = (),
    ) -> None:
        """Create the collector.

        Args:
            counts: Returns the sums of answers, and of plugin chains by the first zone of their server block.
            programming: Durations that the main process measures.
            state: Returns the number of panics, and the gauges of `_GAUGES` by name.
            others: Further collectors for the same endpoint.
        """
        self._counts = counts
        self._programming = programming
        self._state = state
        self._others = others

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return exposition(self, *self._others)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics, for prometheus-client."""
        from prometheus_client.core import GaugeMetricFamily

        counts, resolvers = self._counts()
        yield from _answer_metrics(counts)
        yield from resolver_metrics(resolvers)
        yield from _histograms(counts)
        yield histogram_metric(
            "coredns_kubernetes_dns_programming_duration_seconds",
            "Time from a change of a Service's endpoints to the change of its names.",
            ["service_kind"],
            PROGRAMMING,
            {(kind,): buckets for kind, buckets in self._programming.by_kind.items()},
        )
        state = dict(self._state())
        yield _counter("coredns_panics", "Workers that died.", state.pop("panics", 0))
        build = GaugeMetricFamily("coredns_build_info", "Version.", labels=["version", "revision", "goversion"])
        python = ".".join(map(str, sys.version_info[:3]))
        build.add_metric([f"narthex {narthex.__version__}", "", f"python {python}"], 1)
        yield build
        yield _counter("narthex_dns_lost_answers", "Responses that could not be sent.", counts.lost)
        yield _counter(
            "narthex_dns_refused_connections", "TCP connections above the limits.", counts.refused_connections
        )
        for name, value in state.items():
            gauge = GaugeMetricFamily(name, _GAUGES[name])
            gauge.add_metric([], value)
            yield gauge


def _answer_metrics(counts: AnswerCounts) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily

    labels = ["server", "zone", "view", "proto", "family", "type"]
    requests = CounterMetricFamily("coredns_dns_requests", "Queries.", labels=labels)
    labels = ["server", "zone", "view", "rcode", "plugin"]
    responses = CounterMetricFamily("coredns_dns_responses", "Responses.", labels=labels)
    asked: dict[tuple[str, str, str, str], int] = {}
    answered: dict[tuple[str, str, str], int] = {}
    for (proto, family, zone, type_, rcode, plugin), number in counts.answers.items():
        query = (zone, proto, str(family), type_)
        asked[query] = asked.get(query, 0) + number
        response = (zone, rcode, plugin)
        answered[response] = answered.get(response, 0) + number
    for (zone, *values), number in sorted(asked.items()):
        requests.add_metric([_SERVER, zone, "", *values], number)
    for (zone, *values), number in sorted(answered.items()):
        responses.add_metric([_SERVER, zone, "", *values], number)
    yield requests
    yield responses


def _histograms(counts: AnswerCounts) -> Iterable[Metric]:
    labels = ["server", "zone", "view"]
    yield histogram_metric(
        "coredns_dns_request_duration_seconds",
        "Time that the server took for a response.",
        labels,
        DURATIONS,
        {(_SERVER, zone, ""): buckets for zone, buckets in counts.durations.items()},
    )
    for name, text, sizes in (
        ("coredns_dns_request_size_bytes", "Sizes of queries.", counts.request_sizes),
        ("coredns_dns_response_size_bytes", "Sizes of responses.", counts.response_sizes),
    ):
        by_labels: dict[tuple[str, ...], BucketCounts] = {
            (_SERVER, zone, "", proto): buckets for (proto, zone), buckets in sizes.items()
        }
        yield histogram_metric(name, text, [*labels, "proto"], SIZES, by_labels)


def resolver_metrics(resolvers: Mapping[str, ResolverCounts]) -> Iterable[Metric]:
    """Yield the metrics of `cache`, `forward`, and `hosts`. The keys are the first zones of server blocks."""
    from prometheus_client.core import GaugeMetricFamily

    yield from _cache_metrics({zone: counts.cache for zone, counts in resolvers.items() if counts.cache is not None})
    upstreams = UpstreamCounts()
    for counts in resolvers.values():
        upstreams.merge(counts.upstreams)
    yield from _forward_metrics(upstreams)
    hosts = GaugeMetricFamily("coredns_hosts_entries", "Entries of hosts files.")
    entries = [counts.hosts for counts in resolvers.values() if counts.hosts is not None]
    if entries:
        hosts.add_metric([], sum(entries))
        yield hosts


def _cache_metrics(caches: Mapping[str, CacheCounts]) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["server", "type", "zones", "view"]
    entries = GaugeMetricFamily("coredns_cache_entries", "Responses in the cache.", labels=labels)
    hits = CounterMetricFamily("coredns_cache_hits", "Responses from the cache.", labels=labels)
    evictions = CounterMetricFamily("coredns_cache_evictions", "Responses that were evicted.", labels=labels)
    single = {
        "requests": CounterMetricFamily("coredns_cache_requests", "Lookups in the cache.", labels=_BLOCK_LABELS),
        "misses": CounterMetricFamily("coredns_cache_misses", "Lookups without a result.", labels=_BLOCK_LABELS),
        "prefetches": CounterMetricFamily("coredns_cache_prefetch", "Prefetched responses.", labels=_BLOCK_LABELS),
        "stale": CounterMetricFamily("coredns_cache_served_stale", "Stale responses served.", labels=_BLOCK_LABELS),
    }
    for zone, cache in caches.items():
        for half in ("success", "denial"):
            entries.add_metric([_SERVER, half, zone, ""], cache.entries[half])
            hits.add_metric([_SERVER, half, zone, ""], cache.counters.hits[half])
            evictions.add_metric([_SERVER, half, zone, ""], cache.counters.evictions[half])
        for name, family in single.items():
            family.add_metric([_SERVER, zone, ""], getattr(cache.counters, name))
    yield from (entries, hits, evictions, *single.values())


def _forward_metrics(counts: UpstreamCounts) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily

    yield histogram_metric(
        "coredns_proxy_request_duration_seconds",
        "Time that an upstream took for a response.",
        ["proxy_name", "to", "rcode"],
        DURATIONS,
        {("forward", to, rcode): buckets for (to, rcode), buckets in counts.durations.items()},
    )
    labels = ["proxy_name", "to"]
    failures = CounterMetricFamily("coredns_proxy_healthcheck_failures", "Failed health checks.", labels=labels)
    for to, number in sorted(counts.failed_checks.items()):
        failures.add_metric(["forward", to], number)
    connections = {
        reused: CounterMetricFamily(f"coredns_proxy_conn_cache_{word}", text, labels=[*labels, "proto"])
        for reused, word, text in (
            (True, "hits", "Queries on an existing connection."),
            (False, "misses", "Queries that needed a new connection."),
        )
    }
    for (to, proto, reused), number in sorted(counts.connections.items()):
        connections[reused].add_metric(["forward", to, proto], number)
    drops = CounterMetricFamily("narthex_dns_dropped_responses", "Dropped responses of upstreams.", labels=["reason"])
    for reason, number in sorted(counts.drops.items()):
        drops.add_metric([reason], number)
    yield from (failures, *connections.values(), drops)
    yield _counter("coredns_forward_healthcheck_broken", "Queries that found all upstreams down.", counts.broken)
    yield _counter("coredns_forward_max_concurrent_rejects", "Queries beyond max_concurrent.", counts.rejects)
    yield _counter("coredns_autopath_success", "Search lists that led to an answer.", counts.autopaths)
    yield _counter(
        "narthex_dns_coalesced_questions", "Queries that waited for an equal one in flight.", counts.coalesced
    )


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name, text, value=value)


def histogram_metric(
    name: str, text: str, labels: Sequence[str], bounds: Sequence[float], values: Mapping[tuple[str, ...], BucketCounts]
) -> Metric:
    """Return a histogram; the keys of `values` are the values of its labels."""
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=labels)
    for label_values, counts in sorted(values.items()):
        below = 0
        buckets = []
        for bound, count in zip((*bounds, float("inf")), counts.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
        family.add_metric(list(label_values), buckets, counts.total)
    return family
