"""Which Services may share an address (row M6)."""

from __future__ import annotations

import msgspec

from narthex.lb.service_status import ALLOW_SHARED_IP, PREFIX, annotation
from narthex.model import Labels, NamespacedName, Protocol, Service


class SharingProfile(msgspec.Struct, frozen=True):
    """The properties of a Service that decide whether it can share an address."""

    service: NamespacedName
    key: str
    """Value of the annotation; empty: no sharing."""
    ports: frozenset[tuple[Protocol, int]]
    backend: Labels | None
    """Pod selector, with the traffic policy Local; None with Cluster."""
    ours: bool = True
    """True if this controller serves the Service."""


def sharing_profile(service: Service, *, ours: bool = True) -> SharingProfile:
    """Return the sharing profile of a Service."""
    return SharingProfile(
        service.key,
        annotation(service, ALLOW_SHARED_IP),
        frozenset((port.protocol, port.port) for port in service.ports),
        service.selector if service.external_policy_local else None,
        ours,
    )


def sharing_conflict(one: SharingProfile, other: SharingProfile) -> str:
    """Return why `one` cannot use the address of `other`; empty if it can."""
    conflict = f"{other.service} has it"
    if not other.ours:
        return f"{conflict}, which another controller serves or which cannot be decoded"
    if not one.key or not other.key:
        lacks = one if not one.key else other
        return f"{conflict}, and {lacks.service} has no annotation {PREFIX}{ALLOW_SHARED_IP}"
    if one.key != other.key:
        return f"{conflict}, and their annotations {PREFIX}{ALLOW_SHARED_IP} differ"
    if both := sorted((port, protocol.value) for protocol, port in one.ports & other.ports):
        port, protocol = both[0]
        return f"{conflict}, and both use port {port}/{protocol}"
    if one.backend != other.backend:
        return f"{conflict}, and unless both have externalTrafficPolicy Cluster, both must select the same pods"
    return ""
