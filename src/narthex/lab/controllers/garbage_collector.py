"""The garbage collector (kubernetes `pkg/controller/garbagecollector`).

Deletes objects whose owners no longer exist, and completes foreground and orphaning deletion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.objects import (
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
    finalizers_of,
    is_terminating,
    owners_of,
    uid_of,
    with_fields,
    without_finalizer,
)

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"


class GarbageCollector:
    """Reconciles objects of all kinds; the name in its keys is `KIND/NAME`."""

    name = "garbage-collector"
    kinds = frozenset[str]()

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return an object with owners or pending finalizers, and the dependents and waiting owners of a deleted one."""
        found: list[tuple[str, ObjectKey]] = []
        if change.after is None:
            found += state.dependents(uid_of(change.latest))
        elif owners_of(change.after) or _has_pending_finalizers(change.after):
            found.append((change.kind, change.key))
        if change.before is not None:
            owners = [state.find_by_uid(each.get("uid") or "") for each in owners_of(change.before)]
            found += [each for each in owners if each is not None and _has_pending_finalizers(state.get(*each))]
        return [ObjectKey(key.namespace, f"{kind}/{key.name}") for kind, key in found]

    def reconcile(self, key: ObjectKey, state: ClusterState, _now: datetime) -> Iterator[ReconcileResult]:
        """Delete the object if all its owners are gone, or advance its deletion."""
        kind, _, name = key.name.partition("/")
        own_key = ObjectKey(key.namespace, name)
        obj = state.get(kind, own_key)
        if obj is None:
            return
        if is_terminating(obj):
            if ORPHAN in finalizers_of(obj):
                yield from _orphan_dependents(kind, obj, state)
            elif FOREGROUND in finalizers_of(obj):
                yield from _delete_dependents(kind, obj, state)
            return
        owners = owners_of(obj)
        living = [each for each in owners if state.find_by_uid(each.get("uid") or "") is not None]
        if owners and not living:
            yield DeleteObject(kind, own_key)
        elif len(living) < len(owners):
            yield UpdateObject(kind, with_fields(obj, "metadata", ownerReferences=living))


def _has_pending_finalizers(obj: Object | None) -> bool:
    return obj is not None and is_terminating(obj) and bool(finalizers_of(obj))


def _orphan_dependents(kind: str, obj: Object, state: ClusterState) -> Iterator[ReconcileResult]:
    uid = uid_of(obj)
    dependents = state.dependents(uid)
    for each, key in dependents:
        dependent = state.get(each, key)
        if dependent is not None:
            rest = [owner for owner in owners_of(dependent) if owner.get("uid") != uid]
            yield UpdateObject(each, with_fields(dependent, "metadata", ownerReferences=rest or None))
    if not dependents:
        yield without_finalizer(kind, obj, ORPHAN)


def _delete_dependents(kind: str, obj: Object, state: ClusterState) -> Iterator[ReconcileResult]:
    uid = uid_of(obj)
    blocked = False
    for each, key in state.dependents(uid):
        dependent = state.get(each, key)
        if dependent is None:
            continue
        mine = next(owner for owner in owners_of(dependent) if owner.get("uid") == uid)
        blocked = blocked or bool(mine.get("blockOwnerDeletion"))
        others = [owner for owner in owners_of(dependent) if owner.get("uid") != uid]
        finalizers = finalizers_of(dependent)
        if any(state.find_by_uid(owner.get("uid") or "") is not None for owner in others):
            yield UpdateObject(each, with_fields(dependent, "metadata", ownerReferences=others))
        elif not is_terminating(dependent):
            # Foreground deletion is recursive: its own dependents go first.
            if state.dependents(uid_of(dependent)) and FOREGROUND not in finalizers:
                yield UpdateObject(each, with_fields(dependent, "metadata", finalizers=[*finalizers, FOREGROUND]))
            else:
                yield DeleteObject(each, key)
    if not blocked:
        yield without_finalizer(kind, obj, FOREGROUND)
