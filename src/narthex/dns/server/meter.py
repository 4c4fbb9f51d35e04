"""What a worker's resolver counts, for CoreDNS's metrics of `cache` and `forward`. Travels between processes."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from narthex.dns.plugins.cache import Counters, Half
from narthex.dns.server.tally import DURATIONS, Histogram, histogram

_Key = TypeVar("_Key")
Drop = Literal["question", "case", "malformed"]


class MeterCounts(msgspec.Struct):
    """Counters of a while. Upstreams are named as in the Corefile: address and port."""

    durations: dict[tuple[str, str], Histogram] = {}
    """Seconds until an answer, by upstream and response code."""
    failed_checks: dict[str, int] = {}
    """Health checks that failed, by upstream."""
    connections: dict[tuple[str, str, bool], int] = {}
    """Questions by upstream, `udp`, `tcp` or `tcp-tls`, and whether the connection was there already."""
    drops: dict[str, int] = {}
    """Responses that were not taken, by reason."""
    coalesced: int = 0
    """Questions that waited for an equal one instead of going out."""
    rejects: int = 0
    """Questions beyond max_concurrent."""
    broken: int = 0
    """Questions that found all upstreams down."""
    autopaths: int = 0
    """Search lists that led to an answer."""

    def merge(self, other: MeterCounts) -> None:
        """Take in all of another one."""
        for key, held in other.durations.items():
            if key in self.durations:
                self.durations[key].merge(held)
            else:
                self.durations[key] = Histogram(list(held.counts), held.total)
        _add(self.failed_checks, other.failed_checks)
        _add(self.connections, other.connections)
        _add(self.drops, other.drops)
        self.coalesced += other.coalesced
        self.rejects += other.rejects
        self.broken += other.broken
        self.autopaths += other.autopaths


def _add(ours: dict[_Key, int], theirs: dict[_Key, int]) -> None:
    for key, count in theirs.items():
        ours[key] = ours.get(key, 0) + count


class Meter:
    """Counts for one resolver. Whoever takes `counts` puts new ones in their place."""

    def __init__(self) -> None:
        self.counts = MeterCounts()

    def duration(self, upstream: str, code: str, seconds: float) -> None:
        """An answer came."""
        held = self.counts.durations.get((upstream, code))
        if held is None:
            held = self.counts.durations[upstream, code] = histogram(DURATIONS)
        held.add(DURATIONS, seconds)

    def connection(self, upstream: str, proto: str, *, reused: bool) -> None:
        """A question goes out."""
        _add(self.counts.connections, {(upstream, proto, reused): 1})

    def drop(self, reason: Drop) -> None:
        """A response is thrown away: not to this question, in another case, or broken."""
        _add(self.counts.drops, {str(reason): 1})

    def failed_check(self, upstream: str) -> None:
        """A health check failed."""
        _add(self.counts.failed_checks, {upstream: 1})

    def coalesced(self) -> None:
        """A question waits for an equal one."""
        self.counts.coalesced += 1


class CacheCounts(msgspec.Struct, kw_only=True):
    """What a cache has done, and how many answers it holds."""

    counters: Counters
    entries: dict[Half, int]


class ResolverCounts(msgspec.Struct, kw_only=True):
    """All of one server block's resolver. None: the plugin is not there."""

    meter: MeterCounts = msgspec.field(default_factory=MeterCounts)
    cache: CacheCounts | None = None
    hosts: int | None = None
    """Entries of the hosts file and the Corefile."""

    def merge(self, other: ResolverCounts) -> None:
        """Take in those of another worker. Caches are each worker's own, and their entries add up; the hosts file is
        the same for all."""
        self.meter.merge(other.meter)
        self.hosts = other.hosts if self.hosts is None else self.hosts
        if other.cache is None:
            return
        if self.cache is None:
            self.cache = other.cache
            return
        ours, theirs = self.cache.counters, other.cache.counters
        _add(self.cache.entries, other.cache.entries)
        _add(ours.hits, theirs.hits)
        _add(ours.evictions, theirs.evictions)
        for name in ("requests", "misses", "prefetches", "stale"):
            setattr(ours, name, getattr(ours, name) + getattr(theirs, name))
