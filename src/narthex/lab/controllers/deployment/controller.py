"""The Deployment controller (kubernetes `pkg/controller/deployment`): one ReplicaSet for each revision of the pod template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange, adopt_and_release
from narthex.lab.controllers.deployment import progress, revisions
from narthex.lab.controllers.deployment import rolling as rollout
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.objects import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
    annotations_of,
    condition,
    controlled_by,
    controller_of,
    integer_or,
    is_pod_finished,
    is_terminating,
    key_of,
    labels_of,
    replicas_of,
    spec_of,
    status_of,
    with_fields,
)
from narthex.model.selector import is_empty


class DeploymentController:
    """Rolls out templates, scales, prunes the revision history, and updates the status of Deployments."""

    name = "deployment-controller"
    kinds = frozenset({"Deployment", "ReplicaSet", "Pod"})

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the Deployment, the owner or possible adopter of a ReplicaSet, or the owner of a deleted pod (for Recreate)."""
        if change.kind == "Deployment":
            return [change.key]
        if change.kind == "ReplicaSet":
            return set().union(*(_owners(each, state) for each in change.versions))
        if change.kind == "Pod" and change.after is None:
            owner = controller_of(change.latest)
            if owner is not None and owner.get("kind") == "ReplicaSet":
                replica_set = state.get("ReplicaSet", ObjectKey(change.key.namespace, owner["name"]))
                return _owners(replica_set, state) if replica_set is not None else []
        return []

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterable[ReconcileResult]:
        """Return the next writes that the Deployment needs."""
        deployment = state.get("Deployment", key)
        return _DeploymentSync(deployment, state, now, self.name).results() if deployment is not None else ()


def _owners(replica_set: Object, state: ClusterState) -> set[ObjectKey]:
    owner = controller_of(replica_set)
    namespace = key_of(replica_set).namespace
    if owner is None:
        return state.selected_by("Deployment", namespace, labels_of(replica_set))
    return {ObjectKey(namespace, owner["name"])} if owner.get("kind") == "Deployment" else set()


