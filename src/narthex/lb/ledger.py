"""The controller's memory of its writes between two allocations. All of it can be lost: the statuses are the record.

It covers two gaps. Between writing a status and observing it in a watch, the address must not be assigned to another
Service. And a controller that keeps overwriting our statuses must not be fought.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from narthex.lb.pools import Pools
from narthex.lb.service_status import AllocationDecision, status_addresses
from narthex.model import LoadBalancerIngress, NamespacedName, Service

UNCONFIRMED_SECONDS = 60.0
"""A write without a response that is not observed after this long has not arrived; its request timed out long before.
"""


class _WriteState(enum.Enum):
    SENT = "it may arrive yet"
    DONE = "the server has taken it: every version but the one it was made from is younger"
    INTENDED = "nothing is on its way; it is what is best given next"


class _PendingWrite(msgspec.Struct, frozen=True):
    uid: str
    addresses: tuple[str, ...]
    base: str = ""
    state: _WriteState = _WriteState.INTENDED
    until: float = 0.0
    """When SENT becomes INTENDED."""
    superseded: tuple[str, ...] = ()
    """Addresses of earlier writes based on the same version, which may have won."""


class AllocationLedger:
    """One controller's memory while it is the leader. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._pending: dict[NamespacedName, _PendingWrite] = {}
        self._settled: dict[NamespacedName, _PendingWrite] = {}
        self._overwritten: dict[NamespacedName, _PendingWrite] = {}

    @property
    def pending(self) -> Mapping[NamespacedName, tuple[str, ...]]:
        """Addresses that were written or may have been written and are not observed yet, or that will be written again."""
        return {key: pending.addresses for key, pending in self._pending.items()}

    @property
    def superseded(self) -> Mapping[NamespacedName, tuple[str, ...]]:
        """Other addresses that may be in a status, from writes that have been superseded."""
        return {key: pending.superseded for key, pending in self._pending.items() if pending.superseded}

    @property
    def settled(self) -> frozenset[NamespacedName]:
        """Services whose decided status has been observed."""
        return frozenset(self._settled)

    @property
    def overwritten(self) -> frozenset[NamespacedName]:
        """Services whose status another controller has overwritten."""
        return frozenset(self._overwritten)

    def record_write(self, service: Service, addresses: tuple[str, ...], now: float) -> None:
        """Record that a status is about to be written. Whatever the outcome, the addresses are reserved for this Service."""
        base, before = service.resource_version, self._pending.get(service.key)
        superseded: tuple[str, ...] = ()
        if before is not None and before.base == base and before.state is not _WriteState.INTENDED:
            superseded = tuple(dict.fromkeys((*before.superseded, *before.addresses)))
        # From here on the status may show any of these; none of them comes from another controller.
        self._settled.pop(service.key, None)
        until = now + UNCONFIRMED_SECONDS
        self._pending[service.key] = _PendingWrite(service.uid, addresses, base, _WriteState.SENT, until, superseded)

    def write_succeeded(self, service: Service) -> None:
        """Record that the server has accepted the write."""
        self._set_state(service, _WriteState.DONE)

    def write_rejected(self, service: Service) -> None:
        """Record that the server has rejected the write; an earlier, superseded write may be the cause."""
        pending = self._pending.get(service.key)
        if pending is not None and pending.state is _WriteState.SENT and not pending.superseded:
            self._set_state(service, _WriteState.INTENDED)

    def with_pending(self, services: Iterable[Service]) -> dict[NamespacedName, Service]:
        """Return the Services with the statuses that the server has accepted, even if no watch has delivered them yet."""
        found = {service.key: service for service in services}
        for key, pending in self._pending.items():
            if pending.state is _WriteState.DONE and key in found:
                ingress = tuple(LoadBalancerIngress(ip=address) for address in pending.addresses)
                found[key] = msgspec.structs.replace(found[key], ingress=ingress, ingress_names=())
        return found

    def observe(self, services: Iterable[Service], pools: Pools, now: float) -> None:
        """Compare pending writes with the current objects."""
        there = {service.key: service for service in services}
        for memory in (self._pending, self._settled, self._overwritten):
            for key in [key for key, kept in memory.items() if key not in there or there[key].uid != kept.uid]:
                del memory[key]
        for key, pending in self._pending.items():
            if pending.state is _WriteState.SENT and now >= pending.until:
                self._pending[key] = msgspec.structs.replace(pending, state=_WriteState.INTENDED, superseded=())
        for key in {*self._pending, *self._settled, *self._overwritten}:
            self._compare(key, there[key], pools)

    def drop_unmet(self, decisions: Mapping[NamespacedName, AllocationDecision]) -> None:
        """Release the addresses of intended writes that the decisions do not contain."""
        for key, pending in list(self._pending.items()):
            decision = decisions.get(key)
            if pending.state is _WriteState.INTENDED and (decision is None or decision.addresses != pending.addresses):
                del self._pending[key]

    def confirm(self, service: Service, decision: AllocationDecision) -> None:
        """Record that the status matches the decision, so that nothing is written."""
        if decision.addresses and not decision.foreign:
            self._settled[service.key] = _PendingWrite(service.uid, decision.addresses)
        else:
            self._settled.pop(service.key, None)

    def _set_state(self, service: Service, state: _WriteState) -> None:
        if (pending := self._pending.get(service.key)) is not None:
            self._pending[service.key] = msgspec.structs.replace(pending, state=state)

    def _compare(self, key: NamespacedName, service: Service, pools: Pools) -> None:
        held = status_addresses(service)
        pending, settled = self._pending.get(key), self._settled.get(key)
        if pending is not None and held == pending.addresses:
            del self._pending[key]
            self._settled[key] = pending
        elif (
            pending is not None
            and pending.state is not _WriteState.INTENDED
            and service.resource_version != pending.base
        ):
            # A write based on an older version can no longer succeed.
            del self._pending[key]
            if pending.state is _WriteState.DONE:
                self._overwrite(key, service, pending, pools)
        elif pending is None and settled is not None and held != settled.addresses:
            del self._settled[key]
            self._overwrite(key, service, settled, pools)
        if not held and not service.ingress_names:
            self._overwritten.pop(key, None)

    def _overwrite(self, key: NamespacedName, service: Service, was: _PendingWrite, pools: Pools) -> None:
        """Handle a settled status that another client has changed."""
        held = status_addresses(service)
        if not held and not service.ingress_names:
            # The status was cleared: restore it.
            self._pending.setdefault(key, _PendingWrite(was.uid, was.addresses))
        elif service.ingress_names or any(pools.of(address) is None for address in held):
            self._overwritten[key] = was
