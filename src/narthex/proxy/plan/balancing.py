"""The annotation by which a Service requests another way to select endpoints, and what is wrong with a request."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction

from narthex.model import Service, quoted
from narthex.proxy.plan.ir import Balancing, Deviation

LOAD_BALANCING = "narthex.dev/load-balancing"
"""Annotation of a Service. Its values are those of `Balancing`."""

_BY_VALUE = {each.value: each for each in Balancing}
_UNABLE = {
    Balancing.MAGLEV: Deviation.NO_CONSISTENT_HASHING,
    Balancing.LEAST_CONNECTIONS: Deviation.NO_LEAST_CONNECTIONS,
}


def balancing_of(service: Service) -> Balancing:
    """Return how the ports of a Service select endpoints. A request that cannot be met counts as none."""
    if not service.annotations or service.affinity_seconds is not None:
        return Balancing.RANDOM
    return _BY_VALUE.get(service.annotation(LOAD_BALANCING) or "", Balancing.RANDOM)


def balancing_problem(service: Service, mode: str, deviations: AbstractSet[Deviation]) -> str:
    """Return why the request of a Service has no effect, and what to do; empty if it has one, or there is none.

    `deviations` are those of the backend of `mode`.
    """
    text = service.annotation(LOAD_BALANCING)
    if text is None:
        return ""
    requested = _BY_VALUE.get(text)
    if requested is None:
        *others, last = _BY_VALUE
        return (
            f"the annotation {LOAD_BALANCING} is {quoted(text)}, so endpoints are selected as without it; "
            f"use {', '.join(others)}, or {last}"
        )
    if requested is Balancing.RANDOM:
        return ""
    if service.affinity_seconds is not None:
        return (
            f"the annotation {LOAD_BALANCING} has no effect, because session affinity is ClientIP; "
            "remove the annotation, or set spec.sessionAffinity to None"
        )
    if _UNABLE[requested] in deviations:
        return (
            f"mode {mode} cannot select endpoints by {requested.value}, as the annotation {LOAD_BALANCING} requests, "
            "so endpoints are selected as without it; remove the annotation, or use another mode"
        )
    return ""


def shares_of_two(connections: Sequence[int]) -> tuple[Fraction, ...]:
    """Return with which probability each endpoint is the one with fewer connections of two that are drawn.

    The two differ, and of equal ones the first that was drawn is chosen. `connections` has those of each endpoint.
    """
    count = len(connections)
    if count == 1:
        return (Fraction(1),)
    shares = []
    for own in connections:
        more = sum(other > own for other in connections)
        equal = connections.count(own) - 1
        shares.append(Fraction(2 * more + equal, count * (count - 1)))
    return tuple(shares)
