"""Passive ejection: endpoints that connections fail to reach get no new ones from this node for a limited time.

`EndpointEjector` decides from observations which endpoints are ejected; `EjectionFilter` applies that to plans. The policy is
cautious, since a healthy endpoint must never be ejected because of lost packets:

* Only failures in a row count, of several clients, within a window. One connection that is made resets the count.
* A pool never loses more than half of its endpoints, and never its last one.
* An ejected endpoint returns on trial: as soon as one connection goes to it, it is out again until the outcome is known.
* Each further ejection without success in between lasts twice as long.

    IN_USE ─ failures ─> EJECTED ─ time ─> TRIAL ─ a connection starts ─> AWAITED
       ^                    ^                                              │  │
       └────── connected ───┼──────────────────────────────────────────────┘  │
                            └────────────────── failed ───────────────────────┘
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import msgspec
from immutables import Map

from narthex.model import Protocol, ServicePortName
from narthex.proxy.plan.ir import Lineage, Plan, Pool, ServicePlan

EndpointAddress = tuple[str, int]
"""Address and port."""


class ConnectEvent(enum.Enum):
    """What happened to a connection."""

    STARTED = "started"
    """The first packet is sent."""
    CONNECTED = "connected"
    FAILED = "failed"
    """It was refused, or the first packet had no answer in time. Reported once for a connection, which may still succeed."""


class ConnectObservation(NamedTuple):
    """One observation, in the order of time."""

    time: float
    """Seconds of a clock that never goes back."""
    endpoint: EndpointAddress
    client: str
    """Identifies the sender: its network namespace, or its address."""
    event: ConnectEvent


class EjectionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When endpoints are ejected, and for how long."""

    failures: int = 5
    """In a row. With 1 % loss in each direction, the probability of five is 1 in 300 million."""
    clients: int = 2
    """Least number of clients that these failures are of."""
    window_seconds: float = 10.0
    """Older failures do not count."""
    ejected_seconds: float = 10.0
    """Duration of the first ejection."""
    longest_seconds: float = 300.0
    awaited_seconds: float = 5.0
    """Time for the outcome of a trial; then the endpoint is ejected for as long as before."""


class EndpointState(enum.Enum):
    """State of an endpoint. It gets new connections in IN_USE and TRIAL."""

    IN_USE = "in use"
    EJECTED = "ejected"
    TRIAL = "trial"
    AWAITED = "awaited"


class _Held(msgspec.Struct):
    """What is known of an endpoint that had failures."""

    state: EndpointState = EndpointState.IN_USE
    failures: list[tuple[float, str]] = []
    """Time and client of failures in a row."""
    until: float = 0.0
    """End of the present state, EJECTED or AWAITED."""
    seconds: float = 0.0
    """Duration of the last ejection."""


