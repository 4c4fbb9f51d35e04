"""Counters of nftables mode: elements of the frontends' and the endpoints' maps count the first packet of each connection,
since nat chains see no other.

Service ports with session affinity send from chains of their own, so they are counted as a whole only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from narthex.model.names import ServicePortName
from narthex.netfilter.ast import ElementData, ElementKey, Set
from narthex.proxy.backends.counts import ConnectionCount
from narthex.proxy.backends.nftables.frame import NODEPORT_SERVICES, SERVICES, NftSettings, shared_sets
from narthex.proxy.backends.nftables.rows import ENDPOINT_MAPS
from narthex.proxy.plan.ir import Forward, Plan

_FRONTENDS = (SERVICES, NODEPORT_SERVICES)

Element = tuple[str, ElementKey, ElementData, int]
"""Map, key, data and packets counted."""


def counted_sets(plan: Plan, endpoints: bool) -> Mapping[str, Set]:
    """The maps whose elements count, declared; those of endpoints only when they are asked for."""
    declared = shared_sets(NftSettings.of(plan))
    return {name: declared[name] for name in (*_FRONTENDS, *(ENDPOINT_MAPS.values() if endpoints else ()))}


class NftCounterOwners:
    """Says what the elements of one plan's rules count for."""

    def __init__(self, plan: Plan) -> None:
        self._owners: dict[ElementKey, ServicePortName] = {}
        for service in plan.services.values():
            for front in service.frontends:
                # An element that only refuses is none that connects.
                if any(isinstance(decision, Forward) for decision in (front.pod, front.node, front.other)):
                    key: ElementKey = (front.protocol.lower, front.port)
                    self._owners[key if front.address is None else (front.address, *key)] = service.name

    def counted(self, elements: Iterable[Element]) -> Iterator[ConnectionCount]:
        """Counters of Service ports that the plan still has."""
        for name, key, data, packets in elements:
            if name in _FRONTENDS:
                owner = self._owners.get(key)
                if owner is not None:
                    yield ConnectionCount((name, key), owner, None, packets)
            else:
                owner = self._owners.get(key[:-1])
                if owner is not None and isinstance(data, tuple):
                    yield ConnectionCount((name, key, data), owner, data, packets)
