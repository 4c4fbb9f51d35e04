"""Endpoints, the older form of slices: written for Services with a selector, mirrored into slices where a user wrote them.

`kubectl describe service` reads them, and so do older programs. Kubernetes: `pkg/controller/endpoint`,
`pkg/controller/endpointslicemirroring`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.endpointslice.controller import HEADLESS, services_of_pod
from narthex.lab.controllers.endpointslice.pod_endpoints import (
    PodEndpoints,
    families_of,
)
from narthex.lab.controllers.interfaces import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
)
from narthex.lab.controllers.objects import annotations_of, is_terminating, labels_of, spec_of

MANAGED_BY = "endpoints.kubernetes.io/managed-by"
MANAGER = "endpoint-controller"
_OVER_CAPACITY = "endpoints.kubernetes.io/over-capacity"
MAX_ADDRESSES = 1000


class EndpointsController:
    """One Endpoints for each Service with a selector, of its first family."""

    name = "endpoint-controller"
    kinds = frozenset({"Service", "Endpoints", "Pod"})

    def __init__(self, endpoints: PodEndpoints) -> None:
        self._endpoints = endpoints

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The Service, its Endpoints, the Services that select a pod."""
        if seen.kind in ("Service", "Endpoints"):
            return [seen.key]
        return services_of_pod(seen, present)

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """What the Endpoints need to become."""
        del now
        service, have = present.get("Service", key), present.get("Endpoints", key)
        if service is None:
            if have is not None and labels_of(have).get(MANAGED_BY) == MANAGER:
                yield DeleteObject("Endpoints", *key)
            return
        if (
            is_terminating(service)
            or not spec_of(service).get("selector")
            or spec_of(service).get("type") == "ExternalName"
        ):
            return
        family = families_of(service)[0]
        groups = self._endpoints.of(service, present.selected("Service", service), family, present)
        subsets = [subset for ports, some in groups if (subset := _subset(ports, some, service)) is not None]
        headless = {HEADLESS: ""} if spec_of(service).get("clusterIP") == "None" else {}
        labels = {**labels_of(service), **headless, MANAGED_BY: MANAGER}
        cut = _cut(subsets)
        if have is None:
            metadata = {"name": key.name, "namespace": key.namespace, "labels": labels}
            if cut:
                metadata["annotations"] = {_OVER_CAPACITY: "truncated"}
            yield CreateObject(
                "Endpoints", {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets}
            )
        elif (have.get("subsets") or []) != subsets or labels_of(have) != labels:
            notes = {name: value for name, value in annotations_of(have).items() if name != _OVER_CAPACITY}
            metadata = {**have["metadata"], "labels": labels, "annotations": notes}
            if cut:
                metadata["annotations"] = {**notes, _OVER_CAPACITY: "truncated"}
            yield UpdateObject("Endpoints", {**have, "metadata": metadata, "subsets": subsets})


def _subset(ports: Iterable[Object], endpoints: Iterable[Object], service: Object) -> Object | None:
    ready: list[Object] = []
    others: list[Object] = []
    for endpoint in endpoints:
        conditions = endpoint["conditions"]
        if conditions["terminating"] and not spec_of(service).get("publishNotReadyAddresses"):
            continue
        address = {"ip": endpoint["addresses"][0], "targetRef": endpoint["targetRef"]}
        address |= {field: endpoint[field] for field in ("nodeName", "hostname") if field in endpoint}
        (ready if conditions["ready"] else others).append(address)
    subset: Object = {
        name: value
        for name, value in (("addresses", ready), ("notReadyAddresses", others), ("ports", _named(ports)))
        if value
    }
    return subset if ready or others else None


def _named(ports: Iterable[Object]) -> list[Object]:
    return [{name: value for name, value in port.items() if value} for port in ports]


def _cut(subsets: list[Object]) -> bool:
    """Leave a thousand addresses, ready ones first; whether there were more."""
    room, cut = MAX_ADDRESSES, False
    for field in ("addresses", "notReadyAddresses"):
        for subset in subsets:
            have = subset.get(field) or []
            if len(have) > room:
                subset[field], cut = have[:room], True
            room -= len(subset.get(field) or [])
    return cut
