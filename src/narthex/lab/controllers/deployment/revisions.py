"""A Deployment's ReplicaSets as its revisions: which one is the present template's, and what they remember.

Kubernetes: `pkg/controller/deployment/util/deployment_util.go`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from narthex.lab.controllers.deployment.rolling import ReplicaSetSize, RolloutLimits
from narthex.lab.controllers.interfaces import Object
from narthex.lab.controllers.objects import (
    ALPHABET,
    annotations_of,
    integer_or,
    is_terminating,
    key_of,
    reference_to,
    spec_of,
    status_of,
    with_metadata,
    with_spec,
)

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
HISTORY = "deployment.kubernetes.io/revision-history"
DESIRED = "deployment.kubernetes.io/desired-replicas"
MOST = "deployment.kubernetes.io/max-replicas"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_NOT_COPIED = frozenset({_LAST_APPLIED, REVISION, HISTORY, DESIRED, MOST, "deprecated.deployment.rollback.to"})
_HISTORY_LENGTH = 2000


def template_hash(template: Mapping[str, Any], collisions: int) -> str:
    """The value of pod-template-hash: follows from the template and how often its name was taken."""
    content = msgspec.json.encode([_meant(template), collisions], order="deterministic")
    digits = int.from_bytes(hashlib.sha256(content).digest()[:4], "big")
    return "".join(ALPHABET[int(digit)] for digit in str(digits))


def is_of_template(replica_set: Object, deployment: Object) -> bool:
    """It was made from the Deployment's present template."""
    mine = spec_of(replica_set).get("template") or {}
    metadata = mine.get("metadata") or {}
    labels = {name: value for name, value in (metadata.get("labels") or {}).items() if name != HASH_LABEL}
    same: bool = _meant({**mine, "metadata": {**metadata, "labels": labels}}) == _meant(
        spec_of(deployment).get("template") or {}
    )
    return same


def _meant(value: Any) -> Any:
    """What is said, without what says nothing: clients in Go write null and empty structs for what is not there."""
    if isinstance(value, dict):
        kept = {name: _meant(each) for name, each in value.items()}
        return {name: each for name, each in kept.items() if each is not None and each != {} and each != []}
    return [_meant(each) for each in value] if isinstance(value, list) else value


def creation_order(replica_set: Object) -> tuple[str, int, str]:
    """Sorts the oldest first; those of one second by their revision."""
    metadata = replica_set["metadata"]
    return metadata.get("creationTimestamp") or "", revision_of(replica_set), metadata["name"]


def revision_of(obj: Object) -> int:
    """The revision in its annotations, 0 for none."""
    text = annotations_of(obj).get(REVISION, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def size_of(replica_set: Object) -> ReplicaSetSize:
    """It, as a rollout sees it."""
    replicas = integer_or(spec_of(replica_set).get("replicas"), 1)
    most = annotations_of(replica_set).get(MOST, "")
    return ReplicaSetSize(
        name=replica_set["metadata"]["name"],
        replicas=replicas,
        available=min(replicas, integer_or(status_of(replica_set).get("availableReplicas"))),
        most_before=int(most) if most.isascii() and most.isdigit() and len(most) < 10 else None,
    )


def new_replica_set(deployment: Object, revision: int, replicas: int, limits: RolloutLimits) -> Object:
    """The ReplicaSet of the present template."""
    spec = spec_of(deployment)
    template = spec.get("template") or {}
    collisions = integer_or(status_of(deployment).get("collisionCount"))
    end = template_hash(template, collisions)
    key = key_of(deployment)
    metadata = template.get("metadata") or {}
    labels = {**(metadata.get("labels") or {}), HASH_LABEL: end}
    selector = spec.get("selector") or {}
    annotations = {name: value for name, value in annotations_of(deployment).items() if name not in _NOT_COPIED}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"{key.name}-{end}",
            "namespace": key.namespace,
            "labels": labels,
            "annotations": {**annotations, REVISION: str(revision), **size_annotations(limits)},
            "ownerReferences": [reference_to(deployment)],
        },
        "spec": {
            "replicas": replicas,
            **({"minReadySeconds": spec["minReadySeconds"]} if spec.get("minReadySeconds") else {}),
            "selector": {**selector, "matchLabels": {**(selector.get("matchLabels") or {}), HASH_LABEL: end}},
            "template": {**template, "metadata": {**metadata, "labels": labels}},
        },
    }


def size_annotations(limits: RolloutLimits) -> dict[str, str]:
    """What every ReplicaSet remembers of the Deployment, to tell a scaling from a rollout."""
    return {DESIRED: str(limits.replicas), MOST: str(limits.most)}


def scaled(replica_set: Object, replicas: int, limits: RolloutLimits) -> Object | None:
    """It with another size; None when that is its size and what it remembers."""
    noted = size_annotations(limits)
    have = annotations_of(replica_set)
    if integer_or(spec_of(replica_set).get("replicas"), 1) == replicas and noted.items() <= have.items():
        return None
    return with_metadata(with_spec(replica_set, replicas=replicas), annotations={**have, **noted})


def update_revision(replica_set: Object, deployment: Object, others: Sequence[Object]) -> Object | None:
    """The present template's ReplicaSet with its revision and what it takes over of the Deployment; None when it has
    all that. A template that comes back (a rollback) gets the next revision, and its old one goes into its history."""
    have = annotations_of(replica_set)
    wanted = {name: value for name, value in annotations_of(deployment).items() if name not in _NOT_COPIED}
    result = {**have, **wanted}
    revision = max((revision_of(each) for each in others), default=0) + 1
    old = revision_of(replica_set)
    if old < revision:
        result[REVISION] = str(revision)
        if old:
            history = [each for each in have.get(HISTORY, "").split(",") if each]
            while history and len(",".join([*history, str(old)])) > _HISTORY_LENGTH:
                del history[0]
            result[HISTORY] = ",".join([*history, str(old)])
    patience = spec_of(deployment).get("minReadySeconds") or None
    same_patience = (spec_of(replica_set).get("minReadySeconds") or None) == patience
    if result == have and same_patience:
        return None
    return with_metadata(with_spec(replica_set, minReadySeconds=patience), annotations=result)


def surplus_revisions(old: Sequence[Object], limit: int | None) -> list[Object]:
    """The oldest of those without pods, beyond `revisionHistoryLimit`."""
    if limit is None:
        return []
    empty = [each for each in old if not is_terminating(each) and _is_empty(each)]
    return sorted(empty, key=lambda each: (revision_of(each), creation_order(each)))[: max(0, len(empty) - limit)]


def _is_empty(replica_set: Object) -> bool:
    status = status_of(replica_set)
    seen = integer_or(status.get("observedGeneration")) >= integer_or(replica_set["metadata"].get("generation"))
    return not spec_of(replica_set).get("replicas") and not status.get("replicas") and seen
