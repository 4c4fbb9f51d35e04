"""The EndpointSlice controller for Services with a selector (kubernetes `pkg/controller/endpointslice`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import SERVICE_NAME, ClusterState, ObjectChange
from narthex.lab.controllers.endpointslice.pod_endpoints import ZONE, PodEndpoints, families_of
from narthex.lab.controllers.endpointslice.reconciler import (
    MANAGED_BY,
    EndpointSliceReconciler,
    delete_slices,
    services_of_slice,
)
from narthex.lab.controllers.endpointslice.topology_hints import has_automatic_mode, node_cpu_share, with_hints
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    ReconcileResult,
    is_pod_finished,
    is_pod_ready,
    is_terminating,
    key_of,
    labels_of,
    pod_addresses,
    spec_of,
)

MANAGER = "endpointslice-controller.k8s.io"
HEADLESS = "service.kubernetes.io/headless"
RESERVED = frozenset({MANAGED_BY, SERVICE_NAME, HEADLESS})
"""Labels that the controllers manage and do not copy from Services."""


class EndpointSliceController:
    """Manages the slices that it has created; slices of other managers are left alone."""

    name = "endpointslice-controller"
    kinds = frozenset({"Service", "EndpointSlice", "Pod", "Node"})

    def __init__(self, endpoints: PodEndpoints) -> None:
        self._endpoints = endpoints
        self._slices = EndpointSliceReconciler(MANAGER)

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the Service, the Services that select a pod, the Service of a slice, or those with pods on a changed node."""
        if change.kind == "Service":
            return [change.key]
        if change.kind == "Pod":
            return services_of_pod(change, state)
        if change.kind == "EndpointSlice":
            return services_of_slice(change)
        return self._concerned_by_node(change, state) if change.kind == "Node" else []

    def _concerned_by_node(self, change: ObjectChange, state: ClusterState) -> set[ObjectKey]:
        found: set[ObjectKey] = set()
        if _zone(change.before) != _zone(change.after):
            for pod in state.pods_on_node(change.key.name):
                found |= state.selected_by("Service", key_of(pod).namespace, labels_of(pod))
        if node_cpu_share(change.before) != node_cpu_share(change.after):
            found |= {key for key, service in state.all("Service").items() if has_automatic_mode(service)}
        return found

    def reconcile(self, key: ObjectKey, state: ClusterState, _now: datetime) -> Iterator[ReconcileResult]:
        """Yield the writes that the Service's slices need."""
        service = state.get("Service", key)
        if service is None or is_terminating(service):
            # The garbage collector deletes the slices.
            self._endpoints.forget(key)
            return
        existing = self._slices.managed_slices(service, key, state)
        spec = spec_of(service)
        if spec.get("type") == "ExternalName":
            yield from delete_slices(existing)
            return
        if not spec.get("selector"):
            # Existing slices stay and belong to the user from now on.
            return
        pods = state.selected_pods(service)
        families = families_of(service)
        yield from delete_slices(each for each in existing if each.get("addressType") not in families)
        for family in families:
            desired = with_hints(service, self._endpoints.of(service, pods, family, state), state)
            current = [each for each in existing if each.get("addressType") == family]
            yield from self._slices.reconcile(service, _labels(service), family, desired, current)


def _labels(service: Object) -> dict[str, str]:
    return {name: value for name, value in labels_of(service).items() if name not in RESERVED} | headless_label(service)


def headless_label(service: Object) -> dict[str, str]:
    """Return the label that lets proxies skip the endpoints of a headless Service; empty for others."""
    return {HEADLESS: ""} if spec_of(service).get("clusterIP") == "None" else {}


def services_of_pod(change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
    """Return the Services that select the pod before or after a change that endpoints reflect."""
    if change.kind != "Pod" or _shown(change.before) == _shown(change.after):
        return []
    return state.selected_by("Service", change.key.namespace, *map(labels_of, change.versions))


def _shown(pod: Object | None) -> object:
    """Return all fields of a pod that affect its endpoint."""
    if pod is None:
        return None
    spec, metadata = spec_of(pod), pod["metadata"]
    return (
        metadata.get("labels"),
        metadata.get("uid"),
        is_terminating(pod),
        is_pod_finished(pod),
        is_pod_ready(pod),
        pod_addresses(pod),
        [spec.get(field) for field in ("nodeName", "hostname", "subdomain")],
        [container.get("ports") for container in spec.get("containers") or ()],
    )


def _zone(node: Object | None) -> object:
    """Return the zone of a node, the only field that affects endpoints."""
    return None if node is None else labels_of(node).get(ZONE)
