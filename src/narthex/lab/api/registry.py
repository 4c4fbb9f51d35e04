"""The registry: the rules for writing any object, over the object store. Versions, conflicts, names, generations, deletion.

Objects are JSON values in the storage version of their kind. Callers must not modify what `get` and `list` return, nor what
they passed in. Not thread-safe; callers lock. Follows apiserver's registry/generic/registry/store.go and registry/rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict, Unpack

from narthex.lab.api import errors
from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import KINDS, ApiResource, resource_of_definition
from narthex.lab.api.store import ObjectStore, Raw, StoreChange

Admit = Callable[["Registry", ApiResource, Mapping[str, Any] | None, Raw, str], Raw]
"""Completes and validates an object before it is written. Arguments: registry, resource, stored object (None: it is created), new
object, subresource. Raises StatusError.
"""

_Raws = list[Raw]
_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
"""Characters of generated names (apimachinery's util/rand)."""
_POD_GRACE = 30
_PROPAGATIONS = {"Background": "", "Foreground": "foregroundDeletion", "Orphan": "orphan"}
"""Finalizers by propagation policy."""
_FIXED = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
)


def admit_all(registry: Registry, kind: ApiResource, held: Mapping[str, Any] | None, new: Raw, subresource: str) -> Raw:
    """Admit any object unchanged."""
    del registry, kind, held, subresource
    return new


class DeleteOptions(TypedDict, total=False):
    """Options of a deletion."""

    grace: int | None
    """Seconds that a Pod on a node gets; None: its own."""
    preconditions: Mapping[str, Any] | None
    """The `uid` and `resourceVersion` that the object must have."""
    propagation: str | None
    """Foreground and Orphan add a finalizer, which the garbage collector removes."""
    dry_run: bool


