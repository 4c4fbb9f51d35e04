"""Counters of new connections in the kernel: which counter belongs to which Service port and endpoint.

Chains and maps of nat see the first packet of each connection only, so their counters count connections. The owner of a
counter follows from the plan alone. In mode nftables, Service ports with session affinity use chains of their own and
are counted as a whole only.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from narthex.model import ServicePortName
from narthex.netfilter.ast import ElementData, ElementKey, Set
from narthex.proxy.backends.iptables import names
from narthex.proxy.backends.nftables.frame import NODEPORT_SERVICES, SERVICES, NftSettings, shared_sets
from narthex.proxy.backends.nftables.hashing import declared_map
from narthex.proxy.backends.nftables.rows import ENDPOINT_MAPS
from narthex.proxy.plan.ir import Balancing, Endpoint, Forward, Plan


class ConnectionCount(NamedTuple):
    """The value of one counter."""

    key: Hashable
    """Identifies the counter. A counter of a new rule or element starts at 0."""
    name: ServicePortName
    endpoint: tuple[str, int] | None
    """Address and port; None: the counter is of the Service port as a whole."""
    connections: int


_SENDS = re.compile(r"^\[(\d+):\d+\] -A (KUBE-SEP-[A-Z2-7]{16}) .*-j DNAT\b", re.MULTILINE)


_INVALID = re.compile(rf"^\[(\d+):\d+\] -A {names.FORWARD} .*--ctstate INVALID -j DROP$", re.MULTILINE)


def invalid_dropped(text: str) -> int:
    """Return the number of invalid packets dropped, from the output of `iptables-save --counters -t filter`."""
    return sum(int(match[1]) for match in _INVALID.finditer(text))


class XtablesCounterOwners:
    """Assigns the counters of endpoint chains (iptables) to the Service ports of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._owners: dict[str, tuple[ServicePortName, Endpoint]] = {}
        for service in plan.services.values():
            for pool in service.pools.values():
                for endpoint in pool.endpoints:
                    self._owners[names.sep(service.name, endpoint)] = service.name, endpoint

    def counted(self, text: str) -> Iterator[ConnectionCount]:
        """Yield the counters in the output of `iptables-save --counters -t nat`.

        There is one for each endpoint of the plan, and the same for its Service port as a whole.
        """
        for match in _SENDS.finditer(text):
            owner = self._owners.get(match[2])
            if owner is not None:
                name, endpoint = owner
                packets = int(match[1])
                yield ConnectionCount((match[2], "endpoint"), name, (endpoint.address, endpoint.port), packets)
                yield ConnectionCount((match[2], "service"), name, None, packets)


_FRONTENDS = (SERVICES, NODEPORT_SERVICES)

Element = tuple[str, ElementKey, ElementData, int]
"""Map, key, data and packets counted."""


def counted_sets(plan: Plan, endpoints: bool) -> Mapping[str, Set]:
    """Return the declarations of the maps that count; those of endpoints only if `endpoints` is set."""
    declared = shared_sets(NftSettings.of(plan))
    found = {name: declared[name] for name in (*_FRONTENDS, *(ENDPOINT_MAPS.values() if endpoints else ()))}
    if endpoints:
        found.update((one.name, one) for _, one in _hashing_maps(plan))
    return found


def _hashing_maps(plan: Plan) -> Iterator[tuple[ServicePortName, Set]]:
    """Yield the maps of Service ports with consistent hashing."""
    for service in plan.services.values():
        if service.balancing is Balancing.MAGLEV:
            yield from ((service.name, declared_map(service, scope)) for scope in service.pools)


class NftCounterOwners:
    """Assigns the counters of map elements (nftables) to the Service ports of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._hashing = {one.name: owner for owner, one in _hashing_maps(plan)}
        self._owners: dict[ElementKey, ServicePortName] = {}
        for service in plan.services.values():
            for front in service.frontends:
                # An element that only refuses is none that connects.
                if any(isinstance(decision, Forward) for decision in (front.pod, front.node, front.other)):
                    key: ElementKey = (front.protocol.lower, front.port)
                    self._owners[key if front.address is None else (front.address, *key)] = service.name

    def counted(self, elements: Iterable[Element]) -> Iterator[ConnectionCount]:
        """Yield the counters of Service ports that the plan still has."""
        for name, key, data, packets in elements:
            if name in _FRONTENDS:
                owner = self._owners.get(key)
                if owner is not None:
                    yield ConnectionCount((name, key), owner, None, packets)
            else:
                owner = self._hashing.get(name) or self._owners.get(key[:-1])
                if owner is not None and isinstance(data, tuple):
                    yield ConnectionCount((name, key, data), owner, data, packets)
