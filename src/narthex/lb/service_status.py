"""A Service's load balancer data: annotations, `status`, conditions, and the patches that write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from narthex.model import NamespacedName, Service

PREFIX, OLD_PREFIX = "metallb.io/", "metallb.universe.tf/"
ADDRESS_POOL = "address-pool"
"""Annotation: the requested pool."""
LOAD_BALANCER_IPS = "loadBalancerIPs"
"""Annotation: the requested addresses, separated by commas."""
ALLOW_SHARED_IP = "allow-shared-ip"
"""Annotation: Services with the same value may share an address."""
ALLOCATED_FROM = "ip-allocated-from-pool"
"""Annotation written by the controller: the pool of the status addresses."""
LOAD_BALANCER = "LoadBalancer"


def annotation(service: Service, name: str) -> str:
    """Return the value of an annotation under MetalLB's current or old prefix; empty if there is none."""
    return service.annotation(PREFIX + name) or service.annotation(OLD_PREFIX + name) or ""


def status_addresses(service: Service) -> tuple[str, ...]:
    """Return the addresses in the status, whichever controller wrote them."""
    return tuple(dict.fromkeys(entry.ip for entry in service.ingress))


def is_served(service: Service, load_balancer_class: str) -> bool:
    """Return True if a controller of this class serves the Service; the empty class serves Services without one (row L1)."""
    return service.type == LOAD_BALANCER and service.load_balancer_class == load_balancer_class


def status_patch(addresses: Sequence[str], version: str) -> dict[str, Any]:
    """Return the merge patch for the `status` subresource; it fails unless the Service has this `resourceVersion`.

    `ipMode: VIP`: packets arrive with this address as their destination (row L2).
    """
    ingress = [{"ip": address, "ipMode": "VIP"} for address in addresses]
    return {"metadata": {"resourceVersion": version}, "status": {"loadBalancer": {"ingress": ingress or None}}}


def pool_patch(pool: str, version: str) -> dict[str, Any]:
    """Return the merge patch for the pool annotation; an empty pool removes it."""
    return {"metadata": {"resourceVersion": version, "annotations": {PREFIX + ALLOCATED_FROM: pool or None}}}


class ServiceCondition(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a Service's `status.conditions`."""

    type: str
    holds: bool | None
    """None: unknown."""
    reason: str
    """One CamelCase word."""
    message: str


def condition_patch(condition: ServiceCondition, since: str) -> dict[str, Any]:
    """Return the strategic merge patch for the `status` subresource; other conditions stay unchanged.

    `since` is the time of the last transition, in RFC 3339.
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


def removal_patch(type_: str) -> dict[str, Any]:
    """Return the strategic merge patch for the `status` subresource that removes a condition."""
    return {"status": {"conditions": [{"type": type_, "$patch": "delete"}]}}


def service_path(key: NamespacedName) -> str:
    """Return the API path of a Service."""
    return f"/api/v1/namespaces/{key.namespace}/services/{key.name}"


EventReason = Literal["IPAllocated", "AllocationFailed", "ClearAssignment", "ForeignStatus", "AddressKept"]


class Refusal(msgspec.Struct, frozen=True):
    """Why a Service does not get what it requests, and what helps."""

    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.text}: {self.advice}"


class AllocationDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses that a Service's status must contain, and why."""

    service: NamespacedName
    addresses: tuple[str, ...] = ()
    pool: str = ""
    refusal: Refusal | None = None
    """Set if a request is not granted, even if the Service keeps other addresses."""
    cause: str = ""
    """Why addresses are removed from the status; empty if none are."""
    note: str = ""
    foreign: bool = False
    """Another controller writes the status: it is left alone."""


class ServiceEvent(msgspec.Struct, frozen=True):
    """A Kubernetes Event about a Service."""

    reason: EventReason
    text: str

    @property
    def warning(self) -> bool:
        """True for Events of type Warning."""
        return self.reason != "IPAllocated"


class ServiceChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What must be written to implement a decision. The patches contain the version that the decision was based on."""

    status: dict[str, Any] | None = None
    pool: str | None = None
    """New value of the annotation ALLOCATED_FROM, empty to remove it; None: unchanged."""
    events: tuple[ServiceEvent, ...] = ()
    """Events to record after the status was written."""
    standing: tuple[ServiceEvent, ...] = ()
    """Events that apply as long as the decision does; recorded once."""


def required_changes(service: Service, decision: AllocationDecision) -> ServiceChanges:
    """Return what must be written. After that, the same decision requires no more changes."""
    standing = []
    if decision.refusal is not None:
        standing.append(ServiceEvent("AllocationFailed", str(decision.refusal)))
    if decision.note:
        standing.append(ServiceEvent("ForeignStatus" if decision.foreign else "AddressKept", decision.note))
    if decision.foreign:
        return ServiceChanges(standing=tuple(standing))
    held, desired = status_addresses(service), decision.addresses
    events = []
    if gone := [address for address in held if address not in desired]:
        events.append(ServiceEvent("ClearAssignment", f"{', '.join(gone)} taken away: {decision.cause}"))
    if new := [address for address in desired if address not in held]:
        events.append(ServiceEvent("IPAllocated", f"assigned {', '.join(new)} from pool {decision.pool}"))
    proxied = any(entry.proxy for entry in service.ingress)
    written = held == desired and not proxied and not service.ingress_names
    status = None if written else status_patch(desired, service.resource_version)
    there = service.annotation(PREFIX + ALLOCATED_FROM) or ""
    pool = None if there == decision.pool else decision.pool
    return ServiceChanges(status=status, pool=pool, events=tuple(events), standing=tuple(standing))


def pool_of(service: Service) -> str:
    """Return the pool of the status addresses according to the annotation; empty if no MetalLB-compatible controller wrote it."""
    return service.annotation(PREFIX + ALLOCATED_FROM) or service.annotation(OLD_PREFIX + ALLOCATED_FROM) or ""