class Registry:
    """The objects of a cluster, over an ObjectStore."""

    def __init__(
        self,
        clock: Callable[[], datetime],
        entropy: Callable[[int], bytes],
        *,
        admit: Admit = admit_all,
        store: ObjectStore | None = None,
    ) -> None:
        """Create a registry.

        Args:
            clock: returns the time, with its zone.
            entropy: `entropy(n)` returns n random bytes, for uids and generated names.
            admit: completes and validates objects.
            store: the objects; a new store by default.
        """
        self.store = store if store is not None else ObjectStore()
        self.built_in: Mapping[str, ApiResource] = KINDS
        self.kinds: dict[str, ApiResource] = dict(KINDS)
        """By name; a CustomResourceDefinition adds to it."""
        self._clock = clock
        self._entropy = entropy
        self._admit = admit
        self._changed_kinds()

    @functools.cached_property
    def token_key(self) -> bytes:
        """The key that signs the tokens of service accounts."""
        return self._entropy(32)

    @property
    def version(self) -> int:
        """The version of the last change."""
        return self.store.version

    def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        """Return an object, None if it does not exist."""
        held = self.store.get(kind, (namespace, name))
        return None if held is None else held.raw

    def list(self, kind: str, namespace: str = "") -> _Raws:
        """Return a kind's objects of all namespaces or one, by namespace and name."""
        return [stored.raw for _, stored in self.store.entries(kind, namespace)]

    def changes_since(self, version: int) -> Iterable[StoreChange]:
        """Return the changes after a version. Raises StatusError (410) if they have been compacted."""
        if version < self.store.oldest:
            raise errors.expired()
        return self.store.changes(version)

    def now(self) -> datetime:
        """Return the time."""
        return self._clock()

    def stamp(self) -> str:
        """Return the time as metav1.Time."""
        return stamp(self._clock())

    def create(self, kind: str, obj: Mapping[str, Any], *, dry_run: bool = False) -> Raw:
        """Create an object and return it as stored. Raises StatusError: AlreadyExists, or an error of admission."""
        of = self._kind(kind)
        # Only `delete` sets the times of a deletion.
        unset = ("resourceVersion", "uid", "deletionTimestamp", "deletionGracePeriodSeconds")
        meta = {name: value for name, value in (obj.get("metadata") or {}).items() if name not in unset}
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = self._generated(of, meta)
        meta |= {"uid": self._uid(), "creationTimestamp": self.stamp()}
        if of.generation:
            meta["generation"] = 1
        if not of.namespaced:
            meta.pop("namespace", None)
        new = self._admit(self, of, None, {"apiVersion": of.api_version, "kind": of.kind, **obj, "metadata": meta}, "")
        key = (new["metadata"].get("namespace", ""), new["metadata"].get("name", ""))
        if self.store.get(of.name, key) is not None:
            raise errors.already_exists(of.plural, of.group, key[1])
        if dry_run:
            return new
        written = self.store.put(of.name, new)
        self._changed_kinds(of.name)
        return written

    def ensure(self, kind: str, obj: Mapping[str, Any]) -> None:
        """Create an object that does not exist. Raises StatusError."""
        meta = obj["metadata"]
        if self.get(kind, meta.get("namespace", ""), meta["name"]) is None:
            try:
                self.create(kind, obj)
            except StatusError as error:
                # The copy of another server's objects may be older than they are.
                if error.reason != "AlreadyExists":
                    raise

    def update(self, kind: str, obj: Mapping[str, Any], *, subresource: str = "", dry_run: bool = False) -> Raw:
        """Write an object, or one subresource of it, and return it as stored.

        A write without effect makes no new version. An object that is being deleted goes with its last finalizer. Raises StatusError:
        NotFound; Conflict if it carries another uid, or a resourceVersion that is not the current one.
        """
        of = self._kind(kind)
        given = obj.get("metadata") or {}
        key = (str(given.get("namespace") or "") if of.namespaced else "", str(given.get("name") or ""))
        held = self.get(of.name, *key)
        if held is None:
            raise errors.not_found(of.plural, of.group, key[1])
        self._check(of, held, given.get("resourceVersion"), given.get("uid"))
        new = self._merged(of, held, obj, subresource)
        new = self._admit(self, of, held, new, subresource)
        if of.generation and _spec(new) != _spec(held):
            new["metadata"]["generation"] = int(held["metadata"].get("generation") or 0) + 1
        if new == held or dry_run:
            return new
        written = self.store.put(of.name, new)
        self._changed_kinds(of.name)
        meta = written["metadata"]
        waits = of.name == "Pod" and meta.get("deletionGracePeriodSeconds") not in (None, 0)
        if meta.get("deletionTimestamp") and not meta.get("finalizers") and not waits and of.name != "Namespace":
            self._remove(of, key)
        return written

    def delete(self, kind: str, namespace: str, name: str, **options: Unpack[DeleteOptions]) -> Raw | None:
        """Delete an object. Return it if it still exists, otherwise None.

        A Pod on a node gets its grace, during which only `deletionTimestamp` is set; the kubelet then deletes it with 0. An object with
        finalizers remains until they are removed. Raises StatusError: NotFound, Conflict.
        """
        of = self._kind(kind)
        key = (namespace if of.namespaced else "", name)
        held = self.get(of.name, *key)
        if held is None:
            raise errors.not_found(of.plural, of.group, name)
        required, dry_run = options.get("preconditions") or {}, options.get("dry_run", False)
        self._check(of, held, required.get("resourceVersion"), required.get("uid"))
        meta = held["metadata"]
        if of.name == "Namespace" and not dry_run:
            return self._end_namespace(held)
        seconds = _grace(of, held, options.get("grace"))
        finalizers = _finalizers(meta, options.get("propagation"))
        if not seconds and not finalizers:
            if not dry_run:
                self._remove(of, key)
            return None
        before = meta.get("deletionGracePeriodSeconds")
        if dry_run or (meta.get("deletionTimestamp") and (before is None or seconds >= before)):
            # Grace can only be shortened.
            return held
        begun = self._clock() if before is None else _moment(meta["deletionTimestamp"]) - timedelta(seconds=before)
        marked = {
            **{name: value for name, value in meta.items() if name != "finalizers"},
            **({"finalizers": finalizers} if finalizers else {}),
            "deletionTimestamp": stamp(begun + timedelta(seconds=seconds)),
            "deletionGracePeriodSeconds": seconds,
        }
        if of.generation:
            marked["generation"] = int(meta.get("generation") or 0) + 1
        return self.store.put(of.name, {**held, "metadata": marked})

    def _kind(self, name: str) -> ApiResource:
        try:
            return self.kinds[name]
        except KeyError:
            raise StatusError(404, "NotFound", f"the server has no kind {name}") from None

    def _check(self, of: ApiResource, held: Mapping[str, Any], version: Any, uid: Any) -> None:
        meta = held["metadata"]
        if uid and uid != meta.get("uid"):
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {meta.get('uid', '')}"
            raise errors.conflict(of.plural, of.group, meta["name"], why)
        if version and version != meta["resourceVersion"]:
            raise errors.conflict(of.plural, of.group, meta["name"])

    def _merged(self, of: ApiResource, held: Raw, obj: Mapping[str, Any], subresource: str) -> Raw:
        """Return the object to store: `obj`, with what the request may not change taken from `held`."""
        fixed = {name: held["metadata"].get(name) for name in (*_FIXED, "resourceVersion")}
        meta = {name: value for name, value in (obj.get("metadata") or {}).items() if name not in fixed}
        meta |= {name: value for name, value in fixed.items() if value is not None}
        new: Raw = {"apiVersion": held.get("apiVersion"), "kind": held.get("kind")}
        if new["kind"] is None:
            new = {}
        rest = {name: value for name, value in obj.items() if name not in ("apiVersion", "kind", "metadata")}
        if subresource == "status":
            # As upstream, an update of the status also changes labels and annotations, except for some kinds.
            kept = {name: value for name, value in held.items() if name not in ("metadata", "status")}
            rest = {**kept, "status": rest.get("status") or {}}
            if of.custom or of.group == "apps":
                owned = {"managedFields": meta["managedFields"]} if "managedFields" in meta else {}
                meta = {**held["metadata"], **owned}
        elif subresource == "ephemeralcontainers":
            added = (obj.get("spec") or {}).get("ephemeralContainers") or []
            kept = {name: value for name, value in held.items() if name != "metadata"}
            rest = {**kept, "spec": {**held["spec"], "ephemeralContainers": added}}
            meta = {**held["metadata"]}
        elif of.has_status:
            rest.pop("status", None)
            if "status" in held:
                rest["status"] = held["status"]
        return {**new, **rest, "metadata": meta}

    def _remove(self, of: ApiResource, key: tuple[str, str]) -> None:
        self.store.delete(of.name, *key)
        self._changed_kinds(of.name)
        home = self.get("Namespace", "", key[0])
        if home is not None and home["metadata"].get("deletionTimestamp"):
            self._settle_namespace(key[0])

    def _end_namespace(self, held: Raw) -> Raw | None:
        """Delete a namespace's objects, and the namespace once it is empty. Return None if it is gone."""
        name, meta = held["metadata"]["name"], held["metadata"]
        if not meta.get("deletionTimestamp"):
            ending = {**held.get("status", {}), "phase": "Terminating"}
            marked = {**meta, "deletionTimestamp": self.stamp()}
            self.store.put("Namespace", {**held, "metadata": marked, "status": ending})
        for kind in self.kinds.values():
            for (_, each), stored in self.store.entries(kind.name, name) if kind.namespaced else ():
                if not stored.raw["metadata"].get("deletionTimestamp"):
                    self.delete(kind.name, name, each)
        self._settle_namespace(name)
        return self.get("Namespace", "", name)

    def _settle_namespace(self, name: str) -> None:
        """Delete a terminating namespace if it is empty."""
        if not any(self.store.entries(kind.name, name) for kind in self.kinds.values() if kind.namespaced):
            self.store.delete("Namespace", "", name)

    def _changed_kinds(self, changed: str = "CustomResourceDefinition") -> None:
        if changed != "CustomResourceDefinition":
            return
        found = [resource_of_definition(each) for each in self.list("CustomResourceDefinition")]
        self.kinds = {**self.built_in, **{each.name: each for each in found if each is not None}}

    def _uid(self) -> str:
        digits = bytearray(self._entropy(16))
        digits[6], digits[8] = digits[6] & 0x0F | 0x40, digits[8] & 0x3F | 0x80
        text = digits.hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def _generated(self, of: ApiResource, meta: Mapping[str, Any]) -> str:
        base = str(meta["generateName"])[:58]
        for _ in range(8):
            name = base + "".join(_SUFFIX[byte % len(_SUFFIX)] for byte in self._entropy(5))
            if self.store.get(of.name, (meta.get("namespace", "") if of.namespaced else "", name)) is None:
                break
        return name


def stamp(moment: datetime) -> str:
    """Format a time as metav1.Time: UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _spec(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in ("metadata", "status", "apiVersion", "kind")}


def _finalizers(meta: Mapping[str, Any], propagation: str | None) -> list[str]:
    """Return the finalizers of an object that is deleted with a propagation policy."""
    have = list(meta.get("finalizers") or ())
    if propagation not in _PROPAGATIONS:
        return have
    others = [each for each in have if each not in _PROPAGATIONS.values()]
    mine = _PROPAGATIONS[propagation]
    return [*others, mine] if mine else others


def _grace(of: ApiResource, held: Mapping[str, Any], asked: int | None) -> int:
    """Return the grace period in seconds. Only Pods that run on a node have one."""
    if of.name != "Pod":
        return 0
    spec = held.get("spec") or {}
    if not spec.get("nodeName") or (held.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    if asked is not None:
        return max(0, asked)
    own = spec.get("terminationGracePeriodSeconds")
    return _POD_GRACE if own is None else int(own)
