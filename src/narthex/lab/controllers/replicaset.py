"""ReplicaSets become pods (kubernetes `pkg/controller/replicaset`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.interfaces import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
)
from narthex.lab.controllers.objects import (
    annotations_of,
    condition,
    controlled_by,
    controller_of,
    hash_suffix,
    integer_or,
    is_pod_active,
    is_pod_finished,
    is_pod_ready,
    is_terminating,
    key_of,
    labels_of,
    parse_time,
    reference_to,
    spec_of,
    status_of,
    uid_of,
    with_metadata,
)
from narthex.lab.controllers.selectors import is_empty

BURST = 500
"""Pods that one look makes or ends at most, as upstream."""
_LONGEST_PREFIX = 58
"""Of a name with a generated end, as the API server cuts it."""


class ReplicaSetController:
    """As many pods as `spec.replicas` says, made from the template; pods that fit and have no owner are adopted."""

    name = "replicaset-controller"
    kinds = frozenset({"ReplicaSet", "Pod"})

    def __init__(self) -> None:
        self._made: dict[ObjectKey, int] = {}

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The ReplicaSet itself, the owner of a pod, those that could adopt a pod without one."""
        if seen.kind == "ReplicaSet":
            return [seen.key]
        if seen.kind != "Pod":
            return []
        found: set[ObjectKey] = set()
        for pod in (seen.before, seen.after):
            if pod is None:
                continue
            owner = controller_of(pod)
            if owner is None:
                found |= present.selected_by("ReplicaSet", seen.key.namespace, labels_of(pod))
            elif owner.get("kind") == "ReplicaSet":
                found.add(ObjectKey(seen.key.namespace, owner["name"]))
        return found

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterable[ReconcileResult]:
        """Adopt and release, make and end pods, tell the status."""
        replica_set = present.get("ReplicaSet", key)
        return self._look(key, replica_set, present, now) if replica_set is not None else ()

    def _look(
        self, key: ObjectKey, replica_set: Object, present: ClusterState, now: datetime
    ) -> Iterator[ReconcileResult]:
        claims = list(_claims(replica_set, present))
        if claims:
            # What is adopted or released counts from the next look on.
            yield from claims
            return
        pods = present.owned_of("Pod", replica_set)
        active = [pod for pod in pods if is_pod_active(pod)]
        if not is_terminating(replica_set):
            missing = integer_or(spec_of(replica_set).get("replicas"), 1) - len(active)
            if missing > 0:
                for _ in range(min(missing, BURST)):
                    pod = self._new_pod(key, replica_set, present)
                    yield CreateObject("Pod", pod)
                    words = f"Created pod: {pod['metadata']['name']}"
                    yield event_about(replica_set, "SuccessfulCreate", words, now, source=self.name)
            elif missing < 0:
                related = _related(replica_set, present)
                for pod in pods_to_delete(active, related, min(-missing, BURST), now):
                    name = pod["metadata"]["name"]
                    yield DeleteObject("Pod", key.namespace, name)
                    words = f"Deleted pod: {name}"
                    yield event_about(replica_set, "SuccessfulDelete", words, now, source=self.name)
        yield from _status(replica_set, active, pods, now)

    def _new_pod(self, key: ObjectKey, replica_set: Object, present: ClusterState) -> Object:
        template = spec_of(replica_set).get("template") or {}
        given = template.get("metadata") or {}
        while True:
            self._made[key] = self._made.get(key, 0) + 1
            name = f"{key.name}-"[:_LONGEST_PREFIX] + hash_suffix(f"{key} {self._made[key]}", 5)
            if present.get("Pod", ObjectKey(key.namespace, name)) is None:
                break
        kept = {field: given[field] for field in ("labels", "annotations", "finalizers") if given.get(field)}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "generateName": f"{key.name}-",
                "namespace": key.namespace,
                **kept,
                "ownerReferences": [reference_to(replica_set)],
            },
            "spec": template.get("spec") or {},
        }


