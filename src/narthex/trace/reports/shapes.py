"""Service ports that are alike to `evaluate` but for their names and numbers, so that a large cluster is judged by the
few shapes that its Services have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from narthex.model.net import in_any
from narthex.proxy.plan.ir import Endpoint, Frontend, Plan, ServicePlan

Shape = tuple[object, ...]
K = TypeVar("K")

_ENOUGH = 2
"""One endpoint of a kind, or several: more than several make no difference that words could tell."""


def shape(
    services: Sequence[ServicePlan], plans: Sequence[Plan], own: Collection[str], clash: Callable[[Frontend], K]
) -> Shape:
    """What a Service port has in several plans, without names and numbers.

    `own` are the node's addresses; `clash` says on which of them somebody else has a node port's number.
    """
    ranges = [cidrs for service in services for frontend in service.frontends if (cidrs := frontend.allow_from)]
    ranges += [plan.pods.cidrs for plan in plans]
    return tuple(
        (
            service.name.protocol,
            service.affinity_seconds,
            tuple(_way_in(frontend, own, clash) for frontend in service.frontends),
            _endpoints(service, ranges, own),
        )
        for service in services
    )


def _way_in(frontend: Frontend, own: Collection[str], clash: Callable[[Frontend], K]) -> Shape:
    where = clash(frontend) if frontend.address is None else frontend.address in own
    return frontend.kind, where, frontend.allow_from, frontend.pod, frontend.node, frontend.other


def _endpoints(service: ServicePlan, ranges: Sequence[tuple[str, ...]], own: Collection[str]) -> Shape:
    """How many endpoints there are of each kind: one that differs in nothing that a plan can ask."""
    held: dict[str, list[tuple[str, bool]]] = {}
    for place, endpoints in _places(service):
        for endpoint in endpoints:
            held.setdefault(endpoint.address, []).append((place, endpoint.local))
    kinds = Counter(
        (tuple(sorted(places)), address in own, tuple(in_any(cidrs, address) for cidrs in ranges))
        for address, places in held.items()
    )
    return tuple(sorted((kind, min(count, _ENOUGH)) for kind, count in kinds.items()))


def _places(service: ServicePlan) -> Iterable[tuple[str, tuple[Endpoint, ...]]]:
    yield "cluster", service.cluster.endpoints if service.cluster else ()
    yield "local", service.local.endpoints if service.local else ()
    yield "serving", service.serving
    yield "resting", service.resting
