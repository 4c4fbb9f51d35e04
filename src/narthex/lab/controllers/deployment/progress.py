"""Status and conditions of a Deployment, with upstream's reasons and messages.

`kubectl rollout status` and `kubectl wait` read them. Kubernetes: `pkg/controller/deployment/{sync,progress}.go`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from narthex.lab.api.registry import stamp
from narthex.lab.controllers.deployment.rolling import rollout_limits
from narthex.lab.controllers.objects import (
    Object,
    condition,
    integer_or,
    key_of,
    parse_time,
    replicas_of,
    spec_of,
    status_of,
    with_condition,
)

NO_DEADLINE = 2147483647
TIMED_OUT = "ProgressDeadlineExceeded"
COMPLETE = "NewReplicaSetAvailable"
PAUSED = "DeploymentPaused"


def has_deadline(deployment: Object) -> bool:
    """Return True if the Deployment has a progress deadline."""
    return integer_or(spec_of(deployment).get("progressDeadlineSeconds"), 600) != NO_DEADLINE


def status_with_counts(deployment: Object, new: Object | None, sets: Sequence[Object], now: datetime) -> Object:
    """Return the status with current replica counts and the condition Available."""

    def total(field: str) -> int:
        """Return the sum of a status field over all ReplicaSets."""
        return sum(integer_or(status_of(each).get(field)) for each in sets)

    limits = rollout_limits(deployment)
    available = total("availableReplicas")
    desired = sum(map(replicas_of, sets))
    is_available = available >= limits.min_available
    have = status_of(deployment)
    numbers = {
        "observedGeneration": deployment["metadata"].get("generation") or 0,
        "replicas": total("replicas"),
        "updatedReplicas": integer_or(status_of(new).get("replicas")) if new is not None else 0,
        "readyReplicas": total("readyReplicas"),
        "availableReplicas": available,
        "unavailableReplicas": max(0, desired - available),
        "terminatingReplicas": total("terminatingReplicas"),
        "collisionCount": have.get("collisionCount") or 0,
    }
    conditions = _with_new_condition(
        have.get("conditions") or [],
        "Available",
        "True" if is_available else "False",
        "MinimumReplicasAvailable" if is_available else "MinimumReplicasUnavailable",
        f"Deployment {'has' if is_available else 'does not have'} minimum availability.",
        now,
    )
    return {**without_zeros(numbers), "conditions": conditions}


def without_zeros(status: Mapping[str, Any]) -> Object:
    """Return a status as Go writes it: without numbers that are 0, except for the generation."""
    return {name: value for name, value in status.items() if value or name == "observedGeneration"}


def status_with_progress(deployment: Object, status: Object, new: Object | None, now: datetime) -> Object:
    """Return `status` with the condition Progressing for a running rollout."""
    if not has_deadline(deployment):
        return {**status, "conditions": [each for each in status["conditions"] if each.get("type") != "Progressing"]}
    current = condition(deployment, "Progressing")
    if current.get("reason") == COMPLETE and status.get("replicas", 0) == status.get("updatedReplicas", 0):
        return status
    subject = f'ReplicaSet "{key_of(new).name}"' if new is not None else f'Deployment "{key_of(deployment).name}"'
    have = status["conditions"]
    if is_complete(deployment, status):
        message = f"{subject} has successfully progressed."
        conditions = _with_new_condition(have, "Progressing", "True", COMPLETE, message, now)
    elif _progresses(status_of(deployment), status):
        # Each step of progress restarts the deadline.
        conditions = with_condition(
            have, _condition("Progressing", "True", "ReplicaSetUpdated", f"{subject} is progressing.", now), now
        )
    elif has_timed_out(deployment, now):
        message = f"{subject} has timed out progressing."
        conditions = _with_new_condition(have, "Progressing", "False", TIMED_OUT, message, now)
    else:
        conditions = have
    return {**status, "conditions": conditions}


def with_progress(deployment: Object, reason: str, message: str, now: datetime, value: str) -> Object:
    """Return the status with a condition Progressing, if there is a deadline."""
    status = dict(status_of(deployment))
    if not has_deadline(deployment):
        return status
    have = status.get("conditions") or []
    return {**status, "conditions": _with_new_condition(have, "Progressing", value, reason, message, now)}


def is_complete(deployment: Object, status: Object) -> bool:
    """Return True if all pods have the current template and are available."""
    desired = rollout_limits(deployment).replicas
    return bool(
        status.get("updatedReplicas", 0) == desired
        and status.get("replicas", 0) == desired
        and status.get("availableReplicas", 0) == desired
        and status.get("observedGeneration", 0) >= integer_or(deployment["metadata"].get("generation"))
    )


def has_timed_out(deployment: Object, now: datetime) -> bool:
    """Return True if the progress deadline has passed."""
    if condition(deployment, "Progressing").get("reason") == TIMED_OUT:
        return True
    at = progress_deadline(deployment)
    return at is not None and at <= now


def progress_deadline(deployment: Object) -> datetime | None:
    """Return the time at which the rollout times out without further progress; None if it cannot."""
    current = condition(deployment, "Progressing")
    settled = current.get("reason") in (COMPLETE, TIMED_OUT)
    if settled or not has_deadline(deployment) or spec_of(deployment).get("paused"):
        return None
    since = parse_time(current.get("lastUpdateTime"))
    seconds = integer_or(spec_of(deployment).get("progressDeadlineSeconds"), 600)
    return since + timedelta(seconds=seconds) if since is not None else None


def _progresses(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    old, new = _counts(before), _counts(after)
    grows = any(new[name] > old[name] for name in ("updatedReplicas", "readyReplicas", "availableReplicas"))
    return grows or new["replicas"] - new["updatedReplicas"] < old["replicas"] - old["updatedReplicas"]


def _counts(status: Mapping[str, Any]) -> Counter[str]:
    return Counter({name: integer_or(value) for name, value in status.items()})


def _with_new_condition(
    conditions: Sequence[Object], kind: str, status: str, reason: str, message: str, now: datetime
) -> list[Object]:
    """Return the conditions with this one; an existing one with the same status and reason is kept unchanged."""
    for each in conditions:
        if each.get("type") == kind and each.get("status") == status and each.get("reason") == reason:
            return list(conditions)
    return with_condition(conditions, _condition(kind, status, reason, message, now), now)


def _condition(kind: str, status: str, reason: str, message: str, now: datetime) -> Object:
    return {"type": kind, "status": status, "lastUpdateTime": stamp(now), "reason": reason, "message": message}
