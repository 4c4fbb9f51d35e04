"""What is decided of one Service, and what has to be written for it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from narthex.lb.status import ALLOCATED_FROM, OLD_PREFIX, PREFIX, held_by, pool_patch, status_patch
from narthex.model.names import NamespacedName
from narthex.model.objects import Service

Reason = Literal["IPAllocated", "AllocationFailed", "ClearAssignment", "ForeignStatus", "AddressKept"]


class Refusal(msgspec.Struct, frozen=True):
    """Why a Service does not get what it asks for."""

    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.text}: {self.advice}"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
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


class Told(msgspec.Struct, frozen=True):
    """An Event about a Service."""

    reason: Reason
    text: str

    @property
    def warning(self) -> bool:
        """Whether it is one to worry about."""
        return self.reason != "IPAllocated"


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be written so that a Service is as decided. Patches carry the version that was decided from."""

    status: dict[str, Any] | None = None
    """Merge patch of the status."""
    pool: str | None = None
    """New value of the annotation ALLOCATED_FROM, empty to remove it; None: it is right as it is."""
    events: tuple[Told, ...] = ()
    """To be told once the status is written."""
    standing: tuple[Told, ...] = ()
    """True as long as the decision is; to be told once."""


def changes(service: Service, decision: Decision) -> Changes:
    """What has to be written. The same decision made again after that asks for nothing more."""
    standing = []
    if decision.refusal is not None:
        standing.append(Told("AllocationFailed", str(decision.refusal)))
    if decision.note:
        standing.append(Told("ForeignStatus" if decision.foreign else "AddressKept", decision.note))
    if decision.foreign:
        return Changes(standing=tuple(standing))
    held, wanted = held_by(service), decision.addresses
    events = []
    if gone := [address for address in held if address not in wanted]:
        events.append(Told("ClearAssignment", f"{', '.join(gone)} taken away: {decision.cause}"))
    if new := [address for address in wanted if address not in held]:
        events.append(Told("IPAllocated", f"assigned {', '.join(new)} from pool {decision.pool}"))
    proxied = any(entry.proxy for entry in service.ingress)
    written = held == wanted and not proxied and not service.ingress_names
    status = None if written else status_patch(wanted, service.resource_version)
    there = service.annotation(PREFIX + ALLOCATED_FROM) or ""
    pool = None if there == decision.pool else decision.pool
    return Changes(status=status, pool=pool, events=tuple(events), standing=tuple(standing))


def pool_of(service: Service) -> str:
    """The pool that the status is from as the annotation has it; empty when no controller like this wrote it."""
    return service.annotation(PREFIX + ALLOCATED_FROM) or service.annotation(OLD_PREFIX + ALLOCATED_FROM) or ""


__all__ = ["Changes", "Decision", "Reason", "Refusal", "Told", "changes", "pool_of", "pool_patch"]
