"""Which Services may have one address together (row M6)."""

from __future__ import annotations

import msgspec

from narthex.lb.status import ALLOW_SHARED_IP, PREFIX, annotation
from narthex.model.names import NamespacedName
from narthex.model.net import Protocol
from narthex.model.objects import Labels, Service


class Share(msgspec.Struct, frozen=True):
    """What one Service brings to an address."""

    service: NamespacedName
    key: str
    """Of the annotation; empty: it shares with nobody."""
    ports: frozenset[tuple[Protocol, int]]
    backend: Labels | None
    """Its pods, where only nodes that have them may take its packets; None with the traffic policy Cluster."""
    ours: bool = True
    """It is one of those that the same controller gives addresses to."""


def share_of(service: Service, *, ours: bool = True) -> Share:
    """What a Service brings."""
    return Share(
        service.key,
        annotation(service, ALLOW_SHARED_IP),
        frozenset((port.protocol, port.port) for port in service.ports),
        service.selector if service.external_policy_local else None,
        ours,
    )


def clash(one: Share, other: Share) -> str:
    """Why `one` cannot have the address that `other` has; empty when it can."""
    whose = f"{other.service} has it"
    if not other.ours:
        return f"{whose}, which another controller serves or nobody can read"
    if not one.key or not other.key:
        lacks = one if not one.key else other
        return f"{whose}, and {lacks.service} has no annotation {PREFIX}{ALLOW_SHARED_IP}"
    if one.key != other.key:
        return f"{whose}, and their annotations {PREFIX}{ALLOW_SHARED_IP} differ"
    if both := sorted((port, protocol.value) for protocol, port in one.ports & other.ports):
        port, protocol = both[0]
        return f"{whose}, and both use port {port}/{protocol}"
    if one.backend != other.backend:
        return f"{whose}, and unless both have externalTrafficPolicy Cluster, both must select the same pods"
    return ""
