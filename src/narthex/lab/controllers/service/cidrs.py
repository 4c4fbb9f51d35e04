"""The ServiceCIDR controller (kubernetes `pkg/controller/servicecidrs`, KEP-1880)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
    condition_holds,
    finalizers_of,
    is_terminating,
    spec_of,
    update_condition,
    with_fields,
    without_finalizer,
)
from narthex.lab.controllers.service.allocator import address_numbers, address_range

FINALIZER = "networking.k8s.io/service-cidr-finalizer"


class ServiceCIDRController:
    """Sets the condition Ready, and keeps a finalizer while a Service has an address that only this range contains."""

    name = "service-cidr-controller"
    kinds = frozenset({"ServiceCIDR", "Service"})

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the ServiceCIDR, and all terminating ones when Services or ranges change."""
        if change.kind == "ServiceCIDR":
            return {change.key, *_terminating(state)}
        return _terminating(state) if change.kind == "Service" else []

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Yield the write that the ServiceCIDR needs."""
        cidr = state.get("ServiceCIDR", key)
        if cidr is None:
            return
        if is_terminating(cidr):
            if FINALIZER in finalizers_of(cidr) and not _is_needed(cidr, state):
                yield without_finalizer("ServiceCIDR", cidr, FINALIZER)
        elif FINALIZER not in finalizers_of(cidr):
            finalizers = [*finalizers_of(cidr), FINALIZER]
            yield UpdateObject("ServiceCIDR", with_fields(cidr, "metadata", finalizers=finalizers))
        elif not condition_holds(cidr, "Ready"):
            new = {"type": "Ready", "status": "True", "reason": "", "message": "Kubernetes Service CIDR is ready"}
            yield update_condition("ServiceCIDR", cidr, new, now)


def _terminating(state: ClusterState) -> list[ObjectKey]:
    return [key for key, cidr in state.all("ServiceCIDR").items() if is_terminating(cidr)]


def _is_needed(cidr: Object, state: ClusterState) -> bool:
    mine = [address_range(each) for each in spec_of(cidr).get("cidrs") or ()]
    others = [
        address_range(each)
        for other in state.all("ServiceCIDR").values()
        if not is_terminating(other)
        for each in spec_of(other).get("cidrs") or ()
    ]
    return any(
        any(number in each for each in mine) and not any(number in each for each in others)
        for service in state.all("Service").values()
        for number in address_numbers(service)
    )
