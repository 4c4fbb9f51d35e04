"""The controllers of Endpoints (kubernetes `pkg/controller/{endpoint,endpointslicemirroring}`).

One writes Endpoints for `kubectl describe service` and older clients, the other mirrors those of users into EndpointSlices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange, selector_of
from narthex.lab.controllers.endpointslice.controller import RESERVED, headless_label, services_of_pod
from narthex.lab.controllers.endpointslice.pod_endpoints import (
    FAMILIES,
    PodEndpoints,
    PortGroup,
    endpoint_port,
    families_of,
)
from narthex.lab.controllers.endpointslice.reconciler import EndpointSliceReconciler, delete_slices, services_of_slice
from narthex.lab.controllers.objects import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
    annotations_of,
    is_terminating,
    labels_of,
    spec_of,
    with_fields,
)

_MANAGED_BY = "endpoints.kubernetes.io/managed-by"
_MANAGER = "endpoint-controller"
_OVER_CAPACITY = "endpoints.kubernetes.io/over-capacity"
_MAX_ADDRESSES = 1000
_SKIP_MIRROR = "endpointslice.kubernetes.io/skip-mirror"
_LEADER = "control-plane.alpha.kubernetes.io/leader"
_MIRRORING_MANAGER = "endpointslicemirroring-controller.k8s.io"


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

    def reconcile(self, key: ObjectKey, state: ClusterState, _now: datetime) -> Iterator[ReconcileResult]:
        """Yield the write that the Endpoints object needs."""
        service, have = state.get("Service", key), state.get("Endpoints", key)
        if service is None:
            if have is not None and labels_of(have).get(_MANAGED_BY) == _MANAGER:
                yield DeleteObject("Endpoints", key)
            return
        if is_terminating(service) or selector_of("Service", service) is None:
            return
        family = families_of(service)[0]
        groups = self._endpoints.of(service, state.selected_pods(service), family, state)
        subsets = [subset for ports, some in groups if (subset := _subset(ports, some, service)) is not None]
        labels = {**labels_of(service), **headless_label(service), _MANAGED_BY: _MANAGER}
        annotations = {_OVER_CAPACITY: "truncated"} if _truncate(subsets) else {}
        if have is None:
            metadata = {"name": key.name, "namespace": key.namespace, "labels": labels}
            if annotations:
                metadata["annotations"] = annotations
            yield CreateObject("Endpoints", {"metadata": metadata, "subsets": subsets})
        elif (have.get("subsets") or []) != subsets or labels_of(have) != labels:
            others = {name: value for name, value in annotations_of(have).items() if name != _OVER_CAPACITY}
            changed = with_fields(have, "metadata", labels=labels, annotations={**others, **annotations})
            yield UpdateObject("Endpoints", {**changed, "subsets": subsets})


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
    if not ready and not others:
        return None
    filled_ports = [{name: value for name, value in port.items() if value} for port in ports]
    subset = {"addresses": ready, "notReadyAddresses": others, "ports": filled_ports}
    return {name: value for name, value in subset.items() if value}


def _truncate(subsets: list[Object]) -> bool:
    """Keep at most 1,000 addresses, ready ones first; return True if some were removed."""
    room, truncated = _MAX_ADDRESSES, False
    for field in ("addresses", "notReadyAddresses"):
        for subset in subsets:
            have = subset.get(field) or []
            if len(have) > room:
                subset[field], truncated = have[:room], True
            room -= len(subset.get(field) or [])
    return truncated


class EndpointSliceMirroringController:
    """Mirrors user-managed Endpoints of Services without a selector into EndpointSlices, which proxies read."""

    name = "endpointslicemirroring-controller"
    kinds = frozenset({"Service", "Endpoints", "EndpointSlice"})

    def __init__(self) -> None:
        self._slices = EndpointSliceReconciler(_MIRRORING_MANAGER)

    def affected_keys(self, change: ObjectChange, _state: ClusterState) -> Iterable[ObjectKey]:
        """Return the Endpoints with the name of the changed Service, Endpoints, or slice label."""
        return services_of_slice(change) if change.kind == "EndpointSlice" else [change.key]

    def reconcile(self, key: ObjectKey, state: ClusterState, _now: datetime) -> Iterator[ReconcileResult]:
        """Yield the writes that the mirrored slices need."""
        endpoints, service = state.get("Endpoints", key), state.get("Service", key)
        if endpoints is None or is_terminating(endpoints):
            return
        existing = self._slices.managed_slices(endpoints, key, state)
        if service is None or spec_of(service).get("selector") or not _is_user_managed(endpoints):
            yield from delete_slices(existing)
            return
        labels = {name: value for name, value in labels_of(endpoints).items() if name not in RESERVED}
        for family in FAMILIES:
            groups = [group for subset in endpoints.get("subsets") or () if (group := _mirrored(subset, family))[1]]
            current = [each for each in existing if each.get("addressType") == family]
            if groups:
                yield from self._slices.reconcile(endpoints, labels, family, groups, current)
            else:
                yield from delete_slices(current)


def _is_user_managed(endpoints: Object) -> bool:
    labels = labels_of(endpoints)
    others = labels.get(_MANAGED_BY) == _MANAGER or labels.get(_SKIP_MIRROR) == "true"
    return not others and _LEADER not in annotations_of(endpoints)


def _mirrored(subset: Object, family: str) -> PortGroup:
    ports = tuple(endpoint_port(port, port["port"]) for port in subset.get("ports") or ())
    found: list[Object] = []
    for field, ready in (("addresses", True), ("notReadyAddresses", False)):
        for address in (subset.get(field) or ())[:_MAX_ADDRESSES]:
            if (":" in address["ip"]) == (family == "IPv6"):
                kept = {name: address[name] for name in ("hostname", "nodeName", "targetRef") if address.get(name)}
                found.append({"addresses": [address["ip"]], "conditions": {"ready": ready}, **kept})
    return ports, found
