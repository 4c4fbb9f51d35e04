"""The controllers' indexed cache of all objects.

The cache follows a Registry by its changes, so the cost of a change depends only on the objects it concerns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import KINDS
from narthex.lab.api.registry import Registry
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    UpdateObject,
    controlled_by,
    controller_of,
    is_pod_finished,
    is_terminating,
    key_of,
    labels_of,
    owners_of,
    reference_to,
    spec_of,
    uid_of,
    with_fields,
)
from narthex.model.selector import is_empty, selects

SERVICE_NAME = "kubernetes.io/service-name"
"""The label of an EndpointSlice with the name of its Service."""


_POD_OWNERS = ("ReplicaSet", "DaemonSet", "StatefulSet", "Job")
"""Kinds that adopt pods by their selector."""


class ObjectChange(msgspec.Struct, frozen=True):
    """One object before and after a change."""

    kind: str
    key: ObjectKey
    before: Object | None
    after: Object | None

    @property
    def latest(self) -> Object:
        """The object after the change, or the last version of a deleted one."""
        return self.after if self.after is not None else self.before or {}

    @property
    def versions(self) -> list[Object]:
        """The object before and after the change, as far as it exists."""
        return [each for each in (self.before, self.after) if each is not None]


class ClusterState:
    """All objects by kind and key, with indexes by owner, label, node, and Service."""

    def __init__(self, kinds: Iterable[str] = ()) -> None:
        """Create an empty cache. `kinds` are those that it lists; empty: all."""
        self._kinds = frozenset(kinds)
        self.version = 0
        """Version of the registry at the last sync."""
        self._objects: dict[str, dict[ObjectKey, Object]] = {}
        self._owned: dict[str, set[tuple[str, ObjectKey]]] = {}
        self._uids: dict[str, tuple[str, ObjectKey]] = {}
        self._by_label: dict[tuple[str, str, str], set[ObjectKey]] = {}
        self._orphans: dict[tuple[str, str], set[ObjectKey]] = {}
        self._by_node: dict[str, set[ObjectKey]] = {}
        self._slices_by_service: dict[ObjectKey, set[ObjectKey]] = {}
        self._selectors = {kind: SelectorIndex() for kind in ("Service", "Deployment", *_POD_OWNERS)}

    def sync(self, registry: Registry) -> list[ObjectChange]:
        """Apply the changes since the last call and return them."""
        if registry.version == self.version:
            return []
        try:
            change = [
                self._apply(each.kind, ObjectKey(*each.key), each.after)
                for each in registry.changes_since(self.version)
            ]
        except StatusError:
            # The changes are no longer kept (or this is the first sync): list everything.
            change = list(self._relist(registry))
        self.version = registry.version
        return change

    def _relist(self, registry: Registry) -> Iterator[ObjectChange]:
        for kind in sorted(self._kinds or {*registry.kinds, *self._objects}):
            there = {key_of(obj): obj for obj in (registry.list(kind) if kind in registry.kinds else ())}
            for key in sorted(self._objects.get(kind, {}).keys() - there.keys()):
                yield self._apply(kind, key, None)
            for key, obj in there.items():
                if self._objects.get(kind, {}).get(key) is not obj:
                    yield self._apply(kind, key, obj)

    def _apply(self, kind: str, key: ObjectKey, after: Object | None) -> ObjectChange:
        objects = self._objects.setdefault(kind, {})
        before = objects.get(key)
        if before is not None:
            self._index(kind, key, before, state=False)
        if after is None:
            objects.pop(key, None)
        else:
            after = _with_type_meta(kind, after)
            objects[key] = after
            self._index(kind, key, after, state=True)
        if kind in self._selectors:
            self._selectors[kind].put(key, _required_labels(kind, after))
        return ObjectChange(kind, key, before, after)

    def _index(self, kind: str, key: ObjectKey, obj: Object, *, state: bool) -> None:
        for index, at, member in self._index_entries(kind, key, obj):
            if state:
                index.setdefault(at, set()).add(member)
            elif at in index:
                index[at].discard(member)
                if not index[at]:
                    del index[at]
        uid = uid_of(obj)
        if uid and state:
            self._uids[uid] = (kind, key)
        elif uid:
            self._uids.pop(uid, None)

    def _index_entries(self, kind: str, key: ObjectKey, obj: Object) -> Iterator[tuple[dict[Any, set[Any]], Any, Any]]:
        for reference in owners_of(obj):
            yield self._owned, reference.get("uid") or "", (kind, key)
        if kind in ("ReplicaSet", "ControllerRevision", "Pod") and controller_of(obj) is None:
            yield self._orphans, (kind, key.namespace), key
        if kind == "Pod":
            for name, value in labels_of(obj).items():
                yield self._by_label, (key.namespace, name, value), key
            node = spec_of(obj).get("nodeName")
            if node:
                yield self._by_node, node, key
        elif kind == "EndpointSlice":
            service = labels_of(obj).get(SERVICE_NAME)
            if service:
                yield self._slices_by_service, ObjectKey(key.namespace, service), key

    def get(self, kind: str, key: ObjectKey) -> Object | None:
        """Return an object, None if it does not exist."""
        return self._objects.get(kind, {}).get(key)

    def all(self, kind: str) -> Mapping[ObjectKey, Object]:
        """Return all objects of a kind, by key."""
        return self._objects.get(kind, {})

    def find_by_uid(self, uid: str) -> tuple[str, ObjectKey] | None:
        """Return the kind and key of the object with a UID."""
        return self._uids.get(uid)

    def dependents(self, uid: str) -> list[tuple[str, ObjectKey]]:
        """Return kind and key of all objects that reference the UID as an owner, sorted."""
        return sorted(self._owned.get(uid, ()))

    def dependents_of_kind(self, kind: str, owner: Object) -> list[Object]:
        """Return the objects of a kind that reference `owner` as an owner, sorted by key."""
        return [self._objects[kind][key] for found, key in self.dependents(uid_of(owner)) if found == kind]

    def orphans(self, kind: str, namespace: str) -> list[Object]:
        """Return the ReplicaSets, ControllerRevisions, or Pods of a namespace without a controller, sorted by name."""
        return self._sorted(kind, self._orphans.get((kind, namespace), ()))

    def pods_on_node(self, node: str) -> list[Object]:
        """Return the pods of a node, sorted by key."""
        return self._sorted("Pod", self._by_node.get(node, ()))

    def slices_of(self, service: ObjectKey) -> list[Object]:
        """Return all EndpointSlices of a Service of all managers, sorted by name."""
        return self._sorted("EndpointSlice", self._slices_by_service.get(service, ()))

    def selected_by(self, kind: str, namespace: str, *labels: Mapping[str, str]) -> set[ObjectKey]:
        """Return the keys of Services or controllers of a kind whose selector matches any of the label sets."""
        return {
            key
            for some in labels
            for key in self._selectors[kind].candidates(namespace, some)
            if selects(selector_of(kind, self._objects[kind][key]), some)
        }

    def selected_pods(self, service: Object) -> list[Object]:
        """Return the pods that a Service selects, sorted by name."""
        selector = selector_of("Service", service)
        return [] if selector is None else self.labelled_pods(key_of(service).namespace, selector["matchLabels"])

    def labelled_pods(self, namespace: str, labels: Mapping[str, str]) -> list[Object]:
        """Return the pods of a namespace that have all of some labels, sorted by name."""
        sets = [self._by_label.get((namespace, *label), set()) for label in labels.items()]
        smallest, *others = sorted(sets, key=len)
        return self._sorted("Pod", smallest.intersection(*others))

    def _sorted(self, kind: str, keys: Iterable[ObjectKey]) -> list[Object]:
        objects = self.all(kind)
        return [objects[key] for key in sorted(keys)]


def adopt_and_release(kind: str, owner: Object, state: ClusterState) -> Iterator[UpdateObject]:
    """Yield updates that release objects of a kind that `owner` no longer selects, and adopt those without a controller.

    `owner` has a selector of labels, as a Deployment has.
    """
    selector = spec_of(owner).get("selector")
    for each in state.dependents_of_kind(kind, owner):
        if controlled_by(each, owner) and not selects(selector, labels_of(each)) and not is_terminating(each):
            owners = [other for other in owners_of(each) if other.get("uid") != uid_of(owner)]
            yield UpdateObject(kind, with_fields(each, "metadata", ownerReferences=owners or None))
    if is_terminating(owner) or is_empty(selector):
        return
    for each in state.orphans(kind, key_of(owner).namespace):
        if selects(selector, labels_of(each)) and not is_terminating(each) and not is_pod_finished(each):
            owners = [*owners_of(each), reference_to(owner)]
            yield UpdateObject(kind, with_fields(each, "metadata", ownerReferences=owners))


def selector_of(kind: str, obj: Object) -> Mapping[str, Any] | None:
    """Return the selector of a Service, or of a controller, as a `metav1.LabelSelector`."""
    selector: Mapping[str, Any] | None = spec_of(obj).get("selector")
    if kind != "Service":
        return selector
    # A Service with an empty selector selects nothing, and an ExternalName has no endpoints.
    return {"matchLabels": selector} if selector and spec_of(obj).get("type") != "ExternalName" else None


def _with_type_meta(kind: str, obj: Object) -> Object:
    """Return the object with apiVersion and kind, which the registry may omit."""
    if "kind" in obj and "apiVersion" in obj:
        return obj
    of = KINDS.get(kind)
    return {"apiVersion": of.api_version, "kind": of.kind, **obj} if of is not None else obj


def _required_labels(kind: str, obj: Object | None) -> Mapping[str, str] | None:
    selector = selector_of(kind, obj) if obj is not None else None
    if selector is None:
        return None
    labels = selector.get("matchLabels")
    return labels if isinstance(labels, dict) else {}


Pair = tuple[str, str]


class SelectorIndex:
    """An index of the selectors of one kind, by labels that they could match.

    Each selector is filed under one of its required labels: the one with the fewest other selectors.
    """

    def __init__(self) -> None:
        self._filed_under: dict[ObjectKey, tuple[str, Pair | None]] = {}
        self._under: dict[tuple[str, Pair | None], set[ObjectKey]] = {}

    def put(self, key: ObjectKey, required: Mapping[str, str] | None) -> None:
        """Add or replace a selector by its required labels. None removes it; an empty mapping may match anything."""
        filed = self._filed_under.pop(key, None)
        if filed is not None:
            self._under[filed].discard(key)
            if not self._under[filed]:
                del self._under[filed]
        if required is None:
            return
        pairs: Iterable[Pair | None] = required.items() or [None]
        places = [(key.namespace, pair) for pair in pairs]
        chosen = min(places, key=lambda filed: (len(self._under.get(filed, ())), filed[1] or ("", "")))
        self._filed_under[key] = chosen
        self._under.setdefault(chosen, set()).add(key)

    def candidates(self, namespace: str, labels: Mapping[str, str]) -> Iterator[ObjectKey]:
        """Yield the keys of selectors that may match the labels. The caller still has to match the whole selector."""
        for pair in (None, *labels.items()):
            yield from self._under.get((namespace, pair), ())
