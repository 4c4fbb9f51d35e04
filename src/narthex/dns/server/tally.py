"""What a worker counts, cheaply: one list per kind of answer, added up when somebody looks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

import msgspec

from narthex.dns.dispatcher import Labels

DURATIONS = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048)
"""Upper bounds in seconds."""
SIZES = (0, 100, 200, 300, 400, 511, 1023, 2047, 4095, 8291, 16000, 32000, 48000, 64000)
"""Upper bounds in bytes, CoreDNS's."""
_MOST_KINDS = 4096

K = TypeVar("K")
Kind = tuple[str, int, Labels, int, int]
"""Transport, family (1: IPv4, 2: IPv6), labels, bytes of the question, bytes of the answer."""


class Histogram(msgspec.Struct, array_like=True):
    """Counts by upper bound, the last of them without one; and the sum of what was measured."""

    counts: list[int]
    total: float = 0.0

    def add(self, bounds: tuple[float, ...], value: float, times: int = 1) -> None:
        """Take in a value."""
        self.counts[bisect_left(bounds, value)] += times
        self.total += value * times

    def merge(self, other: Histogram) -> None:
        """Take in all of another one of the same bounds."""
        self.counts = [one + two for one, two in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


def histogram(bounds: tuple[float, ...]) -> Histogram:
    """An empty one."""
    return Histogram([0] * (len(bounds) + 1))


class Counts(msgspec.Struct):
    """What has happened. Labels are transport, family (1 or 2), and those of `desk.Labels`."""

    answers: dict[tuple[str, int, str, str, str, str], int] = {}
    """By transport, family, zone, type, code and plugin."""
    request_sizes: dict[tuple[str, str], Histogram] = {}
    """By transport and zone."""
    response_sizes: dict[tuple[str, str], Histogram] = {}
    durations: dict[str, Histogram] = {}
    """By zone."""
    lost: int = 0
    """Answers that could not be sent."""
    refused_connections: int = 0

    def merge(self, other: Counts) -> None:
        """Take in all of another one."""
        for key, count in other.answers.items():
            self.answers[key] = self.answers.get(key, 0) + count
        _merge(self.request_sizes, other.request_sizes)
        _merge(self.response_sizes, other.response_sizes)
        _merge(self.durations, other.durations)
        self.lost += other.lost
        self.refused_connections += other.refused_connections


def _merge(ours: dict[K, Histogram], theirs: dict[K, Histogram]) -> None:
    for key, held in theirs.items():
        if key in ours:
            ours[key].merge(held)
        else:
            ours[key] = Histogram(list(held.counts), held.total)


class Tally:
    """One worker's counts."""

    def __init__(self, full: Callable[[], object]) -> None:
        """`full` is called when there are too many kinds: everybody has to drop the counters handed out."""
        self._full = full
        self._counters: dict[Kind, list[int]] = {}
        self._counts = Counts()
        self._pace: dict[str, Histogram] = {}
        self.lost = 0
        self.refused_connections = 0

    def counter(self, kind: Kind) -> list[int]:
        """What to count a kind of answer with: add to its only number."""
        held = self._counters.get(kind)
        if held is None:
            if len(self._counters) >= _MOST_KINDS:
                self._fold()
                self._counters.clear()
                self._full()
            held = self._counters[kind] = [0]
        return held

    def took(self, zone: str, seconds: float, answers: int) -> None:
        """So many answers took so long, together and therefore each."""
        held = self._pace.get(zone)
        if held is None:
            held = self._pace[zone] = histogram(DURATIONS)
        held.add(DURATIONS, seconds, answers)

    def take(self) -> Counts:
        """What has happened since the last call."""
        self._fold()
        taken, self._counts = self._counts, Counts()
        taken.durations, self._pace = self._pace, {}
        taken.lost, self.lost = self.lost, 0
        taken.refused_connections, self.refused_connections = self.refused_connections, 0
        return taken

    def _fold(self) -> None:
        counts = self._counts
        for (transport, family, labels, request, response), counter in self._counters.items():
            times, counter[0] = counter[0], 0
            if not times:
                continue
            key = (transport, family, *labels)
            counts.answers[key] = counts.answers.get(key, 0) + times
            where = (transport, labels.zone)
            for sizes, size in ((counts.request_sizes, request), (counts.response_sizes, response)):
                if where not in sizes:
                    sizes[where] = histogram(SIZES)
                sizes[where].add(SIZES, size, times)
