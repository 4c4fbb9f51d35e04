"""Endpoints, the older form of slices: written for Services with a selector, mirrored into slices where a user wrote them.

`kubectl describe service` reads them, and so do older programs. Kubernetes: `pkg/controller/endpoint`,
`pkg/controller/endpointslicemirroring`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.endpoint_slices import HEADLESS, RESERVED, concerned_by_pod
from narthex.lab.controllers.endpoints import FAMILIES, Endpoints, Group, families_of
from narthex.lab.controllers.objects import annotations_of, labels_of, leaving, spec_of
from narthex.lab.controllers.present import SERVICE_NAME, Present, Seen
from narthex.lab.controllers.slice_writing import SliceWriter, delete
from narthex.lab.controllers.view import Answer, Create, Delete, Key, Object, Update

MANAGED_BY = "endpoints.kubernetes.io/managed-by"
MANAGER = "endpoint-controller"
SKIP_MIRROR = "endpointslice.kubernetes.io/skip-mirror"
_LEADER = "control-plane.alpha.kubernetes.io/leader"
_MIRRORER = "endpointslicemirroring-controller.k8s.io"
_OVER_CAPACITY = "endpoints.kubernetes.io/over-capacity"
MAX_ADDRESSES = 1000


class EndpointsObjects:
    """One Endpoints for each Service with a selector, of its first family."""

    name = "endpoint-controller"
    kinds = frozenset({"Service", "Endpoints", "Pod"})

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    def concerned(self, seen: Seen, present: Present) -> Iterable[Key]:
        """The Service, its Endpoints, the Services that select a pod."""
        if seen.kind in ("Service", "Endpoints"):
            return [seen.key]
        return concerned_by_pod(seen, present)

    def look(self, key: Key, present: Present, now: datetime) -> Iterator[Answer]:
        """What the Endpoints need to become."""
        del now
        service, have = present.get("Service", key), present.get("Endpoints", key)
        if service is None:
            if have is not None and labels_of(have).get(MANAGED_BY) == MANAGER:
                yield Delete("Endpoints", *key)
            return
        if leaving(service) or not spec_of(service).get("selector") or spec_of(service).get("type") == "ExternalName":
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
            yield Create(
                "Endpoints", {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets}
            )
        elif (have.get("subsets") or []) != subsets or labels_of(have) != labels:
            notes = {name: value for name, value in annotations_of(have).items() if name != _OVER_CAPACITY}
            metadata = {**have["metadata"], "labels": labels, "annotations": notes}
            if cut:
                metadata["annotations"] = {**notes, _OVER_CAPACITY: "truncated"}
            yield Update("Endpoints", {**have, "metadata": metadata, "subsets": subsets})


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


class Mirrors:
    """Endpoints that a user wrote for a Service without a selector become slices, which is what proxies read."""

    name = "endpointslicemirroring-controller"
    kinds = frozenset({"Service", "Endpoints", "EndpointSlice"})

    def __init__(self) -> None:
        self._writer = SliceWriter(_MIRRORER)

    def concerned(self, seen: Seen, present: Present) -> Iterable[Key]:
        """The Endpoints, their Service, their slices."""
        del present
        if seen.kind in ("Service", "Endpoints"):
            return [seen.key]
        if seen.kind == "EndpointSlice":
            names = {labels_of(each).get(SERVICE_NAME) for each in (seen.before, seen.after) if each is not None}
            return [Key(seen.key.namespace, name) for name in names if name]
        return []

    def look(self, key: Key, present: Present, now: datetime) -> Iterator[Answer]:
        """What the slices need to become."""
        del now
        endpoints, service = present.get("Endpoints", key), present.get("Service", key)
        if endpoints is None or leaving(endpoints):
            return
        existing = self._writer.mine(endpoints, key, present)
        if service is None or spec_of(service).get("selector") or not _is_by_hand(endpoints):
            yield from map(delete, existing)
            return
        labels = {name: value for name, value in labels_of(endpoints).items() if name not in RESERVED}
        for family in FAMILIES:
            groups = [group for subset in endpoints.get("subsets") or () if (group := _mirrored(subset, family))[1]]
            mine = [each for each in existing if each.get("addressType") == family]
            if groups:
                yield from self._writer.write(endpoints, labels, family, groups, mine)
            else:
                yield from map(delete, mine)


def _is_by_hand(endpoints: Object) -> bool:
    labels = labels_of(endpoints)
    others = labels.get(MANAGED_BY) == MANAGER or labels.get(SKIP_MIRROR) == "true"
    return not others and _LEADER not in annotations_of(endpoints)


def _mirrored(subset: Object, family: str) -> Group:
    ports = tuple(
        {
            "name": port.get("name") or "",
            "protocol": port.get("protocol") or "TCP",
            "port": port["port"],
            **({"appProtocol": port["appProtocol"]} if port.get("appProtocol") else {}),
        }
        for port in subset.get("ports") or ()
    )
    found: list[Object] = []
    for field, ready in (("addresses", True), ("notReadyAddresses", False)):
        for address in (subset.get(field) or ())[:MAX_ADDRESSES]:
            if (":" in address["ip"]) == (family == "IPv6"):
                kept = {name: address[name] for name in ("hostname", "nodeName", "targetRef") if address.get(name)}
                found.append({"addresses": [address["ip"]], "conditions": {"ready": ready}, **kept})
    return ports, found
