"""New connections per Service port and per endpoint, from the kernel's own counters, read when somebody asks.

Counters of the kernel come and go with rules. Sums are kept here, so that what is shown only ever grows while a Service
port or an endpoint stays. What a counter has counted between the last look and its end is lost; nothing is counted twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from narthex.apps.logs import LOGGER
from narthex.backends.base import ApplyError
from narthex.host.clock import Clock
from narthex.host.counters import Reader
from narthex.model.names import ServicePortName
from narthex.model.net import IPFamily, join_port
from narthex.plan.ir import Plan
from narthex.sources.proxy_configuration import OwnConfiguration

if TYPE_CHECKING:
    from prometheus_client.core import Metric

REST = 20
"""Reading takes at most one part in this many of the time; who asks more often gets what was read last."""

_LABELS = ["namespace", "service", "port", "protocol", "ip_family"]
_EndpointOf = tuple[ServicePortName, tuple[str, int]]


class _Family:
    """Sums of one family, for what its plan still has."""

    def __init__(self) -> None:
        self.last: dict[Hashable, int] = {}
        """What each counter showed at the last look."""
        self.services: Counter[ServicePortName] = Counter()
        self.endpoints: Counter[_EndpointOf] = Counter()
        self.based = False
        """There was a look. What rules of an earlier process have counted before it is not news."""
        self.failing = False


class Connections:
    """Asked by the status server's threads, one at a time."""

    def __init__(
        self,
        readers: Mapping[IPFamily, Reader],
        plans: Callable[[], Sequence[Plan]],
        clock: Clock,
        told: OwnConfiguration,
    ) -> None:
        """`plans`: those in force. `told` may be replaced at any time."""
        self._readers = readers
        self._plans = plans
        self._clock = clock
        self.told = told
        self._families = {family: _Family() for family in readers}
        self._lock = threading.Lock()
        self._rested = -float("inf")

    def look(self) -> None:
        """Read the counters, unless the last look was a moment ago."""
        with self._lock:
            if self.told.connection_metrics == "off" or self._clock.now() < self._rested:
                return
            start = self._clock.now()
            for plan in self._plans():
                if plan.family in self._readers:
                    self._read(plan)
            now = self._clock.now()
            self._rested = now + REST * (now - start)

    def _read(self, plan: Plan) -> None:
        state = self._families[plan.family]
        try:
            found = list(self._readers[plan.family](plan))
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
            last[key] = connections
            before = state.last.get(key, 0 if state.based else connections)
            fresh = connections - before if connections >= before else connections
            if endpoint is None:
                services[name] += fresh
            else:
                endpoints[name, endpoint] += fresh
        state.services = Counter({name: fresh + state.services[name] for name, fresh in services.items()})
        state.endpoints = Counter({each: fresh + state.endpoints[each] for each, fresh in endpoints.items()})
        state.last, state.based = last, True

    def collect(self) -> Iterable[Metric]:
        """For prometheus-client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self.look()
        told = self.told
        if told.connection_metrics == "off":
            return
        families = [(family.label, state) for family, state in self._families.items()]
        services = [(name, label, count) for label, state in families for name, count in state.services.items()]
        endpoints = [(each, label, count) for label, state in families for each, count in state.endpoints.items()]
        shown = told.connection_series
        # Half a list of endpoints would mislead: all of them are shown or none.
        every = told.connection_metrics == "endpoints" and len(services) + len(endpoints) <= shown
        left_out = max(0, len(services) - shown)
        if told.connection_metrics == "endpoints" and not every:
            left_out += len(endpoints)
        counter = CounterMetricFamily(
            "narthex_service_new_connections", "New connections to a Service port.", labels=_LABELS
        )
        for name, label, count in sorted(services, key=lambda each: (each[0].sort_key, each[1]))[:shown]:
            counter.add_metric(_labels(name, label), count)
        yield counter
        if every:
            counter = CounterMetricFamily(
                "narthex_endpoint_new_connections",
                "New connections sent to an endpoint of a Service port.",
                labels=[*_LABELS, "endpoint"],
            )
            for (name, (address, port)), label, count in endpoints:
                counter.add_metric([*_labels(name, label), join_port(address, port)], count)
            yield counter
        yield GaugeMetricFamily(
            "narthex_connection_series_left_out", "Numbers that connectionSeries leaves no room for.", left_out
        )


def _labels(name: ServicePortName, family: str) -> list[str]:
    return [name.service.namespace, name.service.name, name.port, name.protocol.value, family]
