"""What is read from and written to a Service about its load balancer: annotations, `status`, conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from narthex.model.objects import Service

PREFIX, OLD_PREFIX = "metallb.io/", "metallb.universe.tf/"
ADDRESS_POOL = "address-pool"
"""Annotation: the pool to take an address from."""
LOAD_BALANCER_IPS = "loadBalancerIPs"
"""Annotation: the addresses to have, joined by commas."""
ALLOW_SHARED_IP = "allow-shared-ip"
"""Annotation: Services with the same value may share an address."""
ALLOCATED_FROM = "ip-allocated-from-pool"
"""Annotation that the controller writes: the pool that the addresses in the status are from."""
LOAD_BALANCER = "LoadBalancer"

STRATEGIC = "strategic"
"""Kind of patch for `condition_patch`."""


def annotation(service: Service, name: str) -> str:
    """The value of one of the annotations above, under MetalLB's prefix or its old one; empty when there is none."""
    return service.annotation(PREFIX + name) or service.annotation(OLD_PREFIX + name) or ""


def held_by(service: Service) -> tuple[str, ...]:
    """The addresses that the status names, whoever wrote it."""
    return tuple(dict.fromkeys(entry.ip for entry in service.ingress))


def is_ours(service: Service, balancer_class: str) -> bool:
    """Whether it is for a controller of this class; the empty class serves Services that name none (row L1)."""
    return service.type == LOAD_BALANCER and service.load_balancer_class == balancer_class


def status_patch(addresses: Sequence[str], version: str) -> dict[str, Any]:
    """Merge patch for the subresource `status`. It is refused when the Service is not of this `resourceVersion` any more.

    `ipMode: VIP`: packets arrive with this address as their destination (row L2).
    """
    ingress = [{"ip": address, "ipMode": "VIP"} for address in addresses]
    return {"metadata": {"resourceVersion": version}, "status": {"loadBalancer": {"ingress": ingress or None}}}


def pool_patch(pool: str, version: str) -> dict[str, Any]:
    """Merge patch for the annotation that names the pool; none when empty."""
    return {"metadata": {"resourceVersion": version, "annotations": {PREFIX + ALLOCATED_FROM: pool or None}}}


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """One of a Service's `status.conditions`."""

    type: str
    holds: bool | None
    """None: unknown."""
    reason: str
    """One word in CamelCase."""
    message: str


def condition_patch(condition: Condition, since: str) -> dict[str, Any]:
    """Strategic merge patch (kind STRATEGIC) for the subresource `status`; other conditions stay as they are.

    `since` is when `holds` became what it is, in RFC 3339.
    """
    word = {True: "True", False: "False", None: "Unknown"}[condition.holds]
    entry = {
        "type": condition.type,
        "status": word,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": since,
    }
    return {"status": {"conditions": [entry]}}


def service_path(service: Service) -> str:
    """Where the API server has it."""
    return f"/api/v1/namespaces/{service.namespace}/services/{service.name}"
