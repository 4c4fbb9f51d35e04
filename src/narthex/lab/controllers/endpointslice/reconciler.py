"""Endpoints into slices of at most a hundred, changing as few slices as can be.

Kubernetes: `staging/src/k8s.io/endpointslice/reconciler.go`, reconcileByPortMapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from narthex.lab.controllers.cluster_state import SERVICE_NAME, ClusterState
from narthex.lab.controllers.endpointslice.pod_endpoints import PortGroup
from narthex.lab.controllers.interfaces import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    UpdateObject,
)
from narthex.lab.controllers.objects import controlled_by, hash_suffix, is_terminating, key_of, labels_of, reference_to

MAX_ENDPOINTS = 100
"""In one slice."""


class SlicePlan(msgspec.Struct, frozen=True):
    """What the slices become."""

    filled: tuple[tuple[Object | None, tuple[Object, ...], tuple[Object, ...]], ...]
    """Slices that there are to be: the one it was (None: a new one), its ports, its endpoints."""
    empty: tuple[Object, ...]
    """Slices that there are and that nothing is left for."""


def pack_endpoints(
    wanted: Sequence[tuple[tuple[Object, ...], Sequence[Object]]], existing: Sequence[Object]
) -> SlicePlan:
    """Slices for these groups of ports and endpoints. Without any endpoint there is one slice that says so."""
    filled: list[tuple[Object | None, tuple[Object, ...], tuple[Object, ...]]] = []
    empty: list[Object] = []
    rest = list(existing)
    for ports, endpoints in wanted:
        mine = [each for each in rest if tuple(each.get("ports") or ()) == tuple(ports)]
        rest = [each for each in rest if not any(each is other for other in mine)]
        for old, some in _group(endpoints, mine):
            if some:
                filled.append((old, ports, tuple(some)))
            elif old is not None:
                empty.append(old)
    empty += rest
    if not filled:
        # The first of them stays, so that it can be told from a Service that nobody has looked at.
        placeholder = next((each for each in empty if not each.get("ports")), None)
        empty = [each for each in empty if each is not placeholder]
        filled.append((placeholder, (), ()))
    return SlicePlan(tuple(filled), tuple(empty))


def _group(endpoints: Sequence[Object], existing: Sequence[Object]) -> list[tuple[Object | None, list[Object]]]:
    missing = {_identity(each): each for each in endpoints}
    slices: list[tuple[Object | None, list[Object]]] = []
    touched: list[list[Object]] = []
    untouched: list[list[Object]] = []
    for old in existing:
        have = old.get("endpoints") or []
        kept = []
        for each in have:
            found = missing.pop(_identity(each), None)
            if found is not None:
                kept.append(found)
        slices.append((old, kept))
        if kept:
            (untouched if kept == have else touched).append(kept)
    new = list(missing.values())
    # Those that are written anyway are filled first, the fullest of them first.
    for some in sorted(touched, key=len, reverse=True):
        while new and len(some) < MAX_ENDPOINTS:
            some.append(new.pop(0))
    while new:
        # Then one that what is left just fits into, else a new one.
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


MANAGED_BY = "endpointslice.kubernetes.io/managed-by"


class EndpointSliceReconciler:
    """Writes the slices of one manager, and gives new ones names that were not given before."""

    def __init__(self, manager: str) -> None:
        self.manager = manager
        self._made: dict[ObjectKey, int] = {}

    def mine(self, owner: Object, service: ObjectKey, present: ClusterState) -> list[Object]:
        """The slices of a Service that this manager made for `owner`."""
        return [
            each
            for each in present.slices_of(service)
            if labels_of(each).get(MANAGED_BY) == self.manager
            and controlled_by(each, owner)
            and not is_terminating(each)
        ]

    def write(
        self,
        owner: Object,
        labels: Mapping[str, str],
        family: str,
        wanted: Sequence[PortGroup],
        existing: Sequence[Object],
    ) -> Iterator[CreateObject | UpdateObject | DeleteObject]:
        """The writes that make of the existing slices of this family the wanted endpoints. `labels`: those that the slices
        have besides what names their Service and manager."""
        labels = {**labels, SERVICE_NAME: owner["metadata"]["name"], MANAGED_BY: self.manager}
        packed = pack_endpoints(wanted, existing)
        free = list(packed.empty)
        for old, ports, endpoints in packed.filled:
            content = {"ports": list(ports), "endpoints": list(endpoints)}
            if old is None and free:
                # What would be deleted takes what would be made.
                old = free.pop(0)
            if old is None:
                yield CreateObject("EndpointSlice", self._new(owner, family, labels, content))
                continue
            same = labels_of(old) == labels and all((old.get(name) or []) == value for name, value in content.items())
            if not same:
                yield UpdateObject(
                    "EndpointSlice", {**old, "metadata": {**old["metadata"], "labels": labels}, **content}
                )
        yield from (delete_slice(each) for each in free)

    def _new(self, owner: Object, family: str, labels: Mapping[str, str], content: Object) -> Object:
        key = key_of(owner)
        self._made[key] = self._made.get(key, 0) + 1
        end = hash_suffix(f"{self.manager} {key} {owner['metadata'].get('uid')} {self._made[key]}", 5)
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
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


def delete_slice(slice_: Object) -> DeleteObject:
    """The end of a slice."""
    key = key_of(slice_)
    return DeleteObject("EndpointSlice", key.namespace, key.name)
