"""What a controller remembers between its looks at the cluster. All of it can be lost: the statuses are the record.

It closes two gaps. Between writing a status and seeing it in a watch, the address must not be given to somebody else; and
who writes over our statuses again and again must not be fought.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from narthex.lb.decision import Decision
from narthex.lb.pools import Pools
from narthex.lb.status import held_by
from narthex.model.names import NamespacedName
from narthex.model.objects import Service


class _Promise(msgspec.Struct, frozen=True):
    uid: str
    addresses: tuple[str, ...]
    base: str = ""
    """The version that it was written on."""
    done: bool = False
    """The server said so: every other version is younger than what was written."""


class Ledger:
    """One controller's memory, for as long as it leads."""

    def __init__(self) -> None:
        self._promises: dict[NamespacedName, _Promise] = {}
        self._settled: dict[NamespacedName, _Promise] = {}
        self._overwritten: dict[NamespacedName, _Promise] = {}

    @property
    def promised(self) -> Mapping[NamespacedName, tuple[str, ...]]:
        """What was written, or perhaps written, and has not been seen yet."""
        return {key: promise.addresses for key, promise in self._promises.items()}

    @property
    def settled(self) -> frozenset[NamespacedName]:
        """Services that have been seen to have what was decided."""
        return frozenset(self._settled)

    @property
    def overwritten(self) -> frozenset[NamespacedName]:
        """Services whose status somebody else has written over."""
        return frozenset(self._overwritten)

    def promise(self, service: Service, addresses: tuple[str, ...]) -> None:
        """A status is about to be written. Whatever becomes of that, the addresses are meant for this Service."""
        self._promises[service.key] = _Promise(service.uid, addresses, service.resource_version)

    def done(self, service: Service) -> None:
        """The server has taken what was promised."""
        if (promise := self._promises.get(service.key)) is not None:
            self._promises[service.key] = msgspec.structs.replace(promise, done=True)

    def see(self, services: Iterable[Service], pools: Pools) -> None:
        """Compare with what there is now."""
        there = {service.key: service for service in services}
        for memory in (self._promises, self._settled, self._overwritten):
            for key in [key for key, kept in memory.items() if key not in there or there[key].uid != kept.uid]:
                del memory[key]
        for key, service in there.items():
            self._compare(key, service, pools)

    def confirm(self, service: Service, decision: Decision) -> None:
        """The status is as decided."""
        if decision.addresses and not decision.foreign:
            self._settled[service.key] = _Promise(service.uid, decision.addresses)
        else:
            self._settled.pop(service.key, None)

    def _compare(self, key: NamespacedName, service: Service, pools: Pools) -> None:
        held = held_by(service)
        promise, settled = self._promises.get(key), self._settled.get(key)
        if promise is not None and held == promise.addresses:
            del self._promises[key]
            self._settled[key] = promise
        elif promise is not None and promise.done and service.resource_version != promise.base:
            del self._promises[key]
            self._changed(key, service, promise, pools)
        elif settled is not None and held != settled.addresses:
            del self._settled[key]
            self._changed(key, service, settled, pools)
        if not held and not service.ingress_names:
            self._overwritten.pop(key, None)

    def _changed(self, key: NamespacedName, service: Service, was: _Promise, pools: Pools) -> None:
        """Somebody has made something else of a status that was as decided."""
        held = held_by(service)
        if not held and not service.ingress_names:
            # It was cleared: it is to come back as it was.
            self._promises.setdefault(key, msgspec.structs.replace(was, done=False))
        elif service.ingress_names or any(pools.of(address) is None for address in held):
            self._overwritten[key] = was
