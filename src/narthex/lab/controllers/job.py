"""The Job controller (kubernetes `pkg/controller/job`), with the deletion of finished Jobs after their time to live.

A pod keeps a finalizer until the Job has counted its end: its UID enters `status.uncountedTerminatedPods`, the finalizer goes, and
the counters follow. So a pod counts once, by whatever client it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from narthex.lab.api.defaults import JOB_NAME
from narthex.lab.api.registry import stamp
from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange, adopt_and_release
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.job_indexes import (
    completed_indexes,
    index_of,
    index_text,
    is_indexed,
    next_indexes,
    with_index,
)
from narthex.lab.controllers.objects import (
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
    condition,
    condition_holds,
    finalizers_of,
    integer_or,
    is_pod_active,
    is_pod_ready,
    is_terminating,
    key_of,
    labels_of,
    parse_time,
    spec_of,
    status_of,
    uid_of,
    with_condition,
    without_finalizer,
)
from narthex.lab.controllers.owned_pods import BURST, PodNames, created, deleted, keys_with_pods, pod_of
from narthex.lab.controllers.replicaset import pods_to_delete
from narthex.model.backoff import Backoff

FINALIZER = "batch.kubernetes.io/job-tracking"
_BACKOFF = Backoff(10.0, 600.0)
"""Delay of new pods after failed ones, as upstream."""
_REACHED = "CompletionsReached", "Reached expected number of succeeded pods"
_TOO_LATE = "DeadlineExceeded", "Job was active longer than specified deadline"
_TOO_OFTEN = "BackoffLimitExceeded", "Job has reached the specified backoff limit"


class JobController:
    """Runs pods until enough have succeeded or too many have failed."""

    name = "job-controller"
    kinds = frozenset({"Job", "Pod"})

    def __init__(self) -> None:
        self._names = PodNames()

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the Job, those that a pod concerns, or the former one of a pod that is still to be counted."""
        found = set(keys_with_pods("Job", change, state))
        if change.kind == "Pod" and change.after is not None and FINALIZER in finalizers_of(change.after):
            found |= {ObjectKey(change.key.namespace, name) for name in [labels_of(change.after).get(JOB_NAME)] if name}
        elif change.kind == "Job" and change.after is None:
            found.add(change.key)
        return found

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Count ended pods, create and delete pods, and set the conditions."""
        job = state.get("Job", key)
        mine = uid_of(job) if job is not None else ""
        for pod in state.labelled_pods(key.namespace, {JOB_NAME: key.name}):
            owners = {each.get("uid") for each in pod["metadata"].get("ownerReferences") or ()}
            if FINALIZER in finalizers_of(pod) and mine not in owners:
                # Nothing counts it any more.
                yield without_finalizer("Pod", pod, FINALIZER)
        if job is None:
            return
        if finished_at(job) is not None:
            yield from _expire(job, state, now)
            return
        ownership = [] if is_terminating(job) else list(adopt_and_release("Pod", job, state))
        if ownership:
            # The changed ownership takes effect in the next reconciliation.
            yield from ownership
            return
        yield from self._advance(key, _JobSync(job, state.dependents_of_kind("Pod", job), now), state)

    def _advance(self, key: ObjectKey, sync: _JobSync, state: ClusterState) -> Iterator[ReconcileResult]:
        for pod in sync.counted:
            yield without_finalizer("Pod", pod, FINALIZER)
        yield from sync.status_update(self.name)
        if is_terminating(sync.job):
            return
        surplus = -sync.missing
        if surplus > 0:
            for pod in pods_to_delete(sync.active, (), min(surplus, BURST), sync.now):
                yield from deleted(sync.job, pod, sync.now, self.name)
        elif sync.missing and sync.may_create_at > sync.now:
            yield RequeueAt(sync.may_create_at)
        else:
            yield from self._create(key, sync, state)
        if sync.deadline is not None and sync.deadline > sync.now:
            yield RequeueAt(sync.deadline)

    def _create(self, key: ObjectKey, sync: _JobSync, state: ClusterState) -> Iterator[ReconcileResult]:
        template, count = spec_of(sync.job).get("template") or {}, min(sync.missing, BURST)
        indexes = next_indexes(sync.job, sync.taken_indexes, count) if is_indexed(sync.job) else [-1] * count
        for index in indexes:
            prefix = key if index < 0 else ObjectKey(key.namespace, f"{key.name}-{index}")
            made = pod_of(sync.job, template, self._names.next(prefix, state), finalizers=[FINALIZER])
            made = made if index < 0 else with_index(made, key.name, index)
            yield from created(sync.job, made, sync.now, self.name)


def finished_at(job: Object) -> datetime | None:
    """Return when a Job completed or failed, None if it has not."""
    for kind in ("Complete", "Failed"):
        if condition_holds(job, kind):
            return parse_time(condition(job, kind).get("lastTransitionTime"))
    return None


def _expire(job: Object, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
    """Release the pods of a finished Job, and delete the Job after its time to live."""
    for pod in state.dependents_of_kind("Pod", job):
        if FINALIZER in finalizers_of(pod):
            yield without_finalizer("Pod", pod, FINALIZER)
    since, seconds = finished_at(job), spec_of(job).get("ttlSecondsAfterFinished")
    if seconds is None or since is None or is_terminating(job):
        return
    at = since + timedelta(seconds=seconds)
    yield DeleteObject("Job", key_of(job)) if at <= now else RequeueAt(at)


class _JobSync:
    """One Job and its pods at one time, and what follows from them."""

    def __init__(self, job: Object, pods: Sequence[Object], now: datetime) -> None:
        self.job = job
        self.now = now
        self._spec = spec_of(job)
        self._status = status_of(job)
        self._suspended = bool(self._spec.get("suspend"))
        uncounted = self._status.get("uncountedTerminatedPods") or {}
        listed = {uid for word in ("succeeded", "failed") for uid in uncounted.get(word) or ()}
        self.active = [pod for pod in pods if is_pod_active(pod)]
        leaving = [pod for pod in pods if is_terminating(pod) and not _has_ended(pod)]
        self._terminating = len(leaving)
        self._replaces_late = self._spec.get("podReplacementPolicy") == "Failed"
        tracked = [pod for pod in pods if FINALIZER in finalizers_of(pod)]
        # An index counts once, so the status lists indexes in the place of pods that have succeeded.
        by_index = [pod for pod in tracked if is_indexed(job) and _outcome(pod) == "succeeded" and index_of(pod) >= 0]
        recorded = completed_indexes(job) if is_indexed(job) else set()
        listed |= {uid_of(pod) for pod in by_index if index_of(pod) in recorded}
        self._completed = recorded | {index_of(pod) for pod in by_index}
        self.taken_indexes = self._completed | {
            index_of(pod) for pod in (*self.active, *(leaving if self._replaces_late else ()))
        }
        """Indexes that need no new pod."""
        self.counted = [pod for pod in tracked if uid_of(pod) in listed]
        """Pods whose end is recorded, so that their finalizers can go."""
        ended = [pod for pod in tracked if _outcome(pod) and uid_of(pod) not in listed and pod not in by_index]
        self._uncounted = {
            word: [
                *(uid for uid in uncounted.get(word) or () if uid in {uid_of(pod) for pod in tracked}),
                *(uid_of(pod) for pod in ended if _outcome(pod) == word),
            ]
            for word in ("succeeded", "failed")
        }
        gone = {word: len(uncounted.get(word) or ()) for word in ("succeeded", "failed")}
        new = {word: sum(_outcome(pod) == word for pod in ended) for word in gone}
        self._counters = {
            word: integer_or(self._status.get(word)) + gone[word] + new[word] - len(self._uncounted[word])
            for word in gone
        }
        if is_indexed(job):
            self._counters["succeeded"] = len(self._completed)
        self._succeeded, self._failed = (
            self._counters[word] + len(self._uncounted[word]) for word in ("succeeded", "failed")
        )
        self._started = None if self._suspended else parse_time(self._status.get("startTime")) or now
        self._failed_pods = [pod for pod in pods if _outcome(pod) == "failed"]
        self._verdict = self._decide()

    @property
    def deadline(self) -> datetime | None:
        """When the Job fails if it is still active."""
        seconds = self._spec.get("activeDeadlineSeconds")
        return None if seconds is None or self._started is None else self._started + timedelta(seconds=seconds)

    def _decide(self) -> tuple[str, str, str] | None:
        """Return the final condition with its reason and message, None while the Job goes on."""
        for kind, target in (("Failed", "FailureTarget"), ("Complete", "SuccessCriteriaMet")):
            held = condition(self.job, target)
            if held.get("status") == "True":
                return kind, str(held.get("reason")), str(held.get("message"))
        limit, completions = integer_or(self._spec.get("backoffLimit"), 6), self._spec.get("completions")
        if self._failed > limit or self._restarts_exceed(limit):
            return "Failed", *_TOO_OFTEN
        if self.deadline is not None and self.deadline <= self.now:
            return "Failed", *_TOO_LATE
        all_ended = self._succeeded > 0 and not self.active and not self._suspended
        if (completions is None and all_ended) or (completions is not None and self._succeeded >= completions):
            return "Complete", *_REACHED
        return None

    def _restarts_exceed(self, limit: int) -> bool:
        if ((self._spec.get("template") or {}).get("spec") or {}).get("restartPolicy") != "OnFailure":
            return False
        listed = ("initContainerStatuses", "containerStatuses")
        statuses = [each for pod in self.active for name in listed for each in status_of(pod).get(name) or ()]
        restarts = sum(integer_or(each.get("restartCount")) for each in statuses)
        return restarts >= max(limit, 1)

    @property
    def missing(self) -> int:
        """Number of pods to create; of pods to delete, if negative."""
        if self._verdict is not None or self._suspended:
            return -len(self.active)
        desired, completions = integer_or(self._spec.get("parallelism"), 1), self._spec.get("completions")
        if completions is not None:
            desired = min(desired, integer_or(completions) - self._succeeded)
        elif self._succeeded:
            # A work queue: once one pod has succeeded, the others finish.
            desired = min(desired, len(self.active))
        return max(0, desired) - len(self.active) - (self._terminating if self._replaces_late else 0)

    @property
    def may_create_at(self) -> datetime:
        """Return when new pods may be created: later after each failure."""
        ends = [end for pod in self._failed_pods if (end := _end_of(pod)) is not None]
        if not ends or not self._failed:
            return self.now
        return max(ends) + timedelta(seconds=_BACKOFF.delay(self._failed))

    def status_update(self, source: str) -> Iterator[ReconcileResult]:
        """Yield the new status, with Events about a changed condition."""
        status, conditions = dict(self._status), list(self._status.get("conditions") or ())
        held = condition_holds(self.job, "Suspended")
        if self._verdict is None and self._suspended != held:
            words = ("JobSuspended", "Job suspended") if self._suspended else ("JobResumed", "Job resumed")
            conditions = with_condition(conditions, _condition("Suspended", *words, self._suspended), self.now)
            yield event_about(self.job, words[0].removeprefix("Job"), words[1], self.now, source=source)
        if self._verdict is not None:
            kind, reason, message = self._verdict
            target = "FailureTarget" if kind == "Failed" else "SuccessCriteriaMet"
            conditions = with_condition(conditions, _condition(target, reason, message), self.now)
            if not self.active and not self._terminating and not any(self._uncounted.values()):
                conditions = with_condition(conditions, _condition(kind, reason, message), self.now)
                failed = kind == "Failed"
                text = (reason, message) if failed else ("Completed", "Job completed")
                yield event_about(self.job, *text, self.now, source=source, warning=failed)
                if not failed:
                    status["completionTime"] = stamp(self.now)
        numbers = {
            "active": len(self.active),
            "ready": sum(map(is_pod_ready, self.active)),
            "terminating": self._terminating,
            **self._counters,
        }
        status |= numbers
        status["startTime"] = stamp(self._started) if self._started is not None else None
        status["uncountedTerminatedPods"] = {word: uids for word, uids in self._uncounted.items() if uids}
        status["conditions"] = conditions or None
        status["completedIndexes"] = index_text(self._completed)
        shown = ("ready", "terminating", "uncountedTerminatedPods")
        status = {name: value for name, value in status.items() if value or name in shown}
        if status != self._status:
            yield UpdateObject("Job", {**self.job, "status": status}, "status")


def _condition(kind: str, reason: str, message: str, holds: bool = True) -> dict[str, Any]:
    return {"type": kind, "status": "True" if holds else "False", "reason": reason, "message": message}


def _has_ended(pod: Object) -> bool:
    return status_of(pod).get("phase") in ("Succeeded", "Failed")


def _outcome(pod: Object) -> str:
    """Return `succeeded` or `failed`; empty for a pod that goes on. A deleted pod has failed."""
    phase = status_of(pod).get("phase")
    if phase == "Succeeded":
        return "succeeded"
    return "failed" if phase == "Failed" or is_terminating(pod) else ""


def _end_of(pod: Object) -> datetime | None:
    """Return when the last container of a pod ended."""
    states = [each.get("state") or {} for each in status_of(pod).get("containerStatuses") or ()]
    ends = [parse_time((state.get("terminated") or {}).get("finishedAt")) for state in states]
    deleted_at = parse_time(pod["metadata"].get("deletionTimestamp"))
    return max((end for end in [*ends, deleted_at] if end is not None), default=None)


class JobOutcome(msgspec.Struct, frozen=True):
    """How a finished Job ended."""

    condition: str
    """Complete or Failed."""
    at: datetime


def outcome_of(job: Object) -> JobOutcome | None:
    """Return how a Job ended, None if it has not."""
    at = finished_at(job)
    return None if at is None else JobOutcome("Complete" if condition_holds(job, "Complete") else "Failed", at)
