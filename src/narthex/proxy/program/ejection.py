"""Passive ejection while the proxy runs: takes in what was observed of connections, and reduces the plans that sockets follow.

Everything is called by the loop. Whatever the kernel refuses, all endpoints stay in use; the reason is logged and shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from narthex.kube.events import ClusterEvent, endpoint_ejected, endpoint_returned
from narthex.linux.bpf import BpfError
from narthex.model import IPFamily, NamespacedName, ServicePortName, Snapshot, join_port
from narthex.proxy.backends.sockets.layout import WatchFlag
from narthex.proxy.kernel.connect_observer import ConnectObserver, ObserverUnavailableError
from narthex.proxy.plan.ejection import EjectionFilter, EjectionPolicy, EndpointAddress, EndpointEjector, EndpointState
from narthex.proxy.plan.ir import Plan
from narthex.runtime.logs import LOGGER, data
from narthex.runtime.metrics import counter, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from narthex.proxy.kernel.sockets import SocketTarget

_PAUSE = 0.02
"""Seconds between two readings, so that many failures cost little."""

OutByPort = Mapping[ServicePortName, frozenset[EndpointAddress]]
"""Endpoints that Service ports lack."""


class EjectionReporter:
    """Reports each endpoint of a Service port that is ejected, and its return, once in the log and as an Event.

    A trial is no return: the endpoint has returned once a connection was made, or once the Service no longer has it.
    """

    def __init__(self, record: Callable[[ClusterEvent], object], snapshot: Callable[[], Snapshot]) -> None:
        self._record = record
        self._snapshot = snapshot
        self._reported: dict[IPFamily, set[tuple[ServicePortName, EndpointAddress]]] = {}

    def update(self, family: IPFamily, out: OutByPort, suspects: Iterable[EndpointAddress]) -> None:
        """Report what changed. `suspects` are the endpoints that are out, on trial, or had failures."""
        known = set(suspects)
        reported = self._reported.setdefault(family, set())
        for name, endpoint in sorted(reported, key=str):
            if endpoint not in known:
                reported.discard((name, endpoint))
                note = f"endpoint {join_port(*endpoint)} of port {name} gets new connections from this node again"
                LOGGER.info("%s", note, extra=data(object=f"Service {name.service}"))
                self._record(endpoint_returned(name.service, self._uid(name.service), note))
        for name, endpoints in out.items():
            for endpoint in sorted(endpoints):
                if (name, endpoint) not in reported:
                    reported.add((name, endpoint))
                    note = (
                        f"endpoint {join_port(*endpoint)} of port {name} gets no new connections from sockets of this node, since "
                        "several clients failed to connect to it; check its pod, and network policies on the way"
                    )
                    LOGGER.warning("%s", note, extra=data(object=f"Service {name.service}"))
                    self._record(endpoint_ejected(name.service, self._uid(name.service), note))

    def _uid(self, name: NamespacedName) -> str:
        service = self._snapshot().services.get(name)
        return service.uid if service is not None else ""


class PassiveEjection:
    """The ejectors and filters of both families, fed by the observer of one cgroup."""

    def __init__(
        self, reporter: EjectionReporter, watch_files: Callable[[Iterable[int]], object], policy: EjectionPolicy
    ) -> None:
        """Prepare; nothing is observed yet.

        Args:
            reporter: Receives what is ejected.
            watch_files: Has the loop take a turn when one of the files is readable.
            policy: When endpoints are ejected.
        """
        self._reporter = reporter
        self._watch_files = watch_files
        self._observer: ConnectObserver | None = None
        self._ejectors = {family: EndpointEjector(policy) for family in IPFamily}
        self._filters = {family: EjectionFilter() for family in IPFamily}
        self._watched: dict[IPFamily, dict[EndpointAddress, WatchFlag]] = {family: {} for family in IPFamily}
        """What this process has written to the maps."""
        self._touched: dict[IPFamily, set[EndpointAddress]] = {family: set() for family in IPFamily}
        """Endpoints whose element in the map a program may have changed since."""
        self._resume = 0.0
        self.reason = "no sockets are balanced yet"
        """Why nothing is observed; empty if it is."""
        self.out: dict[IPFamily, OutByPort] = {}
        """Endpoints that get no new sockets, by Service port."""

    def start(self, target: SocketTarget) -> None:
        """Observe the sockets of a target, whose programs are attached. Errors are logged, never raised."""
        if self._observer is not None or not self.reason:
            return
        try:
            self._observer = ConnectObserver(target)
        except ObserverUnavailableError as error:
            if self.reason != str(error):
                LOGGER.warning("passive ejection of endpoints stays off: %s; all endpoints stay in use", error)
            self.reason = str(error)
            return
        LOGGER.info("passive ejection of endpoints is on")
        self.reason = ""

    def take_in(self, now: float) -> float:
        """Take in what was observed, and end what is over. Return the seconds until the next call without an observation."""
        if self._observer is None:
            return math.inf
        if now >= self._resume:
            seen, complete = self._observer.read()
            for family, each in seen:
                self._ejectors[family].observe(each)
                self._touched[family].add(each.endpoint)
            if not complete:
                for ejector in self._ejectors.values():
                    ejector.doubt()
            self._watch_files(() if seen else (self._observer.fileno(),))
            self._resume = now + _PAUSE if seen else 0.0
        for ejector in self._ejectors.values():
            ejector.advance(now)
        due = [due - now for ejector in self._ejectors.values() if (due := ejector.due()) is not None]
        return max(0.0, min([*due, self._resume - now if self._resume > now else math.inf]))

    def reduced(self, plan: Plan) -> Plan:
        """Return a plan without ejected endpoints, and have the program watch those that may return."""
        family = plan.family
        ejector, ejections = self._ejectors[family], self._filters[family]
        made = ejections.apply(plan, ejector.ejected)
        gone = set(ejector.ejected) - ejections.present
        if gone:
            # Another pod may get the address.
            ejector.keep_only(set(ejector.suspects) - gone)
        self._watch(family)
        if self.out.get(family, {}) or ejections.out:
            self.out[family] = ejections.out
        self._reporter.update(family, ejections.out, ejector.suspects)
        return made

    def _watch(self, family: IPFamily) -> None:
        """Bring the watched endpoints to what the ejector has to know."""
        if self._observer is None:
            return
        ejector, known, touched = self._ejectors[family], self._watched[family], self._touched[family]
        out = frozenset().union(*self._filters[family].out.values())
        desired = {
            endpoint: (WatchFlag.EJECTED if endpoint in out else WatchFlag(0))
            | (WatchFlag.ON_TRIAL if ejector.state(endpoint) is EndpointState.TRIAL else WatchFlag(0))
            for endpoint in ejector.suspects
        }
        try:
            for endpoint in known.keys() | touched:
                if endpoint not in desired:
                    self._observer.forget(family, endpoint)
            for endpoint, flags in desired.items():
                if endpoint in touched or known.get(endpoint) != flags:
                    self._observer.watch(family, endpoint, flags)
        except BpfError as error:
            LOGGER.warning("endpoints cannot be watched: %s; those that are ejected may return late", error)
        self._watched[family] = desired
        touched.clear()

    @property
    def status(self) -> dict[str, Any]:
        """The state, as the status port shows it."""
        return {
            "active": not self.reason,
            "reason": self.reason,
            "ejected": {
                str(name): sorted(join_port(*endpoint) for endpoint in endpoints)
                for out in list(self.out.values())
                for name, endpoints in out.items()
            },
        }

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus-client."""
        text = "1 if failed connections are observed and may eject endpoints; the reason is given if not."
        yield gauge("narthex_endpoint_ejection", text, {self.reason: int(not self.reason)}, "reason")
        text = "Ejections of endpoints that connections failed to reach, again after each trial that failed."
        ejections = {family.label: ejector.ejections for family, ejector in self._ejectors.items()}
        yield counter("narthex_endpoint_ejections", text, ejections, "ip_family")
        text = "Endpoints that get no new connections from sockets of this node, by Service port."
        now: dict[tuple[str, ...], float] = {
            (name.service.namespace, name.service.name, name.port): len(endpoints)
            for out in list(self.out.values())
            for name, endpoints in out.items()
        }
        yield gauge("narthex_ejected_endpoints", text, now, "namespace", "service", "port")

    def close(self) -> None:
        """Stop observing."""
        self._watch_files(())
        if self._observer is not None:
            self._observer.close()
            self._observer = None
