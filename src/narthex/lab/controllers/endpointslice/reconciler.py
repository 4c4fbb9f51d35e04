"""Distribution of endpoints over slices of at most 100, with as few writes as possible.

Kubernetes: `staging/src/k8s.io/endpointslice/reconciler.go`, reconcileByPortMapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from narthex.lab.controllers.cluster_state import SERVICE_NAME, ClusterState, ObjectChange
from narthex.lab.controllers.endpointslice.pod_endpoints import PortGroup
from narthex.lab.controllers.objects import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    UpdateObject,
    controlled_by,
    hash_suffix,
    is_terminating,
    key_of,
    labels_of,
    reference_to,
    with_fields,
)

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
MAX_ENDPOINTS = 100
"""Endpoints in one slice."""


class SlicePlan(msgspec.Struct, frozen=True):
    """The desired content of slices."""

    filled: tuple[tuple[Object | None, tuple[Object, ...], tuple[Object, ...]], ...]
    """Slices to keep or create: the existing slice (None for a new one), its ports, its endpoints."""
    empty: tuple[Object, ...]
    """Existing slices that are no longer needed."""


def pack_endpoints(
    desired: Sequence[tuple[tuple[Object, ...], Sequence[Object]]], existing: Sequence[Object]
) -> SlicePlan:
    """Distribute groups of endpoints over slices. Without endpoints, one empty slice remains as placeholder."""
    filled: list[tuple[Object | None, tuple[Object, ...], tuple[Object, ...]]] = []
    empty: list[Object] = []
    rest = list(existing)
    for ports, endpoints in desired:
        same_ports = [each for each in rest if tuple(each.get("ports") or ()) == tuple(ports)]
        rest = [each for each in rest if not any(each is other for other in same_ports)]
        for old, some in _distribute(endpoints, same_ports):
            if some:
                filled.append((old, ports, tuple(some)))
            elif old is not None:
                empty.append(old)
    empty += rest
    if not filled:
        # Keep one empty slice, which distinguishes the Service from one that was not reconciled yet.
        placeholder = next((each for each in empty if not each.get("ports")), None)
        empty = [each for each in empty if each is not placeholder]
        filled.append((placeholder, (), ()))
    return SlicePlan(tuple(filled), tuple(empty))


def _distribute(endpoints: Sequence[Object], existing: Sequence[Object]) -> list[tuple[Object | None, list[Object]]]:
    missing = {_identity(each): each for each in endpoints}
    slices: list[tuple[Object | None, list[Object]]] = []
    touched: list[list[Object]] = []
    untouched: list[list[Object]] = []
    for old in existing:
        have = old.get("endpoints") or []
        found = [missing.pop(_identity(each), None) for each in have]
        kept = [each for each in found if each is not None]
        slices.append((old, kept))
        if kept:
            (untouched if kept == have else touched).append(kept)
    new = list(missing.values())
    # Fill slices that change anyway, fullest first.
    for some in sorted(touched, key=len, reverse=True):
        while new and len(some) < MAX_ENDPOINTS:
            some.append(new.pop(0))
    while new:
        # Then the fullest unchanged slice with room for all the rest, else a new one.
        fitting = [each for each in untouched if len(each) + len(new) <= MAX_ENDPOINTS]
        if fitting:
            max(fitting, key=len).extend(new)
            break
        slices.append((None, new[:MAX_ENDPOINTS]))
        new = new[MAX_ENDPOINTS:]
    return slices


def _identity(endpoint: Mapping[str, Any]) -> tuple[object, ...]:
    target = endpoint.get("targetRef") or {}
    return (
        *endpoint["addresses"],
        endpoint.get("hostname"),
        endpoint.get("nodeName"),
        *(target.get(field) for field in ("kind", "namespace", "name", "uid")),
    )


class EndpointSliceReconciler:
    """Writes the slices of one manager and generates unique names for new ones."""

    def __init__(self, manager: str) -> None:
        self.manager = manager
        self._created: dict[ObjectKey, int] = {}

    def managed_slices(self, owner: Object, service: ObjectKey, state: ClusterState) -> list[Object]:
        """Return the slices of a Service that this manager created for `owner`."""
        return [
            each
            for each in state.slices_of(service)
            if labels_of(each).get(MANAGED_BY) == self.manager
            and controlled_by(each, owner)
            and not is_terminating(each)
        ]

    def reconcile(
        self,
        owner: Object,
        labels: Mapping[str, str],
        family: str,
        desired: Sequence[PortGroup],
        existing: Sequence[Object],
    ) -> Iterator[CreateObject | UpdateObject | DeleteObject]:
        """Yield the writes that bring the slices of one family to the desired endpoints.

        `labels` are those of the slices in addition to the Service's name and the manager.
        """
        labels = {**labels, SERVICE_NAME: owner["metadata"]["name"], MANAGED_BY: self.manager}
        plan = pack_endpoints(desired, existing)
        free = list(plan.empty)
        for old, ports, endpoints in plan.filled:
            content = {"ports": list(ports), "endpoints": list(endpoints)}
            if old is None and free:
                # Reuse a slice that would be deleted.
                old = free.pop(0)
            if old is None:
                yield CreateObject("EndpointSlice", self._new(owner, family, labels, content))
                continue
            same = labels_of(old) == labels and all((old.get(name) or []) == value for name, value in content.items())
            if not same:
                yield UpdateObject("EndpointSlice", {**with_fields(old, "metadata", labels=labels), **content})
        yield from delete_slices(free)

    def _new(self, owner: Object, family: str, labels: Mapping[str, str], content: Object) -> Object:
        key = key_of(owner)
        self._created[key] = self._created.get(key, 0) + 1
        end = hash_suffix(f"{self.manager} {key} {owner['metadata'].get('uid')} {self._created[key]}", 5)
        return {
            "metadata": {
                "name": f"{key.name}-"[:58] + end,
                "generateName": f"{key.name}-",
                "namespace": key.namespace,
                "labels": dict(labels),
                "ownerReferences": [reference_to(owner)],
            },
            "addressType": family,
            **content,
        }


def delete_slices(slices: Iterable[Object]) -> Iterator[DeleteObject]:
    """Yield the deletions of slices."""
    return (DeleteObject("EndpointSlice", key_of(each)) for each in slices)


def services_of_slice(change: ObjectChange) -> list[ObjectKey]:
    """Return the Services that an EndpointSlice belongs to before or after a change."""
    names = {labels_of(each).get(SERVICE_NAME) for each in change.versions}
    return [ObjectKey(change.key.namespace, name) for name in names if name]
