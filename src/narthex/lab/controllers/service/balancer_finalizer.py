"""The finalizer of load balancers (KEP-980), as the service controller of a cloud provider keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
    finalizers_of,
    is_terminating,
    spec_of,
    with_fields,
    without_finalizer,
)

FINALIZER = "service.kubernetes.io/load-balancer-cleanup"
POOL = "IPAddressPool.metallb.io"


class BalancerFinalizerController:
    """Keeps a finalizer on Services of type LoadBalancer, in labs that have addresses for them.

    The lab releases addresses without it. Clients rely on it: a Service that exists no more has no load balancer any more.
    """

    name = "service-lb-controller"
    kinds = frozenset({"Service", POOL})

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the Service, and all of them when pools change."""
        return (change.key,) if change.kind == "Service" else state.all("Service")

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:  # noqa: ARG002
        """Yield the write that the Service needs."""
        service = state.get("Service", key)
        if service is None:
            return
        is_balanced = _is_balanced(service) and not is_terminating(service)
        finalizers = finalizers_of(service)
        if FINALIZER in finalizers and not is_balanced:
            yield without_finalizer("Service", service, FINALIZER)
        elif FINALIZER not in finalizers and is_balanced and state.all(POOL):
            yield UpdateObject("Service", with_fields(service, "metadata", finalizers=[*finalizers, FINALIZER]))


def _is_balanced(service: Object) -> bool:
    spec = spec_of(service)
    return spec.get("type") == "LoadBalancer" and not spec.get("loadBalancerClass")
