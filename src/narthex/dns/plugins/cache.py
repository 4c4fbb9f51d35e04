"""Answers kept for a while (rows S9, S10). Two halves, one for what is and one for what is not, each with its bounds.

Times are what the caller says. An answer is found by its question: name in lower case, type, class, and the bits DO and
CD, since answers with and without DNSSEC differ. It is never found by another name, whatever else it holds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import msgspec

from narthex.dns.corefile.settings import Cache as Settings
from narthex.dns.corefile.settings import Kept, Zones
from narthex.dns.interfaces import Query
from narthex.dns.message import names, wire
from narthex.dns.message.response import Answer, Shuffle, dnssec_ok

Key = tuple[bytes, int, int, bool, bool]
Half = Literal["success", "denial"]
HALVES: tuple[Half, Half] = ("denial", "success")
"""In the order in which they are looked through."""

MOST_BYTES = 16 * 1024 * 1024
"""Of messages in a half, whatever its capacity: one over TCP may have 64 KiB."""


def key(query: Query) -> Key:
    """What a question's answer is kept by."""
    return query.name, query.qtype, query.qclass, dnssec_ok(query), bool(query.flags & wire.CD)


@dataclass(slots=True)
class Item:
    """An answer that is kept."""

    answer: Answer
    stored: float
    lifetime: int
    """Seconds."""
    hits: int = 0
    last: float = -math.inf
    """When it was asked for last."""
    retry: float = -math.inf
    """Not before then it is asked for anew: the last time it failed, or it is on its way."""

    @property
    def ends(self) -> float:
        """When it is over."""
        return self.stored + self.lifetime


@dataclass(frozen=True, slots=True)
class Found:
    """An answer for a client."""

    item: Item
    ttl: int
    """For all its records; 0 when it is stale."""
    stale: bool
    refresh: bool
    """It is to be asked for anew now, behind the client's back or (`verified`) before the client gets it."""

    def to(self, query: Query, shuffle: Shuffle | None = None) -> bytes:
        """The message."""
        return self.item.answer.to(query, self.ttl, shuffle)


class Counters(msgspec.Struct):
    """What has happened, by half where it matters."""

    requests: int = 0
    misses: int = 0
    hits: dict[Half, int] = msgspec.field(default_factory=lambda: {"success": 0, "denial": 0})
    evictions: dict[Half, int] = msgspec.field(default_factory=lambda: {"success": 0, "denial": 0})
    prefetches: int = 0
    stale: int = 0
    """Stale answers given."""


class Cache:
    """One server block's cache."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._zones = _wired(settings.zones)
        self._never: dict[Half, tuple[bytes, ...]] = {
            "success": _wired(settings.no_success),
            "denial": _wired(settings.no_denial),
        }
        self._halves: dict[Half, _Half] = {"success": _Half(settings.success), "denial": _Half(settings.denial)}
        self.counters = Counters()

    @property
    def verifies(self) -> bool:
        """Whether the source is asked before a stale answer is given."""
        return self._settings.stale is not None and self._settings.stale.mode == "verified"

    def entries(self, half: Half) -> int:
        """How many answers a half holds."""
        return len(self._halves[half].items)

    def covers(self, name: bytes) -> bool:
        """Whether this name (lower case) is in one of the cache's zones."""
        return any(names.within(name, zone) for zone in self._zones)

    def find(self, wanted: Key, now: float) -> Found | None:
        """The answer to give now, if there is one."""
        self.counters.requests += 1
        for half in HALVES:
            item = self._halves[half].items.get(wanted)
            found = None if item is None else self._usable(item, now)
            if found is not None:
                self._halves[half].items.move_to_end(wanted)
                self.counters.hits[half] += 1
                self.counters.stale += found.stale
                self.counters.prefetches += found.refresh and not found.stale
                return found
        self.counters.misses += 1
        return None

    def keep(self, wanted: Key, answer: Answer, now: float) -> int | None:
        """Take an answer in, if it is one to be kept. The TTL its records now have; None: it is as it came.

        A failure never takes the place of an answer that may still be given stale; it only puts off the next attempt.
        """
        half: Half = "success" if answer.kind == "success" else "denial"
        if answer.kind == "other" or answer.truncated:
            return None
        lifetime = self._lifetime(answer)
        if lifetime <= 0 or any(names.within(wanted[0], zone) for zone in self._never[half]):
            return None
        before = self._last(wanted)
        if answer.kind == "servfail" and before is not None and self._stale_until(before) > now:
            before.retry = now + lifetime
            return None
        item = Item(answer, now, lifetime)
        if before is not None:
            item.hits, item.last = before.hits, before.last
        self._halves["denial" if half == "success" else "success"].drop(wanted)
        self.counters.evictions[half] += self._halves[half].put(wanted, item)
        return lifetime

    def failed(self, wanted: Key, now: float) -> None:
        """No answer came at all; a stale one is not asked for again at once."""
        before = self._last(wanted)
        if before is not None:
            before.retry = now + max(self._settings.servfail, 1.0)

    def _last(self, wanted: Key) -> Item | None:
        return self._halves["denial"].items.get(wanted) or self._halves["success"].items.get(wanted)

    def _usable(self, item: Item, now: float) -> Found | None:
        # Sums of a clock's seconds are not exact: seven seconds may be a little more.
        ttl = min(math.ceil(item.ends - now), item.lifetime)
        if ttl > 0:
            shown = item.lifetime if self._settings.keep_ttl else ttl
            return Found(item, shown, stale=False, refresh=self._popular(item, ttl, now))
        if self._stale_until(item) <= now:
            return None
        refresh = item.retry <= now
        if refresh:
            item.retry = now + max(self._settings.servfail, 1.0)
        return Found(item, 0, stale=True, refresh=refresh)

    def _popular(self, item: Item, ttl: int, now: float) -> bool:
        prefetch = self._settings.prefetch
        if prefetch is None:
            return False
        item.hits = item.hits + 1 if now - item.last < prefetch.window else 1
        item.last = now
        if item.hits < prefetch.amount or ttl > math.ceil(item.lifetime * prefetch.percent / 100) or item.retry > now:
            return False
        item.retry = item.ends
        return True

    def _stale_until(self, item: Item) -> float:
        stale = self._settings.stale
        if stale is None or item.answer.kind == "servfail":
            return -math.inf
        return item.ends + stale.longest

    def _lifetime(self, answer: Answer) -> int:
        if answer.kind == "servfail":
            return math.ceil(self._settings.servfail)
        kept = self._settings.success if answer.kind == "success" else self._settings.denial
        return min(max(answer.ttl, kept.least), kept.longest)


class _Half:
    """Items, the one asked for last at the end."""

    def __init__(self, bounds: Kept) -> None:
        self._capacity = bounds.capacity
        self._bytes = 0
        self.items: OrderedDict[Key, Item] = OrderedDict()

    def put(self, wanted: Key, item: Item) -> int:
        """Take an item in; how many others had to go."""
        self.drop(wanted)
        self.items[wanted] = item
        self._bytes += len(item.answer.packet)
        gone = 0
        while len(self.items) > self._capacity or self._bytes > MOST_BYTES:
            _, oldest = self.items.popitem(last=False)
            self._bytes -= len(oldest.answer.packet)
            gone += 1
        return gone

    def drop(self, wanted: Key) -> None:
        """Forget an item, if it is there."""
        item = self.items.pop(wanted, None)
        if item is not None:
            self._bytes -= len(item.answer.packet)


def _wired(zones: Zones) -> tuple[bytes, ...]:
    return tuple(names.wire(zone).lower() for zone in zones)
