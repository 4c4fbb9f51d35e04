"""Numbers of `cache`, `forward` and `hosts` under CoreDNS's names (row S16)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from narthex.dns.server.meter import CacheCounts, MeterCounts, ResolverCounts
from narthex.dns.server.tally import DURATIONS, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_SERVER = "dns://"
_LABELS = ("server", "zones", "view")


def resolver_metrics(resolvers: Mapping[str, ResolverCounts]) -> Iterable[Metric]:
    """By the first zone of the server block."""
    from prometheus_client.core import GaugeMetricFamily

    yield from _cache({zone: held.cache for zone, held in resolvers.items() if held.cache is not None})
    meter = MeterCounts()
    for held in resolvers.values():
        meter.merge(held.meter)
    yield from _forward(meter)
    hosts = GaugeMetricFamily("coredns_hosts_entries", "Entries of the hosts file.")
    found = [held.hosts for held in resolvers.values() if held.hosts is not None]
    if found:
        hosts.add_metric([], sum(found))
        yield hosts


def _cache(caches: Mapping[str, CacheCounts]) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    entries = GaugeMetricFamily(
        "coredns_cache_entries", "Answers that are kept.", labels=["server", "type", *_LABELS[1:]]
    )
    hits = CounterMetricFamily(
        "coredns_cache_hits", "Answers out of the cache.", labels=["server", "type", *_LABELS[1:]]
    )
    evictions = CounterMetricFamily(
        "coredns_cache_evictions", "Answers that made room.", labels=["server", "type", *_LABELS[1:]]
    )
    single = {
        "requests": CounterMetricFamily("coredns_cache_requests", "Questions to the cache.", labels=_LABELS),
        "misses": CounterMetricFamily("coredns_cache_misses", "Questions that were not in it.", labels=_LABELS),
        "prefetches": CounterMetricFamily("coredns_cache_prefetch", "Answers renewed ahead.", labels=_LABELS),
        "stale": CounterMetricFamily("coredns_cache_served_stale", "Answers given after their time.", labels=_LABELS),
    }
    for zone, cache in caches.items():
        for half in ("success", "denial"):
            entries.add_metric([_SERVER, half, zone, ""], cache.entries[half])
            hits.add_metric([_SERVER, half, zone, ""], cache.counters.hits[half])
            evictions.add_metric([_SERVER, half, zone, ""], cache.counters.evictions[half])
        for name, family in single.items():
            family.add_metric([_SERVER, zone, ""], getattr(cache.counters, name))
    yield from (entries, hits, evictions, *single.values())


def _forward(meter: MeterCounts) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily

    yield histogram_metric(
        "coredns_proxy_request_duration_seconds",
        "What an upstream's answer took.",
        ["proxy_name", "to", "rcode"],
        DURATIONS,
        {("forward", to, code): held for (to, code), held in meter.durations.items()},
    )
    failures = CounterMetricFamily("coredns_proxy_healthcheck_failures", "Failed checks.", labels=["proxy_name", "to"])
    for to, number in sorted(meter.failed_checks.items()):
        failures.add_metric(["forward", to], number)
    connections = {
        reused: CounterMetricFamily(f"coredns_proxy_conn_cache_{word}", text, labels=["proxy_name", "to", "proto"])
        for reused, word, text in (
            (True, "hits", "Questions on a connection that was there."),
            (False, "misses", "Questions that needed a new one."),
        )
    }
    for (to, proto, reused), number in sorted(meter.connections.items()):
        connections[reused].add_metric(["forward", to, proto], number)
    drops = CounterMetricFamily("narthex_dns_dropped_responses", "Upstreams' responses not taken.", labels=["reason"])
    for reason, number in sorted(meter.drops.items()):
        drops.add_metric([reason], number)
    yield from (failures, *connections.values(), drops)
    for name, text, number in (
        ("coredns_forward_healthcheck_broken", "Questions that found all upstreams down.", meter.broken),
        ("coredns_forward_max_concurrent_rejects", "Questions beyond max_concurrent.", meter.rejects),
        ("coredns_autopath_success", "Search lists that led to an answer.", meter.autopaths),
        ("narthex_dns_coalesced_questions", "Questions that waited for an equal one.", meter.coalesced),
    ):
        counter = CounterMetricFamily(name, text)
        counter.add_metric([], number)
        yield counter


def histogram_metric(
    name: str, text: str, labels: Sequence[str], bounds: Sequence[float], held: Mapping[tuple[str, ...], Histogram]
) -> Metric:
    """A histogram by the values of its labels."""
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, text, labels=labels)
    for values, one in sorted(held.items()):
        below = 0
        buckets = []
        for bound, count in zip((*bounds, float("inf")), one.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
        family.add_metric(list(values), buckets, one.total)
    return family
