"""The ReplicaSet controller (kubernetes `pkg/controller/replicaset`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange, adopt_and_release
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
    annotations_of,
    condition,
    controller_of,
    integer_or,
    is_pod_active,
    is_pod_finished,
    is_pod_ready,
    is_terminating,
    labels_of,
    parse_time,
    replicas_of,
    spec_of,
    status_of,
)
from narthex.lab.controllers.owned_pods import BURST, PodNames, available_at, created, deleted, keys_with_pods, pod_of


class ReplicaSetController:
    """Keeps `spec.replicas` pods of the template, and adopts matching pods without an owner."""

    name = "replicaset-controller"
    kinds = frozenset({"ReplicaSet", "Pod"})

    def __init__(self) -> None:
        self._names = PodNames()

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the ReplicaSet, the owner of a pod, or the ReplicaSets that could adopt a pod without an owner."""
        return keys_with_pods("ReplicaSet", change, state)

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Adopt and release pods, create and delete pods, and update the status."""
        replica_set = state.get("ReplicaSet", key)
        if replica_set is None:
            return
        ownership_changes = list(adopt_and_release("Pod", replica_set, state))
        if ownership_changes:
            # The changed ownership takes effect in the next reconciliation.
            yield from ownership_changes
            return
        pods = state.dependents_of_kind("Pod", replica_set)
        active = [pod for pod in pods if is_pod_active(pod)]
        if not is_terminating(replica_set):
            missing = replicas_of(replica_set) - len(active)
            if missing > 0:
                for _ in range(min(missing, BURST)):
                    made = pod_of(replica_set, spec_of(replica_set).get("template") or {}, self._names.next(key, state))
                    yield from created(replica_set, made, now, self.name)
            elif missing < 0:
                related = _related(replica_set, state)
                for pod in pods_to_delete(active, related, min(-missing, BURST), now):
                    yield from deleted(replica_set, pod, now, self.name)
        yield from _status(replica_set, active, pods, now)


def _related(replica_set: Object, state: ClusterState) -> list[Object]:
    """Return the pods of all ReplicaSets with the same controller, including this one."""
    owner = controller_of(replica_set)
    siblings = [replica_set]
    if owner is not None:
        keys = [key for kind, key in state.dependents(owner.get("uid") or "") if kind == "ReplicaSet"]
        siblings = [state.all("ReplicaSet")[key] for key in keys]
    return [pod for each in siblings for pod in state.dependents_of_kind("Pod", each)]


def _status(replica_set: Object, active: list[Object], pods: list[Object], now: datetime) -> Iterator[ReconcileResult]:
    spec = spec_of(replica_set)
    desired = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    min_ready = timedelta(seconds=integer_or(spec.get("minReadySeconds")))
    ready = [pod for pod in active if is_pod_ready(pod)]
    moments = [available_at(pod, min_ready, now) for pod in ready]
    status = {
        "replicas": len(active),
        "fullyLabeledReplicas": sum(1 for pod in active if desired.items() <= labels_of(pod).items()),
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


DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


def pods_to_delete(pods: Iterable[Object], related: Iterable[Object], count: int, now: datetime) -> list[Object]:
    """Return `count` pods to delete first (kubernetes `controller_utils.go`, ActivePodsWithRanks).

    Order: pods without a node, pending, not ready, lower deletion cost, most pods of `related` (same Deployment) on the node,
    ready for a shorter time, more restarts, younger (times compared by powers of two), then by name.
    """
    pods_per_node = Counter(spec_of(pod).get("nodeName") for pod in related if is_pod_active(pod))

    def rank(pod: Object) -> tuple[object, ...]:
        """Return the sort key of a pod; the lowest is deleted first."""
        node, status, ready = spec_of(pod).get("nodeName"), status_of(pod), is_pod_ready(pod)
        restarts = [each.get("restartCount") or 0 for each in status.get("containerStatuses") or ()]
        return (
            bool(node),
            _PHASES.get(status.get("phase") or "Pending", 0),
            ready,
            _cost(pod),
            -pods_per_node[node],
            _age(condition(pod, "Ready").get("lastTransitionTime"), now) if ready else 0,
            -max(restarts, default=0),
            _age(pod["metadata"].get("creationTimestamp"), now),
            pod["metadata"]["name"],
        )

    return sorted(pods, key=rank)[:count]


def _cost(pod: Object) -> int:
    text = annotations_of(pod).get(DELETION_COST, "0")
    return int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) < 12 else 0


def _age(text: str | None, now: datetime) -> int:
    """Return the binary logarithm of the age in seconds."""
    since = parse_time(text)
    seconds = (now - since).total_seconds() if since is not None else 0.0
    return int(math.log2(seconds)) if seconds >= 1 else -1
