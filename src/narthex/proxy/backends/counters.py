"""New connections as the rules themselves count them: which counter belongs to which Service port and endpoint.

A kernel counter is known by a key of the backend's own. What it counts for is worked out from the plan alone.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from narthex.model.names import ServicePortName
from narthex.netfilter.ast import ElementData, ElementKey, Set
from narthex.proxy.backends.iptables import names
from narthex.proxy.backends.nftables.frame import NODEPORT_SERVICES, SERVICES, NftSettings, shared_sets
from narthex.proxy.backends.nftables.rows import ENDPOINT_MAPS
from narthex.proxy.plan.ir import Endpoint, Forward, Plan


class ConnectionCount(NamedTuple):
    """One counter."""

    key: Hashable
    """What it is known by. A counter whose rule or element was made anew begins at 0."""
    name: ServicePortName
    endpoint: tuple[str, int] | None
    """Address and port; None: it counts for the Service port as a whole."""
    connections: int


_SENDS = re.compile(r"^\[(\d+):\d+\] -A (KUBE-SEP-[A-Z2-7]{16}) .*-j DNAT\b", re.MULTILINE)


_INVALID = re.compile(rf"^\[(\d+):\d+\] -A {names.FORWARD} .*--ctstate INVALID -j DROP$", re.MULTILINE)


def invalid_dropped(text: str) -> int:
    """Packets that the rule against invalid ones has dropped, in what `iptables-save --counters -t filter` printed; 0
    without such a rule."""
    return sum(int(match[1]) for match in _INVALID.finditer(text))


class XtablesCounterOwners:
    """Says what the chains of one plan's rules count for."""

    def __init__(self, plan: Plan) -> None:
        self._owners: dict[str, tuple[ServicePortName, Endpoint]] = {}
        for service in plan.services.values():
            for pool in (service.cluster, service.local):
                for endpoint in pool.endpoints if pool is not None else ():
                    self._owners[names.sep(service.name, endpoint)] = service.name, endpoint

    def counted(self, text: str) -> Iterator[ConnectionCount]:
        """Counters in what `iptables-save --counters -t nat` printed, of Service ports that the plan still has: one for
        each endpoint, and the same for the Service port as a whole."""
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
