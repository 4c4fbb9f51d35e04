"""The objects that each namespace has: ServiceAccount `default` and ConfigMap `kube-root-ca.crt`.

Kubernetes: `pkg/controller/serviceaccount/serviceaccounts_controller.go`, `pkg/controller/certificates/rootcacertpublisher`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.objects import (
    CreateObject,
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
    is_terminating,
)

SERVICE_ACCOUNT = "default"
ROOT_CA = "kube-root-ca.crt"
SYSTEM_NAMESPACE = "kube-system"
"""The ConfigMap of this namespace is the origin of those in the others."""
_DESCRIPTION = {"kubernetes.io/description": "Contains a CA bundle that verifies the certificate of the API server."}


class NamespaceObjectsController:
    """Creates the objects in each namespace, and again after they were deleted. The names of its keys are namespaces."""

    name = "namespace-objects-controller"
    kinds = frozenset({"Namespace", "ServiceAccount", "ConfigMap"})

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the namespace of a change, or all after a change of the certificate itself."""
        if change.kind == "Namespace":
            return [change.key]
        if change.key.name not in (SERVICE_ACCOUNT, ROOT_CA):
            return []
        if change.key == ObjectKey(SYSTEM_NAMESPACE, ROOT_CA):
            return state.all("Namespace").keys()
        return [ObjectKey("", change.key.namespace)]

    def reconcile(self, key: ObjectKey, state: ClusterState, _now: datetime) -> Iterator[ReconcileResult]:
        """Yield the writes that a namespace needs."""
        namespace = state.get("Namespace", key)
        if namespace is None or is_terminating(namespace):
            return
        if state.get("ServiceAccount", ObjectKey(key.name, SERVICE_ACCOUNT)) is None:
            account: Object = {"metadata": {"name": SERVICE_ACCOUNT, "namespace": key.name}}
            yield CreateObject("ServiceAccount", account)
        origin = state.get("ConfigMap", ObjectKey(SYSTEM_NAMESPACE, ROOT_CA))
        if origin is None:
            return
        have = state.get("ConfigMap", ObjectKey(key.name, ROOT_CA))
        if have is None:
            yield CreateObject("ConfigMap", root_ca(key.name, origin["data"]["ca.crt"]))
        elif have.get("data") != origin["data"]:
            yield UpdateObject("ConfigMap", {**have, "data": origin["data"]})


def root_ca(namespace: str, certificate: str) -> Object:
    """Return the ConfigMap with the certificate that verifies the API server."""
    metadata = {"name": ROOT_CA, "namespace": namespace, "annotations": _DESCRIPTION}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"ca.crt": certificate}}
