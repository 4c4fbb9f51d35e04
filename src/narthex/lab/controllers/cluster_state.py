"""The cluster as the controllers know it: all objects, and the ways they are asked for.

It follows a View by its changes, so that one pod's change costs what it concerns, whatever else there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from narthex.lab.api.errors import ApiFault
from narthex.lab.api.kinds import KINDS
from narthex.lab.controllers.interfaces import Object, ObjectKey, RegistryView
from narthex.lab.controllers.objects import controller_of, key_of, labels_of, spec_of, uid_of
from narthex.lab.controllers.selectors import SelectorIndex, selects

SERVICE_NAME = "kubernetes.io/service-name"
"""The label of an EndpointSlice that names its Service."""


class ObjectChange(msgspec.Struct, frozen=True):
    """One change, as it was."""

    kind: str
    key: ObjectKey
    before: Object | None
    after: Object | None

    @property
    def latest(self) -> Object:
        """The object as it is, or as it was last."""
        return self.after if self.after is not None else self.before or {}


class ClusterState:
    """Objects by kind and key, with indexes."""

    def __init__(self) -> None:
        self.version = 0
        """Of the view that was followed last."""
        self._objects: dict[str, dict[ObjectKey, Object]] = {}
        self._owned: dict[str, set[tuple[str, ObjectKey]]] = {}
        self._uids: dict[str, tuple[str, ObjectKey]] = {}
        self._inside: dict[str, set[tuple[str, ObjectKey]]] = {}
        self._labelled: dict[tuple[str, str, str], set[ObjectKey]] = {}
        self._orphans: dict[tuple[str, str], set[ObjectKey]] = {}
        self._on_node: dict[str, set[ObjectKey]] = {}
        self._of_service: dict[ObjectKey, set[ObjectKey]] = {}
        self._selectors = {kind: SelectorIndex() for kind in ("Service", "ReplicaSet", "Deployment")}

    # Following.

    def follow(self, view: RegistryView) -> list[ObjectChange]:
        """What has changed since the last time, folded in."""
        if view.version == self.version:
            return []
        try:
            seen = [
                self._take(each.kind, ObjectKey(*each.key), each.after) for each in view.changes_since(self.version)
            ]
        except ApiFault:
            # That past is forgotten, as it is before the first time: everything anew.
            seen = list(self._list(view))
        self.version = view.version
        return seen

    def _list(self, view: RegistryView) -> Iterator[ObjectChange]:
        for kind in sorted({*view.kinds, *self._objects}):
            there = {key_of(obj): obj for obj in (view.list(kind) if kind in view.kinds else ())}
            for key in sorted(self._objects.get(kind, {}).keys() - there.keys()):
                yield self._take(kind, key, None)
            for key, obj in there.items():
                if self._objects.get(kind, {}).get(key) is not obj:
                    yield self._take(kind, key, obj)

    def _take(self, kind: str, key: ObjectKey, after: Object | None) -> ObjectChange:
        objects = self._objects.setdefault(kind, {})
        before = objects.get(key)
        if before is not None:
            self._index(kind, key, before, present=False)
        if after is None:
            objects.pop(key, None)
        else:
            after = _named(kind, after)
            objects[key] = after
            self._index(kind, key, after, present=True)
        if kind in self._selectors:
            self._selectors[kind].put(key, _demanded(kind, after))
        return ObjectChange(kind, key, before, after)

    def _index(self, kind: str, key: ObjectKey, obj: Object, *, present: bool) -> None:
        for place in self._places(kind, key, obj):
            index, at, what = place
            if present:
                index.setdefault(at, set()).add(what)
            elif at in index:
                index[at].discard(what)
                if not index[at]:
                    del index[at]
        uid = uid_of(obj)
        if uid and present:
            self._uids[uid] = (kind, key)
        elif uid:
            self._uids.pop(uid, None)

    def _places(self, kind: str, key: ObjectKey, obj: Object) -> Iterator[tuple[dict[Any, set[Any]], Any, Any]]:
        for reference in obj["metadata"].get("ownerReferences") or ():
            yield self._owned, reference.get("uid") or "", (kind, key)
        if kind in ("ReplicaSet", "Pod") and controller_of(obj) is None:
            yield self._orphans, (kind, key.namespace), key
        if key.namespace:
            yield self._inside, key.namespace, (kind, key)
        if kind == "Pod":
            for name, value in labels_of(obj).items():
                yield self._labelled, (key.namespace, name, value), key
            node = spec_of(obj).get("nodeName")
            if node:
                yield self._on_node, node, key
        elif kind == "EndpointSlice":
            service = labels_of(obj).get(SERVICE_NAME)
            if service:
                yield self._of_service, ObjectKey(key.namespace, service), key

    # Asking.

    def get(self, kind: str, key: ObjectKey) -> Object | None:
        """One object."""
        return self._objects.get(kind, {}).get(key)

    def all(self, kind: str) -> Mapping[ObjectKey, Object]:
        """Every object of a kind."""
        return self._objects.get(kind, {})

    def by_uid(self, uid: str) -> tuple[str, ObjectKey] | None:
        """What object has this uid."""
        return self._uids.get(uid)

    def owned(self, uid: str) -> list[tuple[str, ObjectKey]]:
        """Everything that names this uid among its owners, in order."""
        return sorted(self._owned.get(uid, ()))

    def owned_of(self, kind: str, owner: Object) -> list[Object]:
        """Objects of a kind that name `owner` among their owners, in order of keys."""
        return [self._objects[kind][key] for found, key in self.owned(uid_of(owner)) if found == kind]

    def orphans(self, kind: str, namespace: str) -> list[Object]:
        """Objects of a kind in a namespace that nobody controls (ReplicaSet, Pod), in order of names."""
        objects = self._objects.get(kind, {})
        return [objects[key] for key in sorted(self._orphans.get((kind, namespace), ()))]

    def pods_with(self, namespace: str, labels: Mapping[str, str]) -> set[ObjectKey]:
        """Pods that have all these labels; at least one is given."""
        sets = [self._labelled.get((namespace, name, value), set()) for name, value in labels.items()]
        sets.sort(key=len)
        return sets[0].intersection(*sets[1:])

    def pods_on(self, node: str) -> list[Object]:
        """Pods of a node, in order of keys."""
        pods = self._objects.get("Pod", {})
        return [pods[key] for key in sorted(self._on_node.get(node, ()))]

    def slices_of(self, service: ObjectKey) -> list[Object]:
        """EndpointSlices that name this Service, whoever made them, in order of names."""
        slices = self._objects.get("EndpointSlice", {})
        return [slices[key] for key in sorted(self._of_service.get(service, ()))]

    def selected_by(self, kind: str, namespace: str, *labels: Mapping[str, str]) -> set[ObjectKey]:
        """Objects of a kind (Service, ReplicaSet, Deployment) whose selector takes any of these sets of labels."""
        return {
            key
            for some in labels
            for key in self._selectors[kind].candidates(namespace, some)
            if selects(selector_of(kind, self._objects[kind][key]), some)
        }

    def selected(self, kind: str, owner: Object) -> list[Object]:
        """The pods that an object of such a kind selects, in order of names."""
        pods = self._objects.get("Pod", {})
        return [pods[key] for key in sorted(self.selected_keys(kind, owner))]

    def selected_keys(self, kind: str, owner: Object) -> set[ObjectKey]:
        """The same, as keys."""
        selector = selector_of(kind, owner)
        if selector is None:
            return set()
        namespace, demanded = key_of(owner).namespace, selector.get("matchLabels")
        if demanded:
            found = self.pods_with(namespace, demanded)
        else:
            found = {key for of, key in self._inside.get(namespace, ()) if of == "Pod"}
        if not selector.get("matchExpressions"):
            return found
        pods = self._objects.get("Pod", {})
        return {key for key in found if selects(selector, labels_of(pods[key]))}


def selector_of(kind: str, obj: Object) -> Mapping[str, Any] | None:
    """The selector of a Service, ReplicaSet or Deployment, in the form of the latter two."""
    selector: Mapping[str, Any] | None = spec_of(obj).get("selector")
    if kind != "Service":
        return selector
    # An empty one of a Service selects nothing, and an ExternalName has no endpoints.
    return {"matchLabels": selector} if selector and spec_of(obj).get("type") != "ExternalName" else None


def _named(kind: str, obj: Object) -> Object:
    """The object with the apiVersion and kind that it may be held without."""
    if "kind" in obj and "apiVersion" in obj:
        return obj
    of = KINDS.get(kind)
    return {"apiVersion": of.api_version, "kind": of.kind, **obj} if of is not None else obj


def _demanded(kind: str, obj: Object | None) -> Mapping[str, str] | None:
    selector = selector_of(kind, obj) if obj is not None else None
    if selector is None:
        return None
    labels = selector.get("matchLabels") or {}
    return labels if isinstance(labels, dict) else {}