class EndpointEjector:
    """Decides which endpoints are ejected. `now` is the time of the clock of the observations."""

    def __init__(self, policy: EjectionPolicy) -> None:
        self._policy = policy
        self._held: dict[EndpointAddress, _Held] = {}
        """Endpoints that had failures, in the order of their first one."""
        self.ejections = 0
        """How often an endpoint was ejected, also again after a trial."""

    def state(self, endpoint: EndpointAddress) -> EndpointState:
        """Return the state of an endpoint."""
        held = self._held.get(endpoint)
        return held.state if held is not None else EndpointState.IN_USE

    @property
    def ejected(self) -> tuple[EndpointAddress, ...]:
        """The endpoints that should get no new connections, those with the oldest failures first."""
        return tuple(
            endpoint
            for endpoint, held in self._held.items()
            if held.state in (EndpointState.EJECTED, EndpointState.AWAITED)
        )

    @property
    def suspects(self) -> tuple[EndpointAddress, ...]:
        """The endpoints of which any connection that is made or fails may change the state."""
        return tuple(self._held)

    def observe(self, seen: ConnectObservation) -> bool:
        """Take in an observation. Returns True if the state of its endpoint changed."""
        held = self._held.get(seen.endpoint)
        if held is None:
            if seen.event is not ConnectEvent.FAILED:
                return False
            held = self._held[seen.endpoint] = _Held()
        before = held.state
        if seen.event is ConnectEvent.CONNECTED:
            # Proof that the endpoint works, also while its pool cannot spare it.
            del self._held[seen.endpoint]
            return before is not EndpointState.IN_USE
        if seen.event is ConnectEvent.STARTED:
            if before is EndpointState.TRIAL:
                held.state, held.until = EndpointState.AWAITED, seen.time + self._policy.awaited_seconds
        elif before is EndpointState.IN_USE:
            self._count(held, seen)
        elif before in (EndpointState.TRIAL, EndpointState.AWAITED):
            self._eject(held, seen.time, min(held.seconds * 2, self._policy.longest_seconds))
        return held.state is not before

    def advance(self, now: float) -> bool:
        """End states whose time is over, and forget what no longer counts. Returns True if a state changed.

        That is failures older than the window, and a trial to which no client connects for as long as the longest ejection.
        """
        before = len(self._held)
        self._held = {endpoint: held for endpoint, held in self._held.items() if not self._is_over(held, now)}
        changed = len(self._held) != before
        for held in self._held.values():
            if held.state is EndpointState.EJECTED and now >= held.until:
                held.state, changed = EndpointState.TRIAL, True
            elif held.state is EndpointState.AWAITED and now >= held.until:
                self._eject(held, now, held.seconds)
                changed = True
        return changed

    def _is_over(self, held: _Held, now: float) -> bool:
        if held.failures:
            return held.failures[-1][0] <= now - self._policy.window_seconds
        return held.state is EndpointState.TRIAL and now >= held.until + self._policy.longest_seconds

    def due(self) -> float | None:
        """Return the time at which `advance` has something to do; None if there is nothing."""
        timed = (EndpointState.EJECTED, EndpointState.AWAITED)
        return min((held.until for held in self._held.values() if held.state in timed), default=None)

    def doubt(self) -> None:
        """Forget failures in a row, since connections that were made may not have been observed."""
        self._held = {endpoint: held for endpoint, held in self._held.items() if not held.failures}

    def keep_only(self, endpoints: Iterable[EndpointAddress]) -> None:
        """Forget all endpoints except these, which the plan still has."""
        present = set(endpoints)
        self._held = {endpoint: held for endpoint, held in self._held.items() if endpoint in present}

    def _count(self, held: _Held, seen: ConnectObservation) -> None:
        oldest = seen.time - self._policy.window_seconds
        recent = [failure for failure in held.failures if failure[0] > oldest]
        recent.append((seen.time, seen.client))
        held.failures = recent[-_MOST_FAILURES:]
        clients = {client for _, client in held.failures}
        if len(recent) >= self._policy.failures and len(clients) >= self._policy.clients:
            self._eject(held, seen.time, self._policy.ejected_seconds)

    def _eject(self, held: _Held, now: float, seconds: float) -> None:
        held.state, held.seconds, held.until = EndpointState.EJECTED, seconds, now + seconds
        held.failures = []
        self.ejections += 1


_MOST_FAILURES = 64
"""Failures of one endpoint that are kept. One client may cause any number of them."""


def without_ejected(service: ServicePlan, ejected: Sequence[EndpointAddress]) -> ServicePlan:
    """Return a Service port whose pools lack ejected endpoints: at most half of each, the first in `ejected` before others.

    Returns the identical object if no pool has any of them, or if it is no port of TCP, in which alone failures are observed.
    Established connections are not affected.
    """
    if service.name.protocol is not Protocol.TCP:
        return service
    cluster, local = _reduced(service.cluster, ejected), _reduced(service.local, ejected)
    if cluster is service.cluster and local is service.local:
        return service
    return msgspec.structs.replace(service, cluster=cluster, local=local)


