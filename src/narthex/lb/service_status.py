"""What is read from and written to a Service about its load balancer: annotations, `status`, conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from narthex.model.names import NamespacedName
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


def status_addresses(service: Service) -> tuple[str, ...]:
    """The addresses that the status names, whoever wrote it."""
    return tuple(dict.fromkeys(entry.ip for entry in service.ingress))


def is_served(service: Service, balancer_class: str) -> bool:
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


class ServiceCondition(msgspec.Struct, frozen=True, kw_only=True):
    """One of a Service's `status.conditions`."""

    type: str
    holds: bool | None
    """None: unknown."""
    reason: str
    """One word in CamelCase."""
    message: str


def condition_patch(condition: ServiceCondition, since: str) -> dict[str, Any]:
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


EventReason = Literal["IPAllocated", "AllocationFailed", "ClearAssignment", "ForeignStatus", "AddressKept"]


class Refusal(msgspec.Struct, frozen=True):
    """Why a Service does not get what it asks for."""

    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.text}: {self.advice}"


class AllocationDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What the status of a Service is to hold, and why."""

    service: NamespacedName
    addresses: tuple[str, ...] = ()
    pool: str = ""
    """The pool that they are from, by name."""
    refusal: Refusal | None = None
    """Set when something that the Service asks for is not granted, also where it keeps what it has."""
    cause: str = ""
    """Why addresses that the status holds are taken away, empty when none are."""
    note: str = ""
    """What a person should know, though nothing is refused."""
    foreign: bool = False
    """Somebody else writes the status: it is left alone."""


class ServiceEvent(msgspec.Struct, frozen=True):
    """An Event about a Service."""

    reason: EventReason
    text: str

    @property
    def warning(self) -> bool:
        """Whether it is one to worry about."""
        return self.reason != "IPAllocated"


class ServiceChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be written so that a Service is as decided. Patches carry the version that was decided from."""

    status: dict[str, Any] | None = None
    """Merge patch of the status."""
    pool: str | None = None
    """New value of the annotation ALLOCATED_FROM, empty to remove it; None: it is right as it is."""
    events: tuple[ServiceEvent, ...] = ()
    """To be told once the status is written."""
    standing: tuple[ServiceEvent, ...] = ()
    """True as long as the decision is; to be told once."""


def required_changes(service: Service, decision: AllocationDecision) -> ServiceChanges:
    """What has to be written. The same decision made again after that asks for nothing more."""
    standing = []
    if decision.refusal is not None:
        standing.append(ServiceEvent("AllocationFailed", str(decision.refusal)))
    if decision.note:
        standing.append(ServiceEvent("ForeignStatus" if decision.foreign else "AddressKept", decision.note))
    if decision.foreign:
        return ServiceChanges(standing=tuple(standing))
    held, wanted = status_addresses(service), decision.addresses
    events = []
    if gone := [address for address in held if address not in wanted]:
        events.append(ServiceEvent("ClearAssignment", f"{', '.join(gone)} taken away: {decision.cause}"))
    if new := [address for address in wanted if address not in held]:
        events.append(ServiceEvent("IPAllocated", f"assigned {', '.join(new)} from pool {decision.pool}"))
    proxied = any(entry.proxy for entry in service.ingress)
    written = held == wanted and not proxied and not service.ingress_names
    status = None if written else status_patch(wanted, service.resource_version)
    there = service.annotation(PREFIX + ALLOCATED_FROM) or ""
    pool = None if there == decision.pool else decision.pool
    return ServiceChanges(status=status, pool=pool, events=tuple(events), standing=tuple(standing))


def pool_of(service: Service) -> str:
    """The pool that the status is from as the annotation has it; empty when no controller like this wrote it."""
    return service.annotation(PREFIX + ALLOCATED_FROM) or service.annotation(OLD_PREFIX + ALLOCATED_FROM) or ""
