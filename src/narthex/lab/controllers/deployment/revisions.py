"""Revisions of a Deployment: template hashes, the annotations of its ReplicaSets, and the revision history.

Kubernetes: `pkg/controller/deployment/util/deployment_util.go`.
"""

from __future__ import annotations

from collections.abc import Sequence

from narthex.lab.controllers.controller_revisions import template_hash, without_empty
from narthex.lab.controllers.deployment.rolling import ReplicaSetSize, RolloutLimits
from narthex.lab.controllers.objects import (
    Object,
    annotations_of,
    decimal,
    integer_or,
    is_terminating,
    key_of,
    reference_to,
    replicas_of,
    spec_of,
    status_of,
    with_fields,
)

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
HISTORY = "deployment.kubernetes.io/revision-history"
DESIRED_REPLICAS = "deployment.kubernetes.io/desired-replicas"
MAX_REPLICAS = "deployment.kubernetes.io/max-replicas"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_NOT_COPIED = frozenset(
    {_LAST_APPLIED, REVISION, HISTORY, DESIRED_REPLICAS, MAX_REPLICAS, "deprecated.deployment.rollback.to"}
)
_HISTORY_LENGTH = 2000


def is_of_template(replica_set: Object, deployment: Object) -> bool:
    """Return True if the ReplicaSet has the Deployment's current template."""
    mine = spec_of(replica_set).get("template") or {}
    metadata = mine.get("metadata") or {}
    labels = {name: value for name, value in (metadata.get("labels") or {}).items() if name != HASH_LABEL}
    mine = {**mine, "metadata": {**metadata, "labels": labels}}
    return bool(without_empty(mine) == without_empty(spec_of(deployment).get("template") or {}))


def creation_order(replica_set: Object) -> tuple[str, int, str]:
    """Return a sort key: oldest first, by revision within one second."""
    metadata = replica_set["metadata"]
    return metadata.get("creationTimestamp") or "", revision_of(replica_set), metadata["name"]


def revision_of(obj: Object) -> int:
    """Return the revision annotation, 0 if absent."""
    return decimal(annotations_of(obj).get(REVISION, ""), 15) or 0


def size_of(replica_set: Object) -> ReplicaSetSize:
    """Return the replica counts of a ReplicaSet for the rollout arithmetic."""
    replicas = replicas_of(replica_set)
    return ReplicaSetSize(
        name=replica_set["metadata"]["name"],
        replicas=replicas,
        available=min(replicas, integer_or(status_of(replica_set).get("availableReplicas"))),
        max_pods_before=decimal(annotations_of(replica_set).get(MAX_REPLICAS, "")),
    )


def new_replica_set(deployment: Object, revision: int, replicas: int, limits: RolloutLimits) -> Object:
    """Return the ReplicaSet for the Deployment's current template."""
    spec = spec_of(deployment)
    template = spec.get("template") or {}
    collisions = integer_or(status_of(deployment).get("collisionCount"))
    suffix = template_hash(template, collisions)
    key = key_of(deployment)
    metadata = template.get("metadata") or {}
    labels = {**(metadata.get("labels") or {}), HASH_LABEL: suffix}
    selector = spec.get("selector") or {}
    return {
        "metadata": {
            "name": f"{key.name}-{suffix}",
            "namespace": key.namespace,
            "labels": labels,
            "annotations": {**_copied(deployment), REVISION: str(revision), **size_annotations(limits)},
            "ownerReferences": [reference_to(deployment)],
        },
        "spec": {
            "replicas": replicas,
            **({"minReadySeconds": spec["minReadySeconds"]} if spec.get("minReadySeconds") else {}),
            "selector": {**selector, "matchLabels": {**(selector.get("matchLabels") or {}), HASH_LABEL: suffix}},
            "template": {**template, "metadata": {**metadata, "labels": labels}},
        },
    }


def _copied(deployment: Object) -> dict[str, str]:
    """Return the annotations that ReplicaSets get from their Deployment."""
    return {name: value for name, value in annotations_of(deployment).items() if name not in _NOT_COPIED}


def size_annotations(limits: RolloutLimits) -> dict[str, str]:
    """Return the annotations that record the Deployment's size, to tell scaling from a rollout."""
    return {DESIRED_REPLICAS: str(limits.replicas), MAX_REPLICAS: str(limits.max_pods)}


def scaled(replica_set: Object, replicas: int, limits: RolloutLimits) -> Object | None:
    """Return the ReplicaSet with another size; None if size and annotations are unchanged."""
    noted = size_annotations(limits)
    have = annotations_of(replica_set)
    if replicas_of(replica_set) == replicas and noted.items() <= have.items():
        return None
    return with_fields(with_fields(replica_set, "spec", replicas=replicas), "metadata", annotations={**have, **noted})


def update_revision(replica_set: Object, deployment: Object, others: Sequence[Object]) -> Object | None:
    """Return the new ReplicaSet with its revision and the Deployment's annotations; None if nothing changes.

    A template that returns (a rollback) gets the next revision; the old revision moves to its history annotation.
    """
    have = annotations_of(replica_set)
    result = {**have, **_copied(deployment)}
    revision = max((revision_of(each) for each in others), default=0) + 1
    old = revision_of(replica_set)
    if old < revision:
        result[REVISION] = str(revision)
        if old:
            history = [each for each in have.get(HISTORY, "").split(",") if each]
            while history and len(",".join([*history, str(old)])) > _HISTORY_LENGTH:
                del history[0]
            result[HISTORY] = ",".join([*history, str(old)])
    min_ready = spec_of(deployment).get("minReadySeconds") or None
    if result == have and (spec_of(replica_set).get("minReadySeconds") or None) == min_ready:
        return None
    return with_fields(with_fields(replica_set, "spec", minReadySeconds=min_ready), "metadata", annotations=result)


def surplus_revisions(old: Sequence[Object], limit: int) -> list[Object]:
    """Return the oldest ReplicaSets without pods that exceed `revisionHistoryLimit`."""
    empty = [each for each in old if not is_terminating(each) and _has_no_pods(each)]
    return sorted(empty, key=lambda each: (revision_of(each), creation_order(each)))[: max(0, len(empty) - limit)]


def _has_no_pods(replica_set: Object) -> bool:
    status = status_of(replica_set)
    observed = integer_or(status.get("observedGeneration")) >= integer_or(replica_set["metadata"].get("generation"))
    return not spec_of(replica_set).get("replicas") and not status.get("replicas") and observed