class _DeploymentSync:
    """The reconciliation of one Deployment at one time."""

    def __init__(self, deployment: Object, state: ClusterState, now: datetime, source: str) -> None:
        self._deployment = deployment
        self._state = state
        self._now = now
        self._source = source
        self._limits = rollout.rollout_limits(deployment)
        self._writes: list[ReconcileResult] = []

    def results(self) -> Iterator[ReconcileResult]:
        """Yield the writes of one reconciliation, and a `RequeueAt` for the progress deadline."""
        deployment = self._deployment
        if is_empty(spec_of(deployment).get("selector")):
            return
        ownership_changes = list(adopt_and_release("ReplicaSet", deployment, self._state))
        if ownership_changes:
            # The changed ownership takes effect in the next reconciliation.
            yield from ownership_changes
            return
        owned = self._state.dependents_of_kind("ReplicaSet", deployment)
        sets = sorted((each for each in owned if controlled_by(each, deployment)), key=revisions.creation_order)
        new = next((each for each in sets if revisions.is_of_template(each, deployment)), None)
        old = [each for each in sets if each is not new]
        if is_terminating(deployment):
            yield from self._status_update(progress.status_with_counts(deployment, new, sets, self._now))
        elif self._update_paused_condition():
            pass
        elif spec_of(deployment).get("paused") or self._is_scaling(sets):
            self._scale(new, old)
            self._delete_surplus(old)
            yield from self._status_update(progress.status_with_counts(deployment, new, sets, self._now))
        elif new is None:
            self._create_new_replica_set(old)
        elif not self._update_new_replica_set(new, old):
            self._roll_out(new, old)
            self._delete_surplus(old)
            status = progress.status_with_counts(deployment, new, sets, self._now)
            yield from self._status_update(progress.status_with_progress(deployment, status, new, self._now))
            late = progress.progress_deadline(deployment)
            if late is not None and late > self._now:
                yield RequeueAt(late)
        yield from self._writes

    def _update_paused_condition(self) -> bool:
        """Set the reason of the Progressing condition on pause and resume. The deadline does not run during a pause."""
        reason = condition(self._deployment, "Progressing").get("reason")
        if reason == progress.TIMED_OUT or not progress.has_deadline(self._deployment):
            return False
        paused = bool(spec_of(self._deployment).get("paused"))
        if paused == (reason == progress.PAUSED):
            return False
        if paused:
            self._report_progress(progress.PAUSED, "Deployment is paused", "Unknown")
        else:
            self._report_progress("DeploymentResumed", "Deployment is resumed", "Unknown")
        return True

    def _report_progress(self, reason: str, message: str, value: str = "True") -> None:
        """Set the condition Progressing, if the Deployment has a deadline."""
        status = progress.with_progress(self._deployment, reason, message, self._now, value)
        if status != status_of(self._deployment):
            self._write_status(status)

    def _is_scaling(self, sets: Sequence[Object]) -> bool:
        """Return True if a non-empty ReplicaSet was last scaled for a different number of replicas."""
        desired = str(self._limits.replicas)
        sized = [each for each in sets if spec_of(each).get("replicas")]
        return any(annotations_of(each).get(revisions.DESIRED_REPLICAS, desired) != desired for each in sized)

    def _scale(self, new: Object | None, old: Sequence[Object]) -> None:
        """Scale the ReplicaSets for a new number of replicas without continuing a rollout."""
        limits = self._limits
        sets = [*old, *([new] if new is not None else [])]
        active = [each for each in sets if spec_of(each).get("replicas")]
        if len(active) <= 1:
            only = active[0] if active else (new or (old[-1] if old else None))
            if only is not None:
                self._resize(only, limits.replicas)
        elif new is not None and self._is_saturated(new):
            for each in old:
                if spec_of(each).get("replicas"):
                    self._resize(each, 0)
        elif rollout.is_rolling(self._deployment):
            current = integer_or(status_of(self._deployment).get("replicas"))
            sizes = list(map(revisions.size_of, active))
            self._resize_all(active, rollout.scale_proportionally(sizes, limits, current))
        else:
            for each in active:
                self._resize(each, integer_or(spec_of(each).get("replicas")))

    def _is_saturated(self, new: Object) -> bool:
        replicas = self._limits.replicas
        recorded = annotations_of(new).get(revisions.DESIRED_REPLICAS) == str(replicas)
        size = revisions.size_of(new)
        return recorded and size.replicas == replicas and size.available == replicas

    def _create_new_replica_set(self, old: Sequence[Object]) -> None:
        deployment, limits = self._deployment, self._limits
        if not rollout.is_rolling(deployment) and self._scale_to_zero(old):
            return
        sizes = [revisions.size_of(each) for each in old]
        replicas = limits.replicas
        if rollout.is_rolling(deployment):
            replicas = rollout.scale_new(rollout.ReplicaSetSize("", 0, 0), sizes, limits)
        revision = max((revisions.revision_of(each) for each in old), default=0) + 1
        made = revisions.new_replica_set(deployment, revision, replicas, limits)
        name = made["metadata"]["name"]
        if self._state.get("ReplicaSet", key_of(made)) is not None:
            # The name is taken: the next collision count gives a different hash.
            collisions = integer_or(status_of(deployment).get("collisionCount")) + 1
            self._write_status({**status_of(deployment), "collisionCount": collisions})
            return
        self._writes.append(CreateObject("ReplicaSet", made))
        if replicas:
            self._record_scaling(name, 0, replicas)
        self._report_progress("NewReplicaSetCreated", f'Created new replica set "{name}"')

    def _update_new_replica_set(self, new: Object, old: Sequence[Object]) -> bool:
        """Update the revision of the new ReplicaSet and of the Deployment; return True if a write was needed."""
        changed = revisions.update_revision(new, self._deployment, old)
        if changed is not None:
            self._writes.append(UpdateObject("ReplicaSet", changed))
            return True
        revision = str(revisions.revision_of(new))
        have = annotations_of(self._deployment)
        if have.get(revisions.REVISION) != revision:
            annotations = {**have, revisions.REVISION: revision}
            changed = with_fields(self._deployment, "metadata", annotations=annotations)
            self._writes.append(UpdateObject("Deployment", changed))
            return True
        if not condition(self._deployment, "Progressing") and progress.has_deadline(self._deployment):
            self._report_progress("FoundNewReplicaSet", f'Found new replica set "{new["metadata"]["name"]}"')
            return True
        return False

    def _roll_out(self, new: Object, old: Sequence[Object]) -> None:
        if not rollout.is_rolling(self._deployment):
            if not self._scale_to_zero(old):
                self._resize(new, self._limits.replicas)
            return
        new_size, old_sizes = revisions.size_of(new), [revisions.size_of(each) for each in old]
        up = rollout.scale_new(new_size, old_sizes, self._limits)
        if up != new_size.replicas:
            self._resize(new, up)
            return
        self._resize_all(old, rollout.scale_old(new_size, old_sizes, self._limits))

    def _scale_to_zero(self, old: Sequence[Object]) -> bool:
        """Scale the old ReplicaSets to zero for strategy Recreate; return True while one of their pods may run."""
        sized = [each for each in old if spec_of(each).get("replicas")]
        for each in sized:
            self._resize(each, 0)
        pods = (pod for each in old for pod in self._state.dependents_of_kind("Pod", each))
        return bool(sized) or not all(map(is_pod_finished, pods))

    def _resize_all(self, sets: Sequence[Object], sizes: Mapping[str, int]) -> None:
        by_name = {each["metadata"]["name"]: each for each in sets}
        for name, replicas in sizes.items():
            self._resize(by_name[name], replicas)

    def _resize(self, replica_set: Object, replicas: int) -> None:
        changed = revisions.scaled(replica_set, replicas, self._limits)
        if changed is None:
            return
        self._writes.append(UpdateObject("ReplicaSet", changed))
        before = replicas_of(replica_set)
        if before != replicas:
            self._record_scaling(replica_set["metadata"]["name"], before, replicas)

    def _record_scaling(self, name: str, before: int, after: int) -> None:
        message = f"Scaled {'up' if after > before else 'down'} replica set {name} from {before} to {after}"
        self._writes.append(event_about(self._deployment, "ScalingReplicaSet", message, self._now, source=self._source))

    def _delete_surplus(self, old: Sequence[Object]) -> None:
        deployment = self._deployment
        if not progress.is_complete(deployment, dict(status_of(deployment))):
            return
        limit = integer_or(spec_of(deployment).get("revisionHistoryLimit"), 10)
        self._writes += (DeleteObject("ReplicaSet", key_of(each)) for each in revisions.surplus_revisions(old, limit))

    def _status_update(self, status: Object) -> Iterator[UpdateObject]:
        if progress.without_zeros(status) != progress.without_zeros(status_of(self._deployment)):
            yield UpdateObject("Deployment", {**self._deployment, "status": status}, "status")

    def _write_status(self, status: Object) -> None:
        self._writes.append(UpdateObject("Deployment", {**self._deployment, "status": status}, "status"))
