"""The CronJob controller (kubernetes `pkg/controller/cronjob`): creates Jobs on a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from narthex.lab.api.registry import stamp
from narthex.lab.api.schedules import last_before, times_after
from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.job import outcome_of
from narthex.lab.controllers.objects import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
    controlled_by,
    controller_of,
    integer_or,
    is_terminating,
    key_of,
    parse_time,
    reference_to,
    spec_of,
    status_of,
    uid_of,
)

_SCHEDULED = "batch.kubernetes.io/cronjob-scheduled-timestamp"


class CronJobController:
    """Creates the Jobs that are due, and deletes the oldest finished ones."""

    name = "cronjob-controller"
    kinds = frozenset({"CronJob", "Job"})

    def affected_keys(self, change: ObjectChange, _state: ClusterState) -> Iterable[ObjectKey]:
        """Return the CronJob, or the owner of a Job."""
        if change.kind == "CronJob":
            return [change.key]
        owners = (controller_of(each) for each in change.versions)
        return {ObjectKey(change.key.namespace, each["name"]) for each in owners if each and each["kind"] == "CronJob"}

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Note finished Jobs, prune the history, and create the Job that is due."""
        cron_job = state.get("CronJob", key)
        if cron_job is None:
            return
        owned = (each for each in state.dependents_of_kind("Job", cron_job) if controlled_by(each, cron_job))
        jobs = sorted(owned, key=lambda each: (each["metadata"].get("creationTimestamp") or "", key_of(each).name))
        status = dict(status_of(cron_job))
        running = [each for each in jobs if outcome_of(each) is None]
        held = {each.get("uid"): each for each in status.get("active") or ()}
        for job in jobs:
            if (outcome := outcome_of(job)) is not None and uid_of(job) in held:
                text = f"Saw completed job: {key_of(job).name}, condition: {outcome.condition}"
                yield event_about(cron_job, "SawCompletedJob", text, now, source=self.name)
                if outcome.condition == "Complete":
                    latest = parse_time(status.get("lastSuccessfulTime"))
                    status["lastSuccessfulTime"] = stamp(max(outcome.at, latest or outcome.at))
        if not is_terminating(cron_job):
            yield from self._prune(cron_job, jobs, now)
            yield from self._schedule(cron_job, running, status, state, now)
        status["active"] = [held.get(uid_of(each)) or _reference(each) for each in running]
        status = {name: value for name, value in status.items() if value}
        if status != status_of(cron_job):
            yield UpdateObject("CronJob", {**cron_job, "status": status}, "status")

    def _prune(self, cron_job: Object, jobs: list[Object], now: datetime) -> Iterator[ReconcileResult]:
        limits = {"Complete": ("successfulJobsHistoryLimit", 3), "Failed": ("failedJobsHistoryLimit", 1)}
        for kind, (field, default) in limits.items():
            ended = [each for each in jobs if (how := outcome_of(each)) is not None and how.condition == kind]
            surplus = len(ended) - integer_or(spec_of(cron_job).get(field), default)
            for job in ended[: max(0, surplus)]:
                yield from self._deleted(cron_job, job, now)

    def _deleted(self, cron_job: Object, job: Object, now: datetime) -> Iterator[ReconcileResult]:
        if not is_terminating(job):
            yield DeleteObject("Job", key_of(job))
            text = f"Deleted job {key_of(job).name}"
            yield event_about(cron_job, "SuccessfulDelete", text, now, source=self.name)

    def _schedule(
        self, cron_job: Object, running: list[Object], status: Object, state: ClusterState, now: datetime
    ) -> Iterator[ReconcileResult]:
        """Create the Job of the latest time that was missed, and come back at the next one. Changes `running` and `status`."""
        spec = spec_of(cron_job)
        if spec.get("suspend"):
            return
        schedule, zone = str(spec["schedule"]), spec.get("timeZone") or ""
        following = next(times_after(schedule, zone, now), None)
        if following is not None:
            yield RequeueAt(following)
        since = parse_time(status.get("lastScheduleTime") or cron_job["metadata"].get("creationTimestamp")) or now
        due = last_before(schedule, zone, since, now)
        if due is None:
            return
        late = spec.get("startingDeadlineSeconds")
        job = _new_job(cron_job, due)
        if late is not None and due + timedelta(seconds=late) < now:
            text = f"Missed scheduled time to start a job: {stamp(due)}"
            yield event_about(cron_job, "MissSchedule", text, now, source=self.name, warning=True)
            return
        if running and spec.get("concurrencyPolicy") == "Forbid":
            text = "Not starting job because prior execution is running and concurrency policy is Forbid"
            yield event_about(cron_job, "JobAlreadyActive", text, now, source=self.name)
            # Its time is over only once the prior Job is.
            return
        if state.get("Job", key_of(job)) is None:
            if spec.get("concurrencyPolicy") == "Replace":
                for each in running:
                    yield from self._deleted(cron_job, each, now)
            yield CreateObject("Job", job)
            text = f"Created job {key_of(job).name}"
            yield event_about(cron_job, "SuccessfulCreate", text, now, source=self.name)
        status["lastScheduleTime"] = stamp(due)


def _new_job(cron_job: Object, due: datetime) -> Object:
    key, template = key_of(cron_job), spec_of(cron_job).get("jobTemplate") or {}
    given = template.get("metadata") or {}
    return {
        "metadata": {
            "name": f"{key.name}-{int(due.timestamp()) // 60}",
            "namespace": key.namespace,
            **({"labels": given["labels"]} if given.get("labels") else {}),
            "annotations": {**(given.get("annotations") or {}), _SCHEDULED: stamp(due)},
            "ownerReferences": [reference_to(cron_job)],
        },
        "spec": template.get("spec") or {},
    }


def _reference(job: Object) -> Object:
    key = key_of(job)
    identity = {"name": key.name, "namespace": key.namespace, "uid": uid_of(job)}
    version = job["metadata"].get("resourceVersion") or ""
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], **identity, "resourceVersion": version}
