"""Packets that were dropped because connection tracking calls them invalid, from the counter of the rule that does it (rows
19.8, 20.18)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from narthex.linux.clock import Clock
from narthex.linux.run import ApplyError
from narthex.model.net import IPFamily
from narthex.runtime.logs import LOGGER

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_REST = 20
"""Reading takes at most one part in this many of the time."""


class DroppedPacketCollector:
    """Asked by the status server's threads, one at a time. The rule's counter begins anew with the rule; the sum does
    not."""

    def __init__(self, readers: Mapping[IPFamily, Callable[[], int]], clock: Clock) -> None:
        """`readers`: what the rule of a family has counted, raises ApplyError. Without any there is no such number."""
        self._readers = readers
        self._clock = clock
        self._lock = threading.Lock()
        self._rested = -float("inf")
        self._last: dict[IPFamily, int] = {}
        self._total = 0
        self._failing = False

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        from prometheus_client.core import CounterMetricFamily

        if self._readers:
            with self._lock:
                self._look()
            yield CounterMetricFamily(
                "kubeproxy_iptables_ct_state_invalid_dropped_packets",
                "Packets dropped because connection tracking calls them invalid.",
                self._total,
            )

    def _look(self) -> None:
        start = self._clock.now()
        if start < self._rested:
            return
        try:
            for family, read in self._readers.items():
                now, before = read(), self._last.get(family, 0)
                self._total += now - before if now >= before else now
                self._last[family] = now
        except ApplyError as error:
            if not self._failing:
                LOGGER.warning("dropped packets are not counted for now: %s", error)
            self._failing = True
            return
        self._failing = False
        self._rested = self._clock.now() + _REST * (self._clock.now() - start)
