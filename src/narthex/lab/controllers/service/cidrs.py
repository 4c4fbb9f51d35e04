"""ServiceCIDRs say that they can be used (kubernetes `pkg/controller/servicecidrs`, KEP-1880)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.interfaces import (
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
)
from narthex.lab.controllers.objects import (
    condition_holds,
    is_terminating,
    spec_of,
    status_of,
    with_condition,
    with_metadata,
    with_status,
)
from narthex.lab.controllers.service.allocator import address_numbers, address_range

FINALIZER = "networking.k8s.io/service-cidr-finalizer"


class ServiceCIDRController:
    """Marks a range Ready, and keeps one that is deleted until no Service has an address that only it holds."""

    name = "service-cidr-controller"
    kinds = frozenset({"ServiceCIDR", "Service"})

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The range; all that are leaving, when a Service goes or another range comes."""
        if seen.kind == "ServiceCIDR":
            return {seen.key, *_leaving(present)}
        return _leaving(present) if seen.kind == "Service" else []

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Whether it can be used, and whether it may go."""
        cidr = present.get("ServiceCIDR", key)
        if cidr is None:
            return
        finalizers = cidr["metadata"].get("finalizers") or []
        if is_terminating(cidr):
            if FINALIZER in finalizers and not _is_needed(cidr, present):
                rest = [each for each in finalizers if each != FINALIZER]
                yield UpdateObject("ServiceCIDR", with_metadata(cidr, finalizers=rest or None))
        elif FINALIZER not in finalizers:
            yield UpdateObject("ServiceCIDR", with_metadata(cidr, finalizers=[*finalizers, FINALIZER]))
        elif not condition_holds(cidr, "Ready"):
            new = {"type": "Ready", "status": "True", "reason": "", "message": "Kubernetes Service CIDR is ready"}
            conditions = with_condition(status_of(cidr).get("conditions") or [], new, now)
            yield UpdateObject("ServiceCIDR", with_status(cidr, conditions=conditions), "status")


def _leaving(present: ClusterState) -> list[ObjectKey]:
    return [key for key, cidr in present.all("ServiceCIDR").items() if is_terminating(cidr)]


def _is_needed(cidr: Object, present: ClusterState) -> bool:
    mine = [address_range(each) for each in spec_of(cidr).get("cidrs") or ()]
    others = [
        address_range(each)
        for other in present.all("ServiceCIDR").values()
        if not is_terminating(other)
        for each in spec_of(other).get("cidrs") or ()
    ]
    return any(
        any(number in each for each in mine) and not any(number in each for each in others)
        for service in present.all("Service").values()
        for number in address_numbers(service)
    )
