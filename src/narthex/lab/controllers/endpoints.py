"""The Endpoints controller (kubernetes `pkg/controller/endpoint`), for `kubectl describe service` and older clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.endpointslice.controller import HEADLESS, services_of_pod
from narthex.lab.controllers.endpointslice.pod_endpoints import PodEndpoints, families_of
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
    """Maintains one Endpoints object, of the primary family, for each Service with a selector."""

    name = "endpoint-controller"
    kinds = frozenset({"Service", "Endpoints", "Pod"})

    def __init__(self, endpoints: PodEndpoints) -> None:
        self._endpoints = endpoints

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the key of the Service or Endpoints, or the Services that select a pod."""
        if change.kind in ("Service", "Endpoints"):
            return [change.key]
        return services_of_pod(change, state)

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Yield the write that the Endpoints object needs."""
        del now
        service, have = state.get("Service", key), state.get("Endpoints", key)
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
        groups = self._endpoints.of(service, state.selected_pods("Service", service), family, state)
        subsets = [subset for ports, some in groups if (subset := _subset(ports, some, service)) is not None]
        headless = {HEADLESS: ""} if spec_of(service).get("clusterIP") == "None" else {}
        labels = {**labels_of(service), **headless, MANAGED_BY: MANAGER}
        truncated = _truncate(subsets)
        if have is None:
            metadata = {"name": key.name, "namespace": key.namespace, "labels": labels}
            if truncated:
                metadata["annotations"] = {_OVER_CAPACITY: "truncated"}
            yield CreateObject(
                "Endpoints", {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets}
            )
        elif (have.get("subsets") or []) != subsets or labels_of(have) != labels:
            annotations = {name: value for name, value in annotations_of(have).items() if name != _OVER_CAPACITY}
            metadata = {**have["metadata"], "labels": labels, "annotations": annotations}
            if truncated:
                metadata["annotations"] = {**annotations, _OVER_CAPACITY: "truncated"}
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
        for name, value in (
            ("addresses", ready),
            ("notReadyAddresses", others),
            ("ports", _without_empty_fields(ports)),
        )
        if value
    }
    return subset if ready or others else None


def _without_empty_fields(ports: Iterable[Object]) -> list[Object]:
    return [{name: value for name, value in port.items() if value} for port in ports]


def _truncate(subsets: list[Object]) -> bool:
    """Keep at most 1,000 addresses, ready ones first; return True if some were removed."""
    room, truncated = MAX_ADDRESSES, False
    for field in ("addresses", "notReadyAddresses"):
        for subset in subsets:
            have = subset.get(field) or []
            if len(have) > room:
                subset[field], truncated = have[:room], True
            room -= len(subset.get(field) or [])
    return truncated
