"""Metrics from counters in the kernel: new connections per Service port and endpoint, and dropped invalid packets.

The counters are read when the metrics are scraped. Kernel counters come and go with rules; the sums here only grow
while a Service port or endpoint exists. What a counter counts between its last read and its removal is lost; nothing is
counted twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from narthex.linux.clock import Clock
from narthex.model import IPFamily, ServicePortName, join_port
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.kernel.dataplanes import CounterReader
from narthex.proxy.plan.ir import Plan
from narthex.runtime.configuration.values import OwnConfiguration
from narthex.runtime.logs import LOGGER
from narthex.runtime.metrics import counter, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

READ_SHARE = 20
"""Reading takes at most 1/20 of the time. More frequent scrapes get the values of the last read."""

_LABELS = ["namespace", "service", "port", "protocol", "ip_family"]
_EndpointOf = tuple[ServicePortName, tuple[str, int]]


class _Family:
    """Sums of one family, for the Service ports of its plan."""

    def __init__(self) -> None:
        self.last: dict[Hashable, int] = {}
        """What each counter showed at the last look."""
        self.services: Counter[ServicePortName] = Counter()
        self.endpoints: Counter[_EndpointOf] = Counter()
        self.based: frozenset[bool] = frozenset()
        """False: Service ports have been looked at, True: endpoints. What their rules have counted before that, in an
        earlier process perhaps, is not news."""
        self.failing = False


class ConnectionCollector:
    """Collects new connections. Called by threads of the status server; serialized by a lock."""

    def __init__(
        self,
        readers: Mapping[IPFamily, CounterReader],
        plans: Callable[[], Sequence[Plan]],
        clock: Clock,
        configuration: OwnConfiguration,
    ) -> None:
        """Create the collector. `plans` returns those in force; `configuration` may be replaced at any time."""
        self._readers = readers
        self._plans = plans
        self._clock = clock
        self.configuration = configuration
        self._families = {family: _Family() for family in readers}
        self._lock = threading.Lock()
        self._next_read = -float("inf")
        self._left_out = 0

    def look(self) -> None:
        """Read the counters, unless they were read a moment ago."""
        with self._lock:
            configuration = self.configuration
            if configuration.connection_metrics == "off" or self._clock.now() < self._next_read:
                return
            start = self._clock.now()
            plans = [plan for plan in self._plans() if plan.family in self._readers]
            services, endpoints = sum(len(plan.services) for plan in plans), 0
            if configuration.connection_metrics == "endpoints":
                endpoints = sum(service.endpoint_count for plan in plans for service in plan.services.values())
            # Half a list of endpoints would mislead: all of them are shown or none, and then they are not read either.
            every = 0 < endpoints <= configuration.connection_series - services
            self._left_out = max(0, services - configuration.connection_series) + (0 if every else endpoints)
            for plan in plans:
                self._read(plan, every)
            now = self._clock.now()
            self._next_read = now + READ_SHARE * (now - start)

    def _read(self, plan: Plan, every: bool) -> None:
        state = self._families[plan.family]
        try:
            found = list(self._readers[plan.family](plan, every))
        except ApplyError as error:
            if not state.failing:
                LOGGER.warning("new connections are not counted for now: %s", error)
            state.failing = True
            return
        state.failing = False
        last: dict[Hashable, int] = {}
        services: Counter[ServicePortName] = Counter()
        endpoints: Counter[_EndpointOf] = Counter()
        for key, name, endpoint, connections in found:
            if endpoint is not None and not every:
                continue
            last[key] = connections
            known = (endpoint is not None) in state.based
            before = state.last.get(key, 0 if known else connections)
            fresh = connections - before if connections >= before else connections
            if endpoint is None:
                services[name] += fresh
            else:
                endpoints[name, endpoint] += fresh
        state.services = Counter({name: fresh + state.services[name] for name, fresh in services.items()})
        state.endpoints = Counter({each: fresh + state.endpoints[each] for each, fresh in endpoints.items()})
        state.last, state.based = last, frozenset((False, every))

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        self.look()
        configuration = self.configuration
        if configuration.connection_metrics == "off":
            return
        families = [(family.label, state) for family, state in self._families.items()]
        services = [(name, label, count) for label, state in families for name, count in state.services.items()]
        services.sort(key=lambda each: (each[0].sort_key, each[1]))
        counts = {_labels(name, label): count for name, label, count in services[: configuration.connection_series]}
        yield counter("narthex_service_new_connections", "New connections to a Service port.", counts, *_LABELS)
        endpoints = {
            (*_labels(name, label), join_port(*place)): count
            for label, state in families
            for (name, place), count in state.endpoints.items()
        }
        if endpoints:
            text = "New connections sent to an endpoint of a Service port."
            yield counter("narthex_endpoint_new_connections", text, endpoints, *_LABELS, "endpoint")
        text = "Numbers that connectionSeries leaves no room for."
        yield gauge("narthex_connection_series_left_out", text, self._left_out)


def _labels(name: ServicePortName, family: str) -> tuple[str, ...]:
    return *name.service, name.port, name.protocol.value, family


class DroppedPacketCollector:
    """Collects packets dropped because connection tracking considers them invalid (rows 19.8, 20.18).

    The sum survives when the counter of the rule restarts. Called by threads of the status server; serialized by a
    lock.
    """

    def __init__(self, readers: Mapping[IPFamily, Callable[[], int]], clock: Clock) -> None:
        """Create the collector; without readers there is no such metric. Readers raise ApplyError."""
        self._readers = readers
        self._clock = clock
        self._lock = threading.Lock()
        self._next_read = -float("inf")
        self._last: dict[IPFamily, int] = {}
        self._total = 0
        self._failing = False

    def collect(self) -> Iterable[Metric]:
        """Yield the metric for prometheus-client."""
        if self._readers:
            with self._lock:
                self._look()
            text = "Packets dropped because connection tracking calls them invalid."
            yield counter("kubeproxy_iptables_ct_state_invalid_dropped_packets", text, self._total)

    def _look(self) -> None:
        start = self._clock.now()
        if start < self._next_read:
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
        self._next_read = self._clock.now() + READ_SHARE * (self._clock.now() - start)
