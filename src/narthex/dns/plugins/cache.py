"""Plugin `cache`: responses of upstreams, with prefetch and serve-stale (rows S9, S10; RFC 8767).

Positive responses and denials are two halves with bounds of their own. The key of a response is its question: name in lower
case, type, class, and the bits DO and CD, since responses with and without DNSSEC differ. Other names that it contains do
not lead to it. The caller provides the time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Literal

import msgspec

from narthex.dns.corefile.settings import CacheBounds, CacheSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import Query
from narthex.dns.message.response import Shuffle, UpstreamResponse

CacheKey = tuple[bytes, int, int, bool, bool]
CacheHalf = Literal["success", "denial"]
CACHE_HALVES: tuple[CacheHalf, CacheHalf] = ("denial", "success")
"""In the order of the lookup."""

MAX_BYTES = 16 * 1024 * 1024
"""Limit of the messages in a half, in addition to its capacity: a response over TCP may have 64 KiB."""


def cache_key(query: Query) -> CacheKey:
    """Return the cache key of a query."""
    return query.name, query.qtype, query.qclass, query.dnssec_ok, bool(query.flags & wire.CD)


class CachedResponse(msgspec.Struct):
    """An entry of the cache."""

    response: UpstreamResponse
    stored: float
    lifetime: int
    """Seconds."""
    hits: int = 0
    last: float = -math.inf
    """Time of the last query for it."""
    retry_at: float = -math.inf
    """Time of the next refresh; it lies in the future while one is in flight or after one has failed."""

    @property
    def expires(self) -> float:
        """Time at which the entry becomes stale."""
        return self.stored + self.lifetime


class CacheHit(msgspec.Struct, frozen=True):
    """A usable entry of the cache."""

    entry: CachedResponse
    ttl: int
    """TTL for all records; 0 if the entry is stale."""
    stale: bool
    refresh: bool
    """True if the query is to be forwarded now: after the client has been answered, or before with mode `verified`."""

    def for_client(self, query: Query, shuffle: Shuffle | None = None) -> bytes:
        """Return the message."""
        return self.entry.response.for_client(query, self.ttl, shuffle)


class CacheCounters(msgspec.Struct):
    """Counters of a cache; some are by half."""

    requests: int = 0
    misses: int = 0
    hits: dict[CacheHalf, int] = msgspec.field(default_factory=lambda: {"success": 0, "denial": 0})
    evictions: dict[CacheHalf, int] = msgspec.field(default_factory=lambda: {"success": 0, "denial": 0})
    prefetches: int = 0
    stale: int = 0


class ResponseCache:
    """The cache of one server block."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._zones = names.lower_zones(settings.zones)
        self._disabled: dict[CacheHalf, tuple[bytes, ...]] = {
            "success": names.lower_zones(settings.no_success),
            "denial": names.lower_zones(settings.no_denial),
        }
        self._halves: dict[CacheHalf, _Half] = {"success": _Half(settings.success), "denial": _Half(settings.denial)}
        self.counters = CacheCounters()

    @property
    def verifies(self) -> bool:
        """True if upstreams are asked before a stale response is served."""
        return self._settings.stale is not None and self._settings.stale.verify

    def entries(self, half: CacheHalf) -> int:
        """Return the number of entries of a half."""
        return len(self._halves[half].entries)

    def covers(self, name: bytes) -> bool:
        """Return True if a name (in lower case) is in one of the zones of the cache."""
        return names.within_any(name, self._zones)

    def find(self, key: CacheKey, now: float) -> CacheHit | None:
        """Return the response to serve now, fresh or stale, or None."""
        self.counters.requests += 1
        for half in CACHE_HALVES:
            entry = self._halves[half].entries.get(key)
            hit = None if entry is None else self._usable(entry, now)
            if hit is not None:
                self._halves[half].entries.move_to_end(key)
                self.counters.hits[half] += 1
                self.counters.stale += hit.stale
                self.counters.prefetches += hit.refresh and not hit.stale
                return hit
        self.counters.misses += 1
        return None

    def store(self, key: CacheKey, response: UpstreamResponse, now: float) -> int | None:
        """Store a response if it is cacheable. Return the new TTL of its records; None: unchanged.

        A failure never replaces a response that may still be served stale; it only postpones the next attempt.
        """
        half: CacheHalf = "success" if response.kind == "success" else "denial"
        if response.kind == "other" or response.truncated:
            return None
        lifetime = self._lifetime(response)
        if lifetime <= 0 or names.within_any(key[0], self._disabled[half]):
            return None
        before = self._last(key)
        if response.kind == "servfail" and before is not None and self._stale_until(before) > now:
            before.retry_at = now + lifetime
            return None
        entry = CachedResponse(response, now, lifetime)
        if before is not None:
            entry.hits, entry.last = before.hits, before.last
        self._halves["denial" if half == "success" else "success"].remove(key)
        self.counters.evictions[half] += self._halves[half].store(key, entry)
        return lifetime

    def failed(self, key: CacheKey, now: float) -> None:
        """Postpone the next refresh of a stale response after an attempt without any response."""
        before = self._last(key)
        if before is not None:
            before.retry_at = now + max(self._settings.servfail, 1.0)

    def _last(self, key: CacheKey) -> CachedResponse | None:
        return self._halves["denial"].entries.get(key) or self._halves["success"].entries.get(key)

    def _usable(self, entry: CachedResponse, now: float) -> CacheHit | None:
        # The sum of times may be inexact, so that the rounded TTL may exceed the lifetime.
        ttl = min(math.ceil(entry.expires - now), entry.lifetime)
        if ttl > 0:
            shown = entry.lifetime if self._settings.keep_ttl else ttl
            return CacheHit(entry, shown, stale=False, refresh=self._starts_prefetch(entry, ttl, now))
        if self._stale_until(entry) <= now:
            return None
        refresh = entry.retry_at <= now
        if refresh:
            entry.retry_at = now + max(self._settings.servfail, 1.0)
        return CacheHit(entry, 0, stale=True, refresh=refresh)

    def _starts_prefetch(self, entry: CachedResponse, ttl: int, now: float) -> bool:
        prefetch = self._settings.prefetch
        if prefetch is None:
            return False
        entry.hits = entry.hits + 1 if now - entry.last < prefetch.window else 1
        entry.last = now
        due = ttl <= math.ceil(entry.lifetime * prefetch.percent / 100)
        if entry.hits < prefetch.amount or not due or entry.retry_at > now:
            return False
        entry.retry_at = entry.expires
        return True

    def _stale_until(self, entry: CachedResponse) -> float:
        stale = self._settings.stale
        if stale is None or entry.response.kind == "servfail":
            return -math.inf
        return entry.expires + stale.max_stale

    def _lifetime(self, response: UpstreamResponse) -> int:
        if response.kind == "servfail":
            return math.ceil(self._settings.servfail)
        bounds = self._settings.success if response.kind == "success" else self._settings.denial
        return min(max(response.ttl, bounds.min_ttl), bounds.max_ttl)


class _Half:
    """Entries in the order of their last use."""

    def __init__(self, bounds: CacheBounds) -> None:
        self._capacity = bounds.capacity
        self._bytes = 0
        self.entries: OrderedDict[CacheKey, CachedResponse] = OrderedDict()

    def store(self, key: CacheKey, entry: CachedResponse) -> int:
        """Store an entry and return the number of evicted ones."""
        self.remove(key)
        self.entries[key] = entry
        self._bytes += len(entry.response.packet)
        evicted = 0
        while len(self.entries) > self._capacity or self._bytes > MAX_BYTES:
            _, oldest = self.entries.popitem(last=False)
            self._bytes -= len(oldest.response.packet)
            evicted += 1
        return evicted

    def remove(self, key: CacheKey) -> None:
        """Remove the entry, if there is one, and subtract its size from the total."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry.response.packet)
