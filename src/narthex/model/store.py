"""The object store: events in, Snapshots out.

A Snapshot is an immutable value that shares all unchanged parts with its predecessor (hash array mapped tries), so a new
one costs what changed, not what exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from immutables import Map, MapMutation

from narthex.model.objects import (
    AnyObject,
    Deployment,
    EndpointSlice,
    IPAddressPool,
    L2Advertisement,
    Namespace,
    NamespacedName,
    Node,
    Pod,
    Service,
    ServiceCIDR,
)


class Upsert(msgspec.Struct, frozen=True):
    """An object was added or modified."""

    object: AnyObject


class Delete(msgspec.Struct, frozen=True):
    """An object was deleted."""

    kind: str
    """Class name in `model.objects`: `Service`, `EndpointSlice`, ..."""
    key: NamespacedName


class Synced(msgspec.Struct, frozen=True):
    """The initial lists of a source are complete; nothing is written to the kernel before this (row 1.15)."""


Event = Upsert | Delete | Synced


class Slices(Mapping[str, EndpointSlice]):
    """The EndpointSlices of one Service by name, sorted by name. Immutable; mostly a single slice, so it holds just a tuple."""

    __slots__ = ("ordered",)

    def __init__(self, *ordered: EndpointSlice) -> None:
        """Store `ordered`, which must be sorted by name without duplicates."""
        self.ordered = ordered

    def put(self, one: EndpointSlice) -> Slices:
        """Return a copy with this slice added, replacing one of the same name."""
        name = one.name
        if not self.ordered or self.ordered[-1].name < name:
            return Slices(*self.ordered, one)
        rest = [each for each in self.ordered if each.name != name]
        return Slices(*sorted((*rest, one), key=lambda each: each.name))

    def without(self, name: str) -> Slices:
        """Return a copy without the slice of this name."""
        return Slices(*[each for each in self.ordered if each.name != name])

    def __getitem__(self, name: str) -> EndpointSlice:
        for each in self.ordered:
            if each.name == name:
                return each
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (each.name for each in self.ordered)

    def __len__(self) -> int:
        return len(self.ordered)

    def __repr__(self) -> str:
        return f"Slices({', '.join(self)})"


_NO_SLICES = Slices()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All objects at one moment."""

    services: Map[NamespacedName, Service] = Map()
    slices: Map[NamespacedName, Slices] = Map()
    """EndpointSlices, keyed by their Service."""
    nodes: Map[NamespacedName, Node] = Map()
    service_cidrs: Map[NamespacedName, ServiceCIDR] = Map()
    pods: Map[NamespacedName, Pod] = Map()
    deployments: Map[NamespacedName, Deployment] = Map()
    namespaces: Map[NamespacedName, Namespace] = Map()
    address_pools: Map[NamespacedName, IPAddressPool] = Map()
    l2_advertisements: Map[NamespacedName, L2Advertisement] = Map()
    synced: bool = False
    """True once all initial lists were complete (row 1.15)."""


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


ChangeCallback = Callable[[Event, AnyObject | None], object]
"""Called with each event that changed something and the previous object, which is None for a new object or `Synced`."""


class Store:
    """Folds events into the current Snapshot. Owned by one thread; any thread may read `snapshot`."""

    def __init__(self) -> None:
        self._now = Snapshot()
        self._open: dict[str, MapMutation[NamespacedName, Any]] = {}
        """Changed tables of the next Snapshot; empty between calls."""
        self._slice_owner: dict[NamespacedName, NamespacedName] = {}
        self._changed: set[NamespacedName] = set()
        self._changed_pods: set[NamespacedName] = set()

    @property
    def snapshot(self) -> Snapshot:
        """The current Snapshot."""
        return self._now

    def take_changed(self) -> frozenset[NamespacedName]:
        """Return and reset the Services whose object or slices may have changed since the last call.

        A hint for the planner: everything else is unchanged.
        """
        changed = frozenset(self._changed)
        self._changed.clear()
        return changed

    def take_changed_pods(self) -> frozenset[NamespacedName]:
        """Return and reset the Pods that changed since the last call."""
        changed = frozenset(self._changed_pods)
        self._changed_pods.clear()
        return changed

    def apply(self, event: Event) -> Snapshot:
        """Apply one event. An event that changes nothing returns the identical Snapshot."""
        return self.apply_all((event,))

    def apply_all(self, events: Iterable[Event], on_change: ChangeCallback | None = None) -> Snapshot:
        """Apply events in order and create one Snapshot for all of them, which costs a fraction of one for each."""
        synced = self._now.synced
        try:
            for event in events:
                if isinstance(event, Synced):
                    changed, before = not synced, None
                    synced = True
                elif isinstance(event, Upsert):
                    changed, before = self._upsert(event.object)
                else:
                    changed, before = self._delete(event)
                if changed and on_change is not None:
                    on_change(event, before)
        finally:
            fields = {field: table.finish() for field, table in self._open.items()}
            self._open = {}
            if fields or synced is not self._now.synced:
                self._now = msgspec.structs.replace(self._now, synced=synced, **fields)
        return self._now

    def _table(self, field: str) -> Mapping[NamespacedName, Any]:
        """Return the table for reading."""
        opened = self._open.get(field)
        table: Mapping[NamespacedName, Any] = getattr(self._now, field)
        return table if opened is None else opened  # type: ignore[return-value]  # It is a mapping; its types do not say so.

    def _opened(self, field: str) -> MapMutation[NamespacedName, Any]:
        """Return the table for writing."""
        if field not in self._open:
            self._open[field] = getattr(self._now, field).mutate()
        return self._open[field]

    def _upsert(self, obj: AnyObject) -> tuple[bool, AnyObject | None]:
        """Apply an object; return whether it changed something, and the previous object."""
        if isinstance(obj, EndpointSlice):
            return self._upsert_slice(obj)
        field, key = _BY_KIND[type(obj)], obj.key
        before: AnyObject | None = self._table(field).get(key)
        if before == obj:
            return False, before
        self._opened(field)[key] = obj
        self._note(type(obj).__name__, key)
        return True, before

    def _upsert_slice(self, obj: EndpointSlice) -> tuple[bool, EndpointSlice | None]:
        owner = obj.service
        held: Slices = self._table("slices").get(owner, _NO_SLICES)
        before = held.get(obj.name)
        if obj.service_name and before == obj:
            return False, before
        key = obj.key
        moved = self._slice_owner.get(key, owner) != owner and self._drop_slice(key) is not None
        if not obj.service_name:
            return moved, None
        self._slice_owner[key] = owner
        self._opened("slices")[owner] = held.put(obj)
        self._changed.add(owner)
        return True, before

    def _delete(self, event: Delete) -> tuple[bool, AnyObject | None]:
        if event.kind == "EndpointSlice":
            gone = self._drop_slice(event.key)
            return gone is not None, gone
        field = _FIELD_OF_KIND[event.kind]
        before: AnyObject | None = self._table(field).get(event.key)
        if before is not None:
            del self._opened(field)[event.key]
            self._note(event.kind, event.key)
        return before is not None, before

    def _drop_slice(self, key: NamespacedName) -> EndpointSlice | None:
        owner = self._slice_owner.pop(key, None)
        if owner is None:
            return None
        table = self._opened("slices")
        held: Slices = table[owner]
        if left := held.without(key.name):
            table[owner] = left
        else:
            del table[owner]
        self._changed.add(owner)
        return held[key.name]

    def _note(self, kind: str, key: NamespacedName) -> None:
        if kind == "Service":
            self._changed.add(key)
        elif kind == "Pod":
            self._changed_pods.add(key)
