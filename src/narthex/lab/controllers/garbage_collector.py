"""What belongs to nobody any more goes (kubernetes `pkg/controller/garbagecollector`).

An object whose owners are all gone is deleted. One that is deleted in the foreground waits until all that block it are gone;
one that is deleted as an orphan's owner first lets its dependents go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.interfaces import (
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
)
from narthex.lab.controllers.objects import is_terminating, uid_of, with_metadata

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"


class GarbageCollector:
    """Its keys have the kind before the name: there is one for any object of any kind."""

    name = "garbage-collector"
    kinds = frozenset[str]()

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """An object with owners or one that waits; the dependents of what is gone, the owners of what is gone."""
        found: list[ObjectKey] = []
        if seen.after is not None:
            waits = is_terminating(seen.after) and seen.after["metadata"].get("finalizers")
            if waits or seen.after["metadata"].get("ownerReferences"):
                found.append(_key(seen.kind, seen.key))
        else:
            found += [_key(*each) for each in present.owned(uid_of(seen.latest))]
        if seen.before is not None:
            owners = [present.by_uid(each.get("uid") or "") for each in _owners(seen.before)]
            found += [_key(*each) for each in owners if each is not None and _waits(present.get(*each))]
        return found

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Whether the object may stay."""
        del now
        kind, _, name = key.name.partition("/")
        obj = present.get(kind, ObjectKey(key.namespace, name))
        if obj is None:
            return
        finalizers = obj["metadata"].get("finalizers") or []
        if is_terminating(obj):
            if ORPHAN in finalizers:
                yield from _let_go(kind, obj, finalizers, present)
            elif FOREGROUND in finalizers:
                yield from _end_dependents(kind, obj, finalizers, present)
            return
        owners = _owners(obj)
        living = [each for each in owners if present.by_uid(each.get("uid") or "") is not None]
        if owners and not living:
            yield DeleteObject(kind, key.namespace, name)
        elif len(living) < len(owners):
            yield UpdateObject(kind, with_metadata(obj, ownerReferences=living))


def _key(kind: str, key: ObjectKey) -> ObjectKey:
    return ObjectKey(key.namespace, f"{kind}/{key.name}")


def _owners(obj: Object) -> list[Object]:
    return list(obj["metadata"].get("ownerReferences") or ())


def _waits(obj: Object | None) -> bool:
    return obj is not None and is_terminating(obj) and bool(obj["metadata"].get("finalizers"))


def _let_go(kind: str, obj: Object, finalizers: list[str], present: ClusterState) -> Iterator[ReconcileResult]:
    uid = uid_of(obj)
    dependents = present.owned(uid)
    for each, key in dependents:
        dependent = present.get(each, key)
        if dependent is not None:
            rest = [owner for owner in _owners(dependent) if owner.get("uid") != uid]
            yield UpdateObject(each, with_metadata(dependent, ownerReferences=rest or None))
    if not dependents:
        yield _finished(kind, obj, finalizers, ORPHAN)


def _end_dependents(kind: str, obj: Object, finalizers: list[str], present: ClusterState) -> Iterator[ReconcileResult]:
    uid = uid_of(obj)
    blocked = False
    for each, key in present.owned(uid):
        dependent = present.get(each, key)
        if dependent is None:
            continue
        mine = next(owner for owner in _owners(dependent) if owner.get("uid") == uid)
        blocked = blocked or bool(mine.get("blockOwnerDeletion"))
        others = [owner for owner in _owners(dependent) if owner.get("uid") != uid]
        if any(present.by_uid(owner.get("uid") or "") is not None for owner in others):
            yield UpdateObject(each, with_metadata(dependent, ownerReferences=others))
        elif not is_terminating(dependent):
            # Its own dependents are waited for as well: it must not be gone before them.
            if present.owned(uid_of(dependent)) and FOREGROUND not in (dependent["metadata"].get("finalizers") or ()):
                held = [*(dependent["metadata"].get("finalizers") or ()), FOREGROUND]
                yield UpdateObject(each, with_metadata(dependent, finalizers=held))
            else:
                yield DeleteObject(each, key.namespace, key.name)
    if not blocked:
        yield _finished(kind, obj, finalizers, FOREGROUND)


def _finished(kind: str, obj: Object, finalizers: list[str], which: str) -> UpdateObject:
    rest = [each for each in finalizers if each != which]
    return UpdateObject(kind, with_metadata(obj, finalizers=rest or None))
