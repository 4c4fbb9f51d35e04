"""Services with a selector get EndpointSlices (kubernetes `pkg/controller/endpointslice`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import SERVICE_NAME, Present, Seen
from narthex.lab.controllers.endpointslice.pod_endpoints import ZONE, Endpoints, families_of
from narthex.lab.controllers.endpointslice.reconciler import MANAGED_BY, SliceWriter, delete
from narthex.lab.controllers.endpointslice.topology_hints import hinted, is_automatic, node_share
from narthex.lab.controllers.interfaces import Answer, Key, Object
from narthex.lab.controllers.objects import (
    key_of,
    labels_of,
    leaving,
    pod_addresses,
    pod_over,
    pod_ready,
    spec_of,
)

MANAGER = "endpointslice-controller.k8s.io"
HEADLESS = "service.kubernetes.io/headless"
RESERVED = frozenset({MANAGED_BY, SERVICE_NAME, HEADLESS})
"""Labels of slices that mean something."""


class EndpointSlices:
    """Keeps the slices that it has made; those of others are left alone."""

    name = "endpointslice-controller"
    kinds = frozenset({"Service", "EndpointSlice", "Pod", "Node"})

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._writer = SliceWriter(MANAGER)

    def concerned(self, seen: Seen, present: Present) -> Iterable[Key]:
        """The Service itself, those that select a pod, the one of a slice, those with pods on a node that has moved."""
        if seen.kind == "Service":
            return [seen.key]
        if seen.kind == "Pod":
            return concerned_by_pod(seen, present)
        if seen.kind == "EndpointSlice":
            names = {labels_of(each).get(SERVICE_NAME) for each in (seen.before, seen.after) if each is not None}
            return [Key(seen.key.namespace, name) for name in names if name]
        return self._concerned_by_node(seen, present) if seen.kind == "Node" else []

    def _concerned_by_node(self, seen: Seen, present: Present) -> set[Key]:
        found: set[Key] = set()
        if _zone(seen.before) != _zone(seen.after):
            for pod in present.pods_on(seen.key.name):
                found |= present.selected_by("Service", key_of(pod).namespace, labels_of(pod))
        if node_share(seen.before) != node_share(seen.after):
            found |= {key for key, service in present.all("Service").items() if is_automatic(service)}
        return found

    def look(self, key: Key, present: Present, now: datetime) -> Iterator[Answer]:
        """What the Service's slices need to become."""
        del now
        service = present.get("Service", key)
        if service is None or leaving(service):
            # Its slices go with it: they have an owner.
            self._endpoints.forget(key)
            return
        existing = self._writer.mine(service, key, present)
        spec = spec_of(service)
        if spec.get("type") == "ExternalName":
            yield from map(delete, existing)
            return
        if not spec.get("selector"):
            # What it had stays, and is now the user's to change.
            return
        pods = present.selected("Service", service)
        families = families_of(service)
        yield from (delete(each) for each in existing if each.get("addressType") not in families)
        for family in families:
            wanted = hinted(service, self._endpoints.of(service, pods, family, present), present)
            mine = [each for each in existing if each.get("addressType") == family]
            yield from self._writer.write(service, _labels(service), family, wanted, mine)


def _labels(service: Object) -> dict[str, str]:
    """The Service's own; a proxy has no use for those of a headless one."""
    headless = {HEADLESS: ""} if spec_of(service).get("clusterIP") == "None" else {}
    return {name: value for name, value in labels_of(service).items() if name not in RESERVED} | headless


def concerned_by_pod(seen: Seen, present: Present) -> Iterable[Key]:
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
        leaving(pod),
        pod_over(pod),
        pod_ready(pod),
        pod_addresses(pod),
        [spec.get(field) for field in ("nodeName", "hostname", "subdomain")],
        [container.get("ports") for container in spec.get("containers") or ()],
    )


def _zone(node: Object | None) -> object:
    """What of a node slices show: nothing without it."""
    return None if node is None else labels_of(node).get(ZONE)
