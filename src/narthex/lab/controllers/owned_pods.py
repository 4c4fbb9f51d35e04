"""What controllers that own pods share: the keys that a pod affects, the pods of a template, and when a pod is available."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.objects import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    condition,
    controller_of,
    hash_suffix,
    key_of,
    labels_of,
    parse_time,
    reference_to,
)

BURST = 500
"""Maximum number of pods created or deleted in one reconciliation, as upstream."""
_LONGEST_PREFIX = 58
"""Maximum length of a generateName prefix, as in the API server."""


def keys_with_pods(kind: str, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
    """Return the owner of a kind that changed, the one of a changed pod, or those that could adopt a pod without an owner."""
    if change.kind == kind:
        return [change.key]
    if change.kind != "Pod":
        return []
    found: set[ObjectKey] = set()
    for pod in change.versions:
        owner = controller_of(pod)
        if owner is None:
            found |= state.selected_by(kind, change.key.namespace, labels_of(pod))
        elif owner.get("kind") == kind:
            found.add(ObjectKey(change.key.namespace, owner["name"]))
    return found


class PodNames:
    """Names of new pods. None is given twice, so that a replay gives the same."""

    def __init__(self) -> None:
        self._created: dict[ObjectKey, int] = {}

    def next(self, owner: ObjectKey, state: ClusterState) -> str:
        """Return a name that no pod has."""
        while True:
            self._created[owner] = self._created.get(owner, 0) + 1
            name = f"{owner.name}-"[:_LONGEST_PREFIX] + hash_suffix(f"{owner} {self._created[owner]}", 5)
            if state.get("Pod", ObjectKey(owner.namespace, name)) is None:
                return name


def pod_of(
    owner: Object,
    template: Mapping[str, Any],
    name: str,
    *,
    generated: bool = True,
    labels: Mapping[str, str] | None = None,
    finalizers: Iterable[str] = (),
    **spec: Any,
) -> Object:
    """Return the pod of a template. `labels`, `finalizers`, and `spec` are added to those of the template.

    `generated` is False for a name that the pod keeps when it is replaced.
    """
    given = template.get("metadata") or {}
    own = {
        "labels": {**(given.get("labels") or {}), **(labels or {})},
        "annotations": given.get("annotations"),
        "finalizers": [*(given.get("finalizers") or ()), *finalizers],
    }
    key = key_of(owner)
    return {
        "metadata": {
            "name": name,
            **({"generateName": f"{key.name}-"} if generated else {}),
            "namespace": key.namespace,
            **{field: value for field, value in own.items() if value},
            "ownerReferences": [reference_to(owner)],
        },
        "spec": {**(template.get("spec") or {}), **spec},
    }


def created(owner: Object, pod: Object, now: datetime, source: str) -> Iterator[ReconcileResult]:
    """Yield the creation of a pod, and its Event."""
    yield CreateObject("Pod", pod)
    message = f"Created pod: {pod['metadata']['name']}"
    yield event_about(owner, "SuccessfulCreate", message, now, source=source)


def deleted(owner: Object, pod: Object, now: datetime, source: str) -> Iterator[ReconcileResult]:
    """Yield the deletion of a pod, and its Event."""
    yield DeleteObject("Pod", key_of(pod))
    message = f"Deleted pod: {pod['metadata']['name']}"
    yield event_about(owner, "SuccessfulDelete", message, now, source=source)


def available_at(pod: Object, min_ready: timedelta, now: datetime) -> datetime:
    """Return the time at which a ready pod becomes available: Ready for `min_ready`."""
    if not min_ready:
        return now
    since = parse_time(condition(pod, "Ready").get("lastTransitionTime"))
    return (since or now) + min_ready
