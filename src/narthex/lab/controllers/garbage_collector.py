"""The garbage collector (kubernetes `pkg/controller/garbagecollector`).

Deletes objects whose owners no longer exist, and completes foreground and orphaning deletion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.interfaces import DeleteObject, Object, ObjectKey, ReconcileResult, UpdateObject
from narthex.lab.controllers.objects import is_terminating, uid_of, with_metadata

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"


class GarbageCollector:
    """Reconciles objects of all kinds; the name in its keys is `KIND/NAME`."""

    name = "garbage-collector"
    kinds = frozenset[str]()

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return an object with owners or pending finalizers, and the dependents and waiting owners of a deleted one."""
        found: list[ObjectKey] = []
        if change.after is not None:
            pending = is_terminating(change.after) and change.after["metadata"].get("finalizers")
            if pending or change.after["metadata"].get("ownerReferences"):
                found.append(_key(change.kind, change.key))
        else:
            found += [_key(*each) for each in state.dependents(uid_of(change.latest))]
        if change.before is not None:
            owners = [state.find_by_uid(each.get("uid") or "") for each in _owners(change.before)]
            found += [_key(*each) for each in owners if each is not None and _has_pending_finalizers(state.get(*each))]
        return found

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Delete the object if all its owners are gone, or advance its deletion."""
        del now
        kind, _, name = key.name.partition("/")
        obj = state.get(kind, ObjectKey(key.namespace, name))
        if obj is None:
            return
        finalizers = obj["metadata"].get("finalizers") or []
        if is_terminating(obj):
            if ORPHAN in finalizers:
                yield from _orphan_dependents(kind, obj, finalizers, state)
            elif FOREGROUND in finalizers:
                yield from _delete_dependents(kind, obj, finalizers, state)
            return
        owners = _owners(obj)
        living = [each for each in owners if state.find_by_uid(each.get("uid") or "") is not None]
        if owners and not living:
            yield DeleteObject(kind, key.namespace, name)
        elif len(living) < len(owners):
            yield UpdateObject(kind, with_metadata(obj, ownerReferences=living))


def _key(kind: str, key: ObjectKey) -> ObjectKey:
    return ObjectKey(key.namespace, f"{kind}/{key.name}")


def _owners(obj: Object) -> list[Object]:
    return list(obj["metadata"].get("ownerReferences") or ())


def _has_pending_finalizers(obj: Object | None) -> bool:
    return obj is not None and is_terminating(obj) and bool(obj["metadata"].get("finalizers"))


def _orphan_dependents(kind: str, obj: Object, finalizers: list[str], state: ClusterState) -> Iterator[ReconcileResult]:
    uid = uid_of(obj)
    dependents = state.dependents(uid)
    for each, key in dependents:
        dependent = state.get(each, key)
        if dependent is not None:
            rest = [owner for owner in _owners(dependent) if owner.get("uid") != uid]
            yield UpdateObject(each, with_metadata(dependent, ownerReferences=rest or None))
    if not dependents:
        yield _without_finalizer(kind, obj, finalizers, ORPHAN)


def _delete_dependents(kind: str, obj: Object, finalizers: list[str], state: ClusterState) -> Iterator[ReconcileResult]:
    uid = uid_of(obj)
    blocked = False
    for each, key in state.dependents(uid):
        dependent = state.get(each, key)
        if dependent is None:
            continue
        mine = next(owner for owner in _owners(dependent) if owner.get("uid") == uid)
        blocked = blocked or bool(mine.get("blockOwnerDeletion"))
        others = [owner for owner in _owners(dependent) if owner.get("uid") != uid]
        if any(state.find_by_uid(owner.get("uid") or "") is not None for owner in others):
            yield UpdateObject(each, with_metadata(dependent, ownerReferences=others))
        elif not is_terminating(dependent):
            # Foreground deletion is recursive: its own dependents go first.
            if state.dependents(uid_of(dependent)) and FOREGROUND not in (
                dependent["metadata"].get("finalizers") or ()
            ):
                held = [*(dependent["metadata"].get("finalizers") or ()), FOREGROUND]
                yield UpdateObject(each, with_metadata(dependent, finalizers=held))
            else:
                yield DeleteObject(each, key.namespace, key.name)
    if not blocked:
        yield _without_finalizer(kind, obj, finalizers, FOREGROUND)


def _without_finalizer(kind: str, obj: Object, finalizers: list[str], which: str) -> UpdateObject:
    rest = [each for each in finalizers if each != which]
    return UpdateObject(kind, with_metadata(obj, finalizers=rest or None))
