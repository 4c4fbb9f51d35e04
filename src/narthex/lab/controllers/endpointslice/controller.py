"""Services with a selector get EndpointSlices (kubernetes `pkg/controller/endpointslice`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import SERVICE_NAME, ClusterState, ObjectChange
from narthex.lab.controllers.endpointslice.pod_endpoints import ZONE, PodEndpoints, families_of
from narthex.lab.controllers.endpointslice.reconciler import MANAGED_BY, EndpointSliceReconciler, delete_slice
from narthex.lab.controllers.endpointslice.topology_hints import has_automatic_mode, node_cpu_share, with_hints
from narthex.lab.controllers.interfaces import Object, ObjectKey, ReconcileResult
from narthex.lab.controllers.objects import (
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
"""Labels of slices that mean something."""


class EndpointSliceController:
    """Keeps the slices that it has made; those of others are left alone."""

    name = "endpointslice-controller"
    kinds = frozenset({"Service", "EndpointSlice", "Pod", "Node"})

    def __init__(self, endpoints: PodEndpoints) -> None:
        self._endpoints = endpoints
        self._writer = EndpointSliceReconciler(MANAGER)

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The Service itself, those that select a pod, the one of a slice, those with pods on a node that has moved."""
        if seen.kind == "Service":
            return [seen.key]
        if seen.kind == "Pod":
            return services_of_pod(seen, present)
        if seen.kind == "EndpointSlice":
            names = {labels_of(each).get(SERVICE_NAME) for each in (seen.before, seen.after) if each is not None}
            return [ObjectKey(seen.key.namespace, name) for name in names if name]
        return self._concerned_by_node(seen, present) if seen.kind == "Node" else []

    def _concerned_by_node(self, seen: ObjectChange, present: ClusterState) -> set[ObjectKey]:
        found: set[ObjectKey] = set()
        if _zone(seen.before) != _zone(seen.after):
            for pod in present.pods_on(seen.key.name):
                found |= present.selected_by("Service", key_of(pod).namespace, labels_of(pod))
        if node_cpu_share(seen.before) != node_cpu_share(seen.after):
            found |= {key for key, service in present.all("Service").items() if has_automatic_mode(service)}
        return found

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """What the Service's slices need to become."""
        del now
        service = present.get("Service", key)
        if service is None or is_terminating(service):
            # Its slices go with it: they have an owner.
            self._endpoints.forget(key)
            return
        existing = self._writer.mine(service, key, present)
        spec = spec_of(service)
        if spec.get("type") == "ExternalName":
            yield from map(delete_slice, existing)
            return
        if not spec.get("selector"):
            # What it had stays, and is now the user's to change.
            return
        pods = present.selected("Service", service)
        families = families_of(service)
        yield from (delete_slice(each) for each in existing if each.get("addressType") not in families)
        for family in families:
            wanted = with_hints(service, self._endpoints.of(service, pods, family, present), present)
            mine = [each for each in existing if each.get("addressType") == family]
            yield from self._writer.write(service, _labels(service), family, wanted, mine)


def _labels(service: Object) -> dict[str, str]:
    """The Service's own; a proxy has no use for those of a headless one."""
    headless = {HEADLESS: ""} if spec_of(service).get("clusterIP") == "None" else {}
    return {name: value for name, value in labels_of(service).items() if name not in RESERVED} | headless


def services_of_pod(seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
    """The Services that select a pod, or did, when something has changed that endpoints show."""
    if seen.kind != "Pod" or _shown(seen.before) == _shown(seen.after):
        return []
    labels = [labels_of(pod) for pod in (seen.before, seen.after) if pod is not None]
    return present.selected_by("Service", seen.key.namespace, *labels)


def _shown(pod: Object | None) -> object:
    """Everything of a pod that a slice shows."""
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
    """What of a node slices show: nothing without it."""
    return None if node is None else labels_of(node).get(ZONE)