def _claims(replica_set: Object, present: ClusterState) -> Iterator[UpdateObject]:
    """Pods that fit and are nobody's become its own; its own that do not fit any more are let go."""
    selector, uid = spec_of(replica_set).get("selector"), uid_of(replica_set)
    selected = present.selected_keys("ReplicaSet", replica_set)
    for kind, key in present.owned(uid):
        if kind != "Pod" or key in selected:
            continue
        pod = present.get("Pod", key)
        if pod is not None and controlled_by(pod, replica_set) and not is_terminating(pod):
            owners = [each for each in pod["metadata"]["ownerReferences"] if each.get("uid") != uid]
            yield UpdateObject("Pod", with_metadata(pod, ownerReferences=owners or None))
    if is_terminating(replica_set) or is_empty(selector):
        return
    for pod in present.orphans("Pod", key_of(replica_set).namespace):
        if key_of(pod) in selected and is_pod_active(pod):
            owners = [*(pod["metadata"].get("ownerReferences") or ()), reference_to(replica_set)]
            yield UpdateObject("Pod", with_metadata(pod, ownerReferences=owners))


def _related(replica_set: Object, present: ClusterState) -> list[Object]:
    """The pods of all ReplicaSets with the same controller, its own included."""
    owner = controller_of(replica_set)
    siblings = [replica_set]
    if owner is not None:
        siblings = [
            obj
            for kind, key in present.owned(owner.get("uid") or "")
            if kind == "ReplicaSet" and (obj := present.get(kind, key)) is not None
        ]
    return [pod for each in siblings for pod in present.owned_of("Pod", each)]


def _status(replica_set: Object, active: list[Object], pods: list[Object], now: datetime) -> Iterator[ReconcileResult]:
    spec = spec_of(replica_set)
    wanted = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    patience = timedelta(seconds=integer_or(spec.get("minReadySeconds")))
    ready = [pod for pod in active if is_pod_ready(pod)]
    moments = [available_at(pod, patience, now) for pod in ready]
    status = {
        "replicas": len(active),
        "fullyLabeledReplicas": sum(1 for pod in active if wanted.items() <= labels_of(pod).items()),
        "readyReplicas": len(ready),
        "availableReplicas": sum(1 for at in moments if at <= now),
        "terminatingReplicas": sum(1 for pod in pods if is_terminating(pod) and not is_pod_finished(pod)),
        "observedGeneration": replica_set["metadata"].get("generation") or 0,
    }
    have = status_of(replica_set)
    if any(have.get(name, 0) != value for name, value in status.items()) or "replicas" not in have:
        kept = {name: value for name, value in status.items() if value or name in ("replicas", "observedGeneration")}
        others = {name: value for name, value in have.items() if name not in status}
        yield UpdateObject("ReplicaSet", {**replica_set, "status": {**others, **kept}}, "status")
    later = [at for at in moments if at > now]
    if later:
        yield RequeueAt(min(later))


def available_at(pod: Object, patience: timedelta, now: datetime) -> datetime:
    """When a ready pod has been ready for so long."""
    if not patience:
        return now
    since = parse_time((condition(pod, "Ready") or {}).get("lastTransitionTime"))
    return (since or now) + patience


DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


def pods_to_delete(pods: Iterable[Object], related: Iterable[Object], count: int, now: datetime) -> list[Object]:
    """`count` of the pods: those without a node, then pending, then not ready ones, then by deletion cost, then those
    that share their node with most of `related` (the pods of the same Deployment), then ready for the shortest time,
    restarted most often, and youngest (times by powers of two); then by name."""
    crowd = Counter(spec_of(pod).get("nodeName") for pod in related if is_pod_active(pod))

    def rank(pod: Object) -> tuple[object, ...]:
        node, status, ready = spec_of(pod).get("nodeName"), status_of(pod), is_pod_ready(pod)
        restarts = [each.get("restartCount") or 0 for each in status.get("containerStatuses") or ()]
        return (
            bool(node),
            _PHASES.get(status.get("phase") or "Pending", 0),
            ready,
            _cost(pod),
            -crowd[node],
            _age((condition(pod, "Ready") or {}).get("lastTransitionTime"), now) if ready else 0,
            -max(restarts, default=0),
            _age(pod["metadata"].get("creationTimestamp"), now),
            pod["metadata"]["name"],
        )

    return sorted(pods, key=rank)[:count]


def _cost(pod: Object) -> int:
    text = annotations_of(pod).get(DELETION_COST, "0")
    return int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) < 12 else 0


def _age(text: str | None, now: datetime) -> int:
    """The power of two of the seconds since: the larger, the longer it stays."""
    since = parse_time(text)
    seconds = (now - since).total_seconds() if since is not None else 0.0
    return int(math.log2(seconds)) if seconds >= 1 else -1