def _reduced(pool: Pool | None, ejected: Sequence[EndpointAddress]) -> Pool | None:
    if pool is None or not ejected:
        return pool
    members = {(each.address, each.port) for each in pool.endpoints}
    out = set([each for each in dict.fromkeys(ejected) if each in members][: len(pool.endpoints) // 2])
    if not out:
        return pool
    kept = tuple([each for each in pool.endpoints if (each.address, each.port) not in out])
    return Pool(endpoints=kept, reason=f"{pool.reason}; {len(out)} ejected after failed connections")


class EjectionFilter:
    """Applies ejections to the successive plans of one family.

    A plan without ejected endpoints, and every Service port without, stays the identical object. Between two calls with the same
    ejections only Service ports that differ are looked at.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._ejected: tuple[EndpointAddress, ...] = ()
        self._held: dict[ServicePortName, _Reduced] = {}
        """Service ports with an ejected endpoint."""
        self._result: Plan | None = None

    def apply(self, plan: Plan, ejected: tuple[EndpointAddress, ...]) -> Plan:
        """Return the plan whose pools lack these endpoints, as far as `without_ejected` permits."""
        before, same = self._plan, ejected == self._ejected
        if plan is before and same and self._result is not None:
            return self._result
        follows = before is not None and plan.lineage.parent == before.lineage.number
        held: dict[ServicePortName, _Reduced] = {}
        names: Iterable[ServicePortName] = plan.services if ejected else ()
        if follows and same and ejected:
            names = plan.lineage.changed
            held = {name: each for name, each in self._held.items() if name not in names}
        addresses = {address for address, _ in ejected}
        for name in names:
            service = plan.services.get(name)
            made = _reduce(service, ejected, addresses) if service is not None else None
            if made is not None:
                known = self._held.get(name)
                held[name] = known if known is not None and known == made else made
        last, self._result = self._result, plan
        if held:
            changed = {name for name in held.keys() | self._held.keys() if held.get(name) is not self._held.get(name)}
            lineage = Lineage()
            if last is not None and (follows or plan is before):
                lineage = Lineage(last.lineage, frozenset(changed | plan.lineage.changed if follows else changed))
            services = Map(plan.services).update({name: each.reduced for name, each in held.items()})
            self._result = msgspec.structs.replace(plan, services=services, lineage=lineage)
        self._plan, self._ejected, self._held = plan, ejected, held
        return self._result

    @property
    def present(self) -> frozenset[EndpointAddress]:
        """The ejected endpoints that the last plan has, also those that a pool cannot spare."""
        return frozenset(endpoint for each in self._held.values() for endpoint in each.present)

    @property
    def out(self) -> Mapping[ServicePortName, frozenset[EndpointAddress]]:
        """The endpoints that Service ports of the last plan lack, by Service port."""
        return {name: each.out for name, each in self._held.items() if each.out}


class _Reduced(NamedTuple):
    """A Service port with ejected endpoints."""

    service: ServicePlan
    """As planned."""
    reduced: ServicePlan
    present: frozenset[EndpointAddress]
    """The ejected endpoints in its pools."""
    out: frozenset[EndpointAddress]
    """Those that some pool lacks now."""


def _reduce(service: ServicePlan, ejected: Sequence[EndpointAddress], addresses: AbstractSet[str]) -> _Reduced | None:
    """Return a Service port without ejected endpoints; None if it has none of them. `addresses` are those of `ejected`."""
    pools = [pool for pool in (service.cluster, service.local) if pool is not None]
    some = [each for pool in pools for each in pool.endpoints if each.address in addresses]
    if not some or service.name.protocol is not Protocol.TCP:
        return None
    present = frozenset((each.address, each.port) for each in some).intersection(ejected)
    if not present:
        return None
    reduced = without_ejected(service, ejected)
    left = [{*pool.endpoints} for pool in (reduced.cluster, reduced.local) if pool is not None]
    out = {each for pool, rest in zip(pools, left, strict=True) for each in pool.endpoints if each not in rest}
    return _Reduced(service, reduced, present, frozenset((each.address, each.port) for each in out))
