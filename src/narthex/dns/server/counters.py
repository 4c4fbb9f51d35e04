"""Counters of a worker for CoreDNS's metrics: of all answers, and of each plugin chain.

Counting must be cheap: an answer adds 1 to a list that it shares with all answers of equal labels and sizes, and the lists
are summed up when metrics are scraped. The sums (`AnswerCounts`, `ResolverCounts`) travel to the server's main process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from narthex.dns.plugins.cache import CacheCounters, CacheHalf

DURATIONS = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
"""Upper bounds of buckets in seconds."""
SIZES = (0, 100, 200, 300, 400, 511, 1023, 2047, 4095, 8291, 16000, 32000, 48000, 64000)
"""Upper bounds of buckets in bytes, as in CoreDNS."""
_MAX_KINDS = 4096

_Counts = TypeVar("_Counts")
_Key = TypeVar("_Key")
DropReason = Literal["question", "case", "malformed"]


class AnswerLabels(msgspec.Struct, frozen=True):
    """Metric labels of a query and its answer."""

    zone: str
    type: str
    rcode: str
    plugin: str


AnswerKind = tuple[str, int, AnswerLabels, int, int]
"""Transport, family (1: IPv4, 2: IPv6), labels, and sizes of query and response in bytes."""


class BucketCounts(msgspec.Struct, array_like=True):
    """A histogram: counts by upper bound, the last one unbounded, and the sum of all values."""

    counts: list[int]
    total: float = 0.0

    def add(self, bounds: tuple[float, ...], value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(bounds, value)] += times
        self.total += value * times


def empty_buckets(bounds: tuple[float, ...]) -> BucketCounts:
    """Return a histogram without values."""
    return BucketCounts([0] * (len(bounds) + 1))


def sum_of(ours: _Counts, theirs: _Counts) -> _Counts:
    """Return the sum of two counts, of lists or dicts of counts by item, or of structs by field. None counts nothing."""
    return _sum_of(ours, theirs)  # type: ignore[no-any-return]


def _sum_of(ours: Any, theirs: Any) -> Any:
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    if isinstance(ours, dict):
        return ours | {key: _sum_of(ours.get(key), count) for key, count in theirs.items()}
    if isinstance(ours, list):
        return [_sum_of(one, two) for one, two in zip(ours, theirs, strict=True)]
    if isinstance(ours, msgspec.Struct):
        return type(ours)(
            **{name: _sum_of(getattr(ours, name), getattr(theirs, name)) for name in ours.__struct_fields__}
        )
    return ours + theirs


class AnswerCounts(msgspec.Struct):
    """Sums of all answers."""

    answers: dict[tuple[str, int, str, str, str, str], int] = {}
    """By transport, family (1 or 2), and the fields of `AnswerLabels`."""
    request_sizes: dict[tuple[str, str], BucketCounts] = {}
    """By transport and zone."""
    response_sizes: dict[tuple[str, str], BucketCounts] = {}
    durations: dict[str, BucketCounts] = {}
    """By zone."""
    lost: int = 0
    """Responses that could not be sent."""
    refused_connections: int = 0


class AnswerCounter:
    """Counts the answers of one worker."""

    def __init__(self, reset: Callable[[], object]) -> None:
        """`reset` is called when all lists handed out by `counter` become invalid."""
        self._reset = reset
        self._counters: dict[AnswerKind, list[int]] = {}
        self._counts = AnswerCounts()
        self._durations: dict[str, BucketCounts] = {}
        self.lost = 0
        self.refused_connections = 0

    def counter(self, kind: AnswerKind) -> list[int]:
        """Return the list whose only number counts answers of a kind."""
        counter = self._counters.get(kind)
        if counter is None:
            if len(self._counters) >= _MAX_KINDS:
                self._sum_up()
                self._counters.clear()
                self._reset()
            counter = self._counters[kind] = [0]
        return counter

    def observe(self, zone: str, seconds: float, answers: int) -> None:
        """Record the duration of a batch of answers, each of which took that long."""
        buckets = self._durations.get(zone)
        if buckets is None:
            buckets = self._durations[zone] = empty_buckets(DURATIONS)
        buckets.add(DURATIONS, seconds, answers)

    def take(self) -> AnswerCounts:
        """Return the sums since the last call."""
        self._sum_up()
        taken, self._counts = self._counts, AnswerCounts()
        taken.durations, self._durations = self._durations, {}
        taken.lost, self.lost = self.lost, 0
        taken.refused_connections, self.refused_connections = self.refused_connections, 0
        return taken

    def _sum_up(self) -> None:
        counts = self._counts
        for (transport, family, labels, request, response), counter in self._counters.items():
            times, counter[0] = counter[0], 0
            if not times:
                continue
            key = (transport, family, labels.zone, labels.type, labels.rcode, labels.plugin)
            counts.answers[key] = counts.answers.get(key, 0) + times
            by = (transport, labels.zone)
            for sizes, size in ((counts.request_sizes, request), (counts.response_sizes, response)):
                if by not in sizes:
                    sizes[by] = empty_buckets(SIZES)
                sizes[by].add(SIZES, size, times)


class UpstreamCounts(msgspec.Struct):
    """Sums of the queries to upstreams, which are named as in the Corefile: address and port."""

    durations: dict[tuple[str, str], BucketCounts] = {}
    """Seconds until the response, by upstream and response code."""
    failed_checks: dict[str, int] = {}
    connections: dict[tuple[str, str, bool], int] = {}
    """Queries by upstream, `udp`, `tcp` or `tcp-tls`, and whether an idle connection was reused."""
    drops: dict[str, int] = {}
    """Dropped responses, by reason."""
    coalesced: int = 0
    """Queries that waited for an equal one in flight."""
    rejects: int = 0
    """Queries beyond max_concurrent."""
    broken: int = 0
    """Queries that found all upstreams down."""
    autopaths: int = 0
    """Search lists that led to an answer (plugin autopath)."""


class UpstreamCounter:
    """Counts the queries of one plugin chain to upstreams. To reset, replace `counts`."""

    def __init__(self) -> None:
        self.counts = UpstreamCounts()

    def duration(self, upstream: str, rcode: str, seconds: float) -> None:
        """Count a response."""
        buckets = self.counts.durations.get((upstream, rcode))
        if buckets is None:
            buckets = self.counts.durations[upstream, rcode] = empty_buckets(DURATIONS)
        buckets.add(DURATIONS, seconds)

    def connection(self, upstream: str, proto: str, *, reused: bool) -> None:
        """Count a query that is sent."""
        _count(self.counts.connections, (upstream, proto, reused))

    def drop(self, reason: DropReason) -> None:
        """Count a response to another question, with another case, or malformed."""
        _count(self.counts.drops, reason)

    def failed_check(self, upstream: str) -> None:
        """Count a failed health check."""
        _count(self.counts.failed_checks, upstream)


def _count(counts: dict[_Key, int], key: _Key) -> None:
    counts[key] = counts.get(key, 0) + 1


class CacheCounts(msgspec.Struct, kw_only=True):
    """Counters of a cache, and the number of its entries."""

    counters: CacheCounters
    entries: dict[CacheHalf, int]


class ResolverCounts(msgspec.Struct, kw_only=True):
    """Sums of one server block's plugin chain. None: the server block lacks the plugin."""

    upstreams: UpstreamCounts = msgspec.field(default_factory=UpstreamCounts)
    cache: CacheCounts | None = None
    hosts: int | None = None
    """Entries of the hosts file and the Corefile."""

    def merge(self, other: ResolverCounts) -> None:
        """Add the sums of another worker. Each worker has a cache of its own; the hosts file is the same for all."""
        self.upstreams = sum_of(self.upstreams, other.upstreams)
        self.cache = sum_of(self.cache, other.cache)
        self.hosts = other.hosts if self.hosts is None else self.hosts
