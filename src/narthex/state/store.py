"""The Store: events in, Snapshots out.

A Snapshot is an immutable value that shares all unchanged parts with the one before (hash array mapped tries), so
taking one costs what changed, not what there is.
"""

from __future__ import annotations

import msgspec
from immutables import Map

from narthex.model.events import Delete, Event, Synced, Upsert
from narthex.model.names import NamespacedName
from narthex.model.objects import (
    AnyObject,
    Deployment,
    EndpointSlice,
    IPAddressPool,
    L2Advertisement,
    Namespace,
    Node,
    Pod,
    Service,
    ServiceCIDR,
)

Slices = Map[str, EndpointSlice]
"""Slices of one Service, by their own name."""


_NO_SLICES: Slices = Map()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All objects at one moment."""

    services: Map[NamespacedName, Service] = Map()
    slices: Map[NamespacedName, Slices] = Map()
    """By the Service they belong to."""
    nodes: Map[NamespacedName, Node] = Map()
    service_cidrs: Map[NamespacedName, ServiceCIDR] = Map()
    pods: Map[NamespacedName, Pod] = Map()
    deployments: Map[NamespacedName, Deployment] = Map()
    namespaces: Map[NamespacedName, Namespace] = Map()
    address_pools: Map[NamespacedName, IPAddressPool] = Map()
    l2_advertisements: Map[NamespacedName, L2Advertisement] = Map()
    synced: bool = False
    """All lists have been complete once (row 1.15)."""


_BY_KIND = {
    Service: "services",
    Node: "nodes",
    ServiceCIDR: "service_cidrs",
    Pod: "pods",
    Deployment: "deployments",
    Namespace: "namespaces",
    IPAddressPool: "address_pools",
    L2Advertisement: "l2_advertisements",
}
_FIELD_OF_KIND = {kind.__name__: field for kind, field in _BY_KIND.items()}


class Store:
    """Folds events into the present. Not safe for threads; one loop owns it."""

    def __init__(self) -> None:
        self._now = Snapshot()
        self._slice_owner: dict[NamespacedName, NamespacedName] = {}
        self._changed: set[NamespacedName] = set()
        self._changed_pods: set[NamespacedName] = set()

    @property
    def snapshot(self) -> Snapshot:
        """The present."""
        return self._now

    def take_changed(self) -> frozenset[NamespacedName]:
        """Services that may differ since the last call: themselves or their slices. A hint for the planner: what is
        not in it is the same as before."""
        changed = frozenset(self._changed)
        self._changed.clear()
        return changed

    def take_changed_pods(self) -> frozenset[NamespacedName]:
        """Pods that differ since the last call."""
        changed = frozenset(self._changed_pods)
        self._changed_pods.clear()
        return changed

    def apply(self, event: Event) -> Snapshot:
        """Take one event in. An event that changes nothing leaves the identical Snapshot."""
        if isinstance(event, Synced):
            if not self._now.synced:
                self._now = msgspec.structs.replace(self._now, synced=True)
        elif isinstance(event, Upsert):
            self._upsert(event.object)
        else:
            self._delete(event)
        return self._now

    def _upsert(self, obj: AnyObject) -> None:
        if isinstance(obj, EndpointSlice):
            self._upsert_slice(obj)
            return
        field, key = _BY_KIND[type(obj)], obj.key
        held: Map[NamespacedName, AnyObject] = getattr(self._now, field)
        if held.get(key) == obj:
            return
        self._set(field, held.set(key, obj))
        self._note(type(obj).__name__, key)

    def _upsert_slice(self, obj: EndpointSlice) -> None:
        key, owner = obj.key, obj.service
        held = self._now.slices.get(owner, _NO_SLICES)
        if obj.service_name and held.get(obj.name) == obj:
            return
        if self._slice_owner.get(key, owner) != owner:
            self._drop_slice(key)
        if obj.service_name:
            self._slice_owner[key] = owner
            self._set("slices", self._now.slices.set(owner, held.set(obj.name, obj)))
            self._changed.add(owner)

    def _delete(self, event: Delete) -> None:
        if event.kind == "EndpointSlice":
            self._drop_slice(event.key)
            return
        field = _FIELD_OF_KIND[event.kind]
        held: Map[NamespacedName, AnyObject] = getattr(self._now, field)
        if event.key in held:
            self._set(field, held.delete(event.key))
            self._note(event.kind, event.key)

    def _drop_slice(self, key: NamespacedName) -> None:
        owner = self._slice_owner.pop(key, None)
        if owner is None:
            return
        slices = self._now.slices[owner].delete(key.name)
        left = self._now.slices.set(owner, slices) if slices else self._now.slices.delete(owner)
        self._set("slices", left)
        self._changed.add(owner)

    def _note(self, kind: str, key: NamespacedName) -> None:
        if kind == "Service":
            self._changed.add(key)
        elif kind == "Pod":
            self._changed_pods.add(key)

    def _set(self, field: str, value: object) -> None:
        self._now = msgspec.structs.replace(self._now, **{field: value})
