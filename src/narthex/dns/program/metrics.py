"""Metrics of the server and of its plugins, under the names of CoreDNS (row S16) so that dashboards and alerts keep working."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import narthex
from narthex.dns.server.counters import (
    DURATIONS,
    SIZES,
    AnswerCounts,
    BucketCounts,
    CacheCounts,
    ResolverCounts,
    UpstreamCounts,
    sum_of,
)
from narthex.runtime.metrics import counter, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PROGRAMMING = tuple(0.001 * 2**power for power in range(20))
"""Upper bounds in seconds of the buckets of programming durations, as in CoreDNS."""
_SERVER = "dns://"
_CACHE_COUNTERS = {
    "requests": ("coredns_cache_requests", "Lookups in the cache."),
    "misses": ("coredns_cache_misses", "Lookups without a result."),
    "prefetches": ("coredns_cache_prefetch", "Prefetched responses."),
    "stale": ("coredns_cache_served_stale", "Stale responses served."),
}
"""Metrics by field of `CacheCounters`."""
_GAUGES = {
    "narthex_dns_workers": "Worker processes that answer queries.",
    "narthex_dns_services": "Services in the cache.",
    "narthex_dns_synced": "1 once all initial lists are complete.",
    "narthex_dns_heard_age_seconds": "Seconds since the last message of the slowest watch.",
}


def server_metrics(
    counts: AnswerCounts,
    resolvers: Mapping[str, ResolverCounts],
    programming: Mapping[str, BucketCounts],
    state: Mapping[str, float],
) -> Iterable[Metric]:
    """Yield the metrics of a server, for prometheus-client.

    Args:
        counts: Sums of all answers.
        resolvers: Sums of plugin chains by the first zone of their server block.
        programming: Seconds from the change of a Service's endpoints until all workers have it, by kind of Service.
        state: Number of panics, and the gauges of `_GAUGES` by name.
    """
    yield from _answer_metrics(counts)
    yield from resolver_metrics(resolvers)
    yield from _answer_histograms(counts)
    text = "Time from a change of a Service's endpoints to the change of its names."
    by_kind = {(kind,): buckets for kind, buckets in programming.items()}
    name = "coredns_kubernetes_dns_programming_duration_seconds"
    yield _histogram(name, text, PROGRAMMING, by_kind, "service_kind")
    yield counter("coredns_panics", "Workers that died.", state["panics"])
    python = ".".join(map(str, sys.version_info[:3]))
    build: dict[tuple[str, ...], float] = {(f"narthex {narthex.__version__}", "", f"python {python}"): 1.0}
    yield gauge("coredns_build_info", "Version.", build, "version", "revision", "goversion")
    yield counter("narthex_dns_lost_answers", "Responses that could not be sent.", counts.lost)
    text = "TCP connections that were closed for newer ones."
    yield counter("narthex_dns_refused_connections", text, counts.refused_connections)
    for name, text in _GAUGES.items():
        if name in state:
            yield gauge(name, text, state[name])


def _answer_metrics(counts: AnswerCounts) -> Iterable[Metric]:
    requests: Counter[tuple[str, ...]] = Counter()
    responses: Counter[tuple[str, ...]] = Counter()
    for (proto, family, zone, type_, rcode, plugin), number in counts.answers.items():
        requests[_SERVER, zone, "", proto, str(family), type_] += number
        responses[_SERVER, zone, "", rcode, plugin] += number
    labels = ("server", "zone", "view")
    yield counter("coredns_dns_requests", "Queries.", _sorted(requests), *labels, "proto", "family", "type")
    yield counter("coredns_dns_responses", "Responses.", _sorted(responses), *labels, "rcode", "plugin")


def _answer_histograms(counts: AnswerCounts) -> Iterable[Metric]:
    labels = ("server", "zone", "view")
    durations = {(_SERVER, zone, ""): buckets for zone, buckets in counts.durations.items()}
    text = "Time that the server took for a response."
    yield _histogram("coredns_dns_request_duration_seconds", text, DURATIONS, durations, *labels)
    for name, text, sizes in (
        ("coredns_dns_request_size_bytes", "Sizes of queries.", counts.request_sizes),
        ("coredns_dns_response_size_bytes", "Sizes of responses.", counts.response_sizes),
    ):
        by_labels = {(_SERVER, zone, "", proto): buckets for (proto, zone), buckets in sizes.items()}
        yield _histogram(name, text, SIZES, by_labels, *labels, "proto")


def resolver_metrics(resolvers: Mapping[str, ResolverCounts]) -> Iterable[Metric]:
    """Yield the metrics of `cache`, `forward`, and `hosts`. The keys are the first zones of server blocks."""
    yield from _cache_metrics({zone: counts.cache for zone, counts in resolvers.items() if counts.cache is not None})
    upstreams = UpstreamCounts()
    for counts in resolvers.values():
        upstreams = sum_of(upstreams, counts.upstreams)
    yield from _forward_metrics(upstreams)
    entries = [counts.hosts for counts in resolvers.values() if counts.hosts is not None]
    if entries:
        yield gauge("coredns_hosts_entries", "Entries of hosts files.", sum(entries))


def _cache_metrics(caches: Mapping[str, CacheCounts]) -> Iterable[Metric]:
    values: dict[tuple[str, ...], float]
    for make, name, text, by_half in (
        (gauge, "coredns_cache_entries", "Responses in the cache.", attrgetter("entries")),
        (counter, "coredns_cache_hits", "Responses from the cache.", attrgetter("counters.hits")),
        (counter, "coredns_cache_evictions", "Responses that were evicted.", attrgetter("counters.evictions")),
    ):
        values = {
            (_SERVER, half, zone, ""): by_half(cache)[half]
            for zone, cache in caches.items()
            for half in ("success", "denial")
        }
        yield make(name, text, values, "server", "type", "zones", "view")
    for field, (name, text) in _CACHE_COUNTERS.items():
        values = {(_SERVER, zone, ""): getattr(cache.counters, field) for zone, cache in caches.items()}
        yield counter(name, text, values, "server", "zones", "view")


def _forward_metrics(counts: UpstreamCounts) -> Iterable[Metric]:
    durations = {("forward", to, rcode): buckets for (to, rcode), buckets in counts.durations.items()}
    name, text = "coredns_proxy_request_duration_seconds", "Time that an upstream took for a response."
    yield _histogram(name, text, DURATIONS, durations, "proxy_name", "to", "rcode")
    failures = {("forward", to): number for to, number in counts.failed_checks.items()}
    text = "Failed health checks."
    yield counter("coredns_proxy_healthcheck_failures", text, _sorted(failures), "proxy_name", "to")
    for kind, name, text in (
        (True, "coredns_proxy_conn_cache_hits", "Queries on an existing connection."),
        (False, "coredns_proxy_conn_cache_misses", "Queries that needed a new connection."),
    ):
        connections = {
            ("forward", to, proto): number
            for (to, proto, reused), number in counts.connections.items()
            if reused is kind
        }
        yield counter(name, text, _sorted(connections), "proxy_name", "to", "proto")
    drops = {(reason,): number for reason, number in counts.drops.items()}
    yield counter("narthex_dns_dropped_responses", "Dropped responses of upstreams.", _sorted(drops), "reason")
    for name, text, number in (
        ("coredns_forward_healthcheck_broken", "Queries that found all upstreams down.", counts.broken),
        ("coredns_forward_max_concurrent_rejects", "Queries beyond max_concurrent.", counts.rejects),
        ("coredns_autopath_success", "Search lists that led to an answer.", counts.autopaths),
        ("narthex_dns_coalesced_questions", "Queries that waited for an equal one in flight.", counts.coalesced),
    ):
        yield counter(name, text, number)


def _sorted(values: Mapping[Any, int]) -> dict[tuple[str, ...], float]:
    return dict(sorted(values.items()))


def _histogram(
    name: str, text: str, bounds: Sequence[float], values: Mapping[Any, BucketCounts], *labels: str
) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=labels)
    ends = (*(str(float(bound)) for bound in bounds), "+Inf")
    for label_values, counts in sorted(values.items()):
        family.add_metric(list(label_values), list(zip(ends, accumulate(counts.counts), strict=True)), counts.total)
    return family
