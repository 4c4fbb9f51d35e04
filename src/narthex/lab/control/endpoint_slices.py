"""Services with a selector get EndpointSlices (kubernetes `pkg/controller/endpointslice`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from narthex.lab.control.endpoints import endpoints_of, families_of
from narthex.lab.control.hints import hinted
from narthex.lab.control.objects import (
    key_of,
    labels_of,
    leaving,
    letters,
    pod_addresses,
    pod_over,
    pod_ready,
    reference_to,
    spec_of,
)
from narthex.lab.control.packing import Packed, pack
from narthex.lab.control.present import SERVICE_NAME, Present, Seen
from narthex.lab.control.view import Answer, Create, Delete, Key, Object, Update

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
MANAGER = "endpointslice-controller.k8s.io"
HEADLESS = "service.kubernetes.io/headless"
_NODE_LABELS = ("topology.kubernetes.io/zone",)


class EndpointSlices:
    """Keeps the slices that it has made; those of others are left alone."""

    name = "endpointslice-controller"

    def __init__(self) -> None:
        self._made: dict[Key, int] = {}

    def concerned(self, seen: Seen, present: Present) -> Iterable[Key]:
        """The Service itself, those that select a pod, the one of a slice, those with pods on a node that has moved."""
        if seen.kind == "Service":
            return [seen.key]
        if seen.kind == "Pod":
            before, after = _shown(seen.before), _shown(seen.after)
            if before == after:
                return []
            labels = [labels_of(pod) for pod in (seen.before, seen.after) if pod is not None]
            return present.selected_by("Service", seen.key.namespace, *labels)
        if seen.kind == "EndpointSlice":
            names = {labels_of(each).get(SERVICE_NAME) for each in (seen.before, seen.after) if each is not None}
            return [Key(seen.key.namespace, name) for name in names if name]
        if seen.kind == "Node" and _zone(seen.before) != _zone(seen.after):
            return {
                key
                for pod in present.pods_on(seen.key.name)
                for key in present.selected_by("Service", key_of(pod).namespace, labels_of(pod))
            }
        return []

    def look(self, key: Key, present: Present, now: datetime) -> Iterator[Answer]:
        """What the Service's slices need to become."""
        del now
        service = present.get("Service", key)
        mine = [each for each in present.slices_of(key) if labels_of(each).get(MANAGED_BY) == MANAGER]
        if service is None or leaving(service):
            # Those of a Service that is gone go with their owner; ours to take are those that outlived it.
            yield from (_delete(each) for each in mine if not leaving(each))
            return
        if not spec_of(service).get("selector") or spec_of(service).get("type") == "ExternalName":
            if spec_of(service).get("type") == "ExternalName":
                yield from (_delete(each) for each in mine if not leaving(each))
            return
        pods = present.selected("Service", service)
        alive = [each for each in mine if not leaving(each)]
        families = families_of(service)
        yield from (_delete(each) for each in alive if each.get("addressType") not in families)
        for family in families:
            wanted = endpoints_of(service, pods, family, present)
            existing = [each for each in alive if each.get("addressType") == family]
            yield from self._family(key, service, family, hinted(service, wanted, present), existing)

    def _family(
        self,
        key: Key,
        service: Object,
        family: str,
        wanted: Sequence[tuple[tuple[Object, ...], Sequence[Object]]],
        existing: Sequence[Object],
    ) -> Iterator[Answer]:
        labels = _labels(service)
        packed: Packed = pack(wanted, existing)
        free = list(packed.empty)
        for old, ports, endpoints in packed.filled:
            if old is None and free:
                # What would be deleted takes what would be made.
                old = free.pop(0)
            if old is None:
                yield Create("EndpointSlice", self._new(key, service, family, labels, ports, endpoints))
                continue
            new = {
                **old,
                "metadata": {**old["metadata"], "labels": _kept(old, labels)},
                "ports": list(ports),
                "endpoints": list(endpoints),
            }
            if new != {**old, "ports": old.get("ports") or [], "endpoints": old.get("endpoints") or []}:
                yield Update("EndpointSlice", new)
        yield from (_delete(each) for each in free)

    def _new(
        self,
        key: Key,
        service: Object,
        family: str,
        labels: dict[str, str],
        ports: Sequence[Object],
        endpoints: Sequence[Object],
    ) -> Object:
        self._made[key] = self._made.get(key, 0) + 1
        end = letters(f"{key} {service['metadata'].get('uid')} {family} {self._made[key]}", 5)
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{key.name}-"[:58] + end,
                "generateName": f"{key.name}-",
                "namespace": key.namespace,
                "labels": labels,
                "ownerReferences": [reference_to(service)],
            },
            "addressType": family,
            "ports": list(ports),
            "endpoints": list(endpoints),
        }


def _labels(service: Object) -> dict[str, str]:
    """The Service's own, and what tells whose slice it is."""
    own = {
        name: value for name, value in labels_of(service).items() if name not in (MANAGED_BY, SERVICE_NAME, HEADLESS)
    }
    headless = {HEADLESS: ""} if spec_of(service).get("clusterIP") == "None" else {}
    return {**own, **headless, SERVICE_NAME: service["metadata"]["name"], MANAGED_BY: MANAGER}


def _kept(old: Object, labels: dict[str, str]) -> object:
    """The old mapping while it says the same, so that an unchanged slice is equal whatever the order."""
    have = old["metadata"].get("labels")
    return have if have == labels else labels


def _delete(slice_: Object) -> Delete:
    key = key_of(slice_)
    return Delete("EndpointSlice", key.namespace, key.name)


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
    return None if node is None else [labels_of(node).get(name) for name in _NODE_LABELS]
