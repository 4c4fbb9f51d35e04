"""What a controller remembers between its looks at the cluster. All of it can be lost: the statuses are the record.

It closes two gaps. Between writing a status and seeing it in a watch, the address must not be given to somebody else; and
who writes over our statuses again and again must not be fought.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

import msgspec

from narthex.lb.pools import Pools
from narthex.lb.service_status import AllocationDecision, status_addresses
from narthex.model.names import NamespacedName
from narthex.model.objects import LoadBalancerIngress, Service

UNANSWERED_SECONDS = 60.0
"""A write that nobody answered has not arrived when it is not seen after so long; it was given up long before."""


class _Fate(enum.Enum):
    """What is known of a promise."""

    SENT = "it may arrive yet"
    DONE = "the server has taken it: every version but the one it was made from is younger"
    WISH = "nothing is on its way; it is what is best given next"


class _Promise(msgspec.Struct, frozen=True):
    uid: str
    addresses: tuple[str, ...]
    base: str = ""
    """The version that it was made from."""
    fate: _Fate = _Fate.WISH
    until: float = 0.0
    """After this SENT is WISH."""
    perhaps: tuple[str, ...] = ()
    """What was sent before from the same version, and may be there instead."""


class AllocationLedger:
    """One controller's memory, for as long as it leads. Times are seconds that only grow."""

    def __init__(self) -> None:
        self._promises: dict[NamespacedName, _Promise] = {}
        self._settled: dict[NamespacedName, _Promise] = {}
        self._overwritten: dict[NamespacedName, _Promise] = {}

    @property
    def promised(self) -> Mapping[NamespacedName, tuple[str, ...]]:
        """What was written, or perhaps written, and has not been seen yet; and what is to come back."""
        return {key: promise.addresses for key, promise in self._promises.items()}

    @property
    def withheld(self) -> Mapping[NamespacedName, tuple[str, ...]]:
        """What else may be in a status by now, though something else was decided since."""
        return {key: promise.perhaps for key, promise in self._promises.items() if promise.perhaps}

    @property
    def settled(self) -> frozenset[NamespacedName]:
        """Services that have been seen to have what was decided."""
        return frozenset(self._settled)

    @property
    def overwritten(self) -> frozenset[NamespacedName]:
        """Services whose status somebody else has written over."""
        return frozenset(self._overwritten)

    def promise(self, service: Service, addresses: tuple[str, ...], now: float) -> None:
        """A status is about to be written. Whatever becomes of that, the addresses are meant for this Service."""
        base, before = service.resource_version, self._promises.get(service.key)
        perhaps: tuple[str, ...] = ()
        if before is not None and before.base == base and before.fate is not _Fate.WISH:
            perhaps = tuple(dict.fromkeys((*before.perhaps, *before.addresses)))
        # From here on any of these may be what is seen next, and none of them is somebody else's.
        self._settled.pop(service.key, None)
        until = now + UNANSWERED_SECONDS
        self._promises[service.key] = _Promise(service.uid, addresses, base, _Fate.SENT, until, perhaps)

    def done(self, service: Service) -> None:
        """The server has taken what was promised."""
        self._learn(service, _Fate.DONE)

    def refused(self, service: Service) -> None:
        """The server has not taken what was promised. What was sent before it may be the very reason for that."""
        promise = self._promises.get(service.key)
        if promise is not None and promise.fate is _Fate.SENT and not promise.perhaps:
            self._learn(service, _Fate.WISH)

    def shown(self, services: Iterable[Service]) -> dict[NamespacedName, Service]:
        """The Services as they are by now: with the statuses that the server has taken, though no watch has shown them."""
        found = {service.key: service for service in services}
        for key, promise in self._promises.items():
            if promise.fate is _Fate.DONE and key in found:
                ingress = tuple(LoadBalancerIngress(ip=address) for address in promise.addresses)
                found[key] = msgspec.structs.replace(found[key], ingress=ingress, ingress_names=())
        return found

    def see(self, services: Iterable[Service], pools: Pools, now: float) -> None:
        """Compare with what there is now."""
        there = {service.key: service for service in services}
        for memory in (self._promises, self._settled, self._overwritten):
            for key in [key for key, kept in memory.items() if key not in there or there[key].uid != kept.uid]:
                del memory[key]
        for key, promise in self._promises.items():
            if promise.fate is _Fate.SENT and now >= promise.until:
                self._promises[key] = msgspec.structs.replace(promise, fate=_Fate.WISH, perhaps=())
        for key in {*self._promises, *self._settled, *self._overwritten}:
            self._compare(key, there[key], pools)

    def decided(self, decisions: Mapping[NamespacedName, AllocationDecision]) -> None:
        """Wishes that did not come true keep no address from others any more."""
        for key, promise in list(self._promises.items()):
            decision = decisions.get(key)
            if promise.fate is _Fate.WISH and (decision is None or decision.addresses != promise.addresses):
                del self._promises[key]

    def confirm(self, service: Service, decision: AllocationDecision) -> None:
        """The status is as decided, and nothing is to be written."""
        if decision.addresses and not decision.foreign:
            self._settled[service.key] = _Promise(service.uid, decision.addresses)
        else:
            self._settled.pop(service.key, None)

    def _learn(self, service: Service, fate: _Fate) -> None:
        if (promise := self._promises.get(service.key)) is not None:
            self._promises[service.key] = msgspec.structs.replace(promise, fate=fate)

    def _compare(self, key: NamespacedName, service: Service, pools: Pools) -> None:
        held = status_addresses(service)
        promise, settled = self._promises.get(key), self._settled.get(key)
        if promise is not None and held == promise.addresses:
            del self._promises[key]
            self._settled[key] = promise
        elif promise is not None and promise.fate is not _Fate.WISH and service.resource_version != promise.base:
            # A write from the version before this one cannot arrive any more.
            del self._promises[key]
            if promise.fate is _Fate.DONE:
                self._changed(key, service, promise, pools)
        elif promise is None and settled is not None and held != settled.addresses:
            del self._settled[key]
            self._changed(key, service, settled, pools)
        if not held and not service.ingress_names:
            self._overwritten.pop(key, None)

    def _changed(self, key: NamespacedName, service: Service, was: _Promise, pools: Pools) -> None:
        """Somebody has made something else of a status that was as decided."""
        held = status_addresses(service)
        if not held and not service.ingress_names:
            # It was cleared: it is to come back as it was.
            self._promises.setdefault(key, _Promise(was.uid, was.addresses))
        elif service.ingress_names or any(pools.of(address) is None for address in held):
            self._overwritten[key] = was
