"""Deployments become ReplicaSets, one for each template they have had (kubernetes `pkg/controller/deployment`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.deployment import progress as told
from narthex.lab.controllers.deployment import revisions
from narthex.lab.controllers.deployment import rolling as rollout
from narthex.lab.controllers.deployment.rolling import RolloutLimits
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
    condition,
    controlled_by,
    controller_of,
    integer_or,
    is_terminating,
    key_of,
    labels_of,
    reference_to,
    spec_of,
    status_of,
    with_metadata,
)
from narthex.lab.controllers.selectors import is_empty, selects


class DeploymentController:
    """Rolls templates out, scales, keeps the history, tells the status."""

    name = "deployment-controller"
    kinds = frozenset({"Deployment", "ReplicaSet", "Pod"})

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The Deployment itself; the owner of a ReplicaSet or who could adopt one; the owner of a pod that goes, for whom
        Recreate may wait."""
        if seen.kind == "Deployment":
            return [seen.key]
        if seen.kind == "ReplicaSet":
            found: set[ObjectKey] = set()
            for each in (seen.before, seen.after):
                if each is not None:
                    found |= _owners(each, present)
            return found
        if seen.kind == "Pod" and seen.after is None:
            owner = controller_of(seen.latest)
            if owner is not None and owner.get("kind") == "ReplicaSet":
                replica_set = present.get("ReplicaSet", ObjectKey(seen.key.namespace, owner["name"]))
                return _owners(replica_set, present) if replica_set is not None else []
        return []

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterable[ReconcileResult]:
        """What the Deployment needs next."""
        deployment = present.get("Deployment", key)
        return _Look(deployment, present, now, self.name).answers() if deployment is not None else ()


def _owners(replica_set: Object, present: ClusterState) -> set[ObjectKey]:
    owner = controller_of(replica_set)
    namespace = key_of(replica_set).namespace
    if owner is None:
        return present.selected_by("Deployment", namespace, labels_of(replica_set))
    return {ObjectKey(namespace, owner["name"])} if owner.get("kind") == "Deployment" else set()


class _Look:
    """One look at one Deployment."""

    def __init__(self, deployment: Object, present: ClusterState, now: datetime, source: str) -> None:
        self._deployment = deployment
        self._present = present
        self._now = now
        self._source = source
        self._limits: RolloutLimits = rollout.rollout_limits(deployment)
        self._writes: list[ReconcileResult] = []

    def answers(self) -> Iterator[ReconcileResult]:
        deployment = self._deployment
        if is_empty(spec_of(deployment).get("selector")):
            return
        claims = list(self._claims())
        if claims:
            # What is adopted or released counts from the next look on.
            yield from claims
            return
        sets = [each for each in self._present.owned_of("ReplicaSet", deployment) if controlled_by(each, deployment)]
        sets.sort(key=revisions.creation_order)
        new = next((each for each in sets if revisions.is_of_template(each, deployment)), None)
        old = [each for each in sets if each is not new]
        if is_terminating(deployment):
            yield from self._tell(told.status_with_counts(deployment, new, sets, self._now))
        elif self._pause_noted():
            pass
        elif spec_of(deployment).get("paused") or self._is_scaling(sets):
            self._scale(new, old)
            self._forget(old)
            yield from self._tell(told.status_with_counts(deployment, new, sets, self._now))
        elif new is None:
            self._begin(old)
        elif not self._renewed(new, old):
            self._roll(new, old)
            self._forget(old)
            status = told.status_with_counts(deployment, new, sets, self._now)
            yield from self._tell(told.status_with_progress(deployment, status, new, self._now))
            late = told.progress_deadline(deployment)
            if late is not None and late > self._now:
                yield RequeueAt(late)
        yield from self._writes

    def _claims(self) -> Iterator[UpdateObject]:
        deployment, present = self._deployment, self._present
        selector = spec_of(deployment).get("selector")
        uid = deployment["metadata"].get("uid")
        for each in present.owned_of("ReplicaSet", deployment):
            if controlled_by(each, deployment) and not selects(selector, labels_of(each)) and not is_terminating(each):
                owners = [owner for owner in each["metadata"]["ownerReferences"] if owner.get("uid") != uid]
                yield UpdateObject("ReplicaSet", with_metadata(each, ownerReferences=owners or None))
        if is_terminating(deployment):
            return
        for each in present.orphans("ReplicaSet", key_of(deployment).namespace):
            if selects(selector, labels_of(each)) and not is_terminating(each):
                owners = [*(each["metadata"].get("ownerReferences") or ()), reference_to(deployment)]
                yield UpdateObject("ReplicaSet", with_metadata(each, ownerReferences=owners))

    def _pause_noted(self) -> bool:
        """Say in the condition Progressing that it is paused or goes on; the deadline does not run in between."""
        current = condition(self._deployment, "Progressing")
        reason = (current or {}).get("reason")
        if reason == told.TIMED_OUT or not told.has_deadline(self._deployment):
            return False
        paused = bool(spec_of(self._deployment).get("paused"))
        if paused == (reason == told.PAUSED):
            return False
        words = (
            ("DeploymentPaused", "Deployment is paused") if paused else ("DeploymentResumed", "Deployment is resumed")
        )
        status = told.with_progress(self._deployment, dict(status_of(self._deployment)), *words, self._now, "Unknown")
        self._writes.append(UpdateObject("Deployment", {**self._deployment, "status": status}, "status"))
        return True

    def _is_scaling(self, sets: Sequence[Object]) -> bool:
        """A ReplicaSet with pods was scaled last for another number of replicas."""
        wanted = str(self._limits.replicas)
        for each in sets:
            noted = each["metadata"].get("annotations", {}).get(revisions.DESIRED)
            if spec_of(each).get("replicas") and noted is not None and noted != wanted:
                return True
        return False

    def _scale(self, new: Object | None, old: Sequence[Object]) -> None:
        """Give the ReplicaSets their sizes for another number of replicas, without going on with a rollout."""
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
            sizes = [revisions.size_of(each) for each in active]
            for name, replicas in rollout.scale_proportionally(
                sizes, limits, integer_or(status_of(self._deployment).get("replicas"))
            ).items():
                self._resize(next(each for each in active if each["metadata"]["name"] == name), replicas)
        else:
            for each in active:
                self._resize(each, integer_or(spec_of(each).get("replicas")))

    def _is_saturated(self, new: Object) -> bool:
        replicas = self._limits.replicas
        noted = new["metadata"].get("annotations", {}).get(revisions.DESIRED) == str(replicas)
        size = revisions.size_of(new)
        return noted and size.replicas == replicas and size.available == replicas

    def _begin(self, old: Sequence[Object]) -> None:
        """Make the ReplicaSet of a template that has none."""
        deployment, limits = self._deployment, self._limits
        if not rollout.is_rolling(deployment) and self._emptied(old):
            return
        sizes = [revisions.size_of(each) for each in old]
        replicas = limits.replicas
        if rollout.is_rolling(deployment):
            replicas = rollout.scale_new(rollout.ReplicaSetSize("", 0, 0), sizes, limits)
        revision = max((revisions.revision_of(each) for each in old), default=0) + 1
        made = revisions.new_replica_set(deployment, revision, replicas, limits)
        name = made["metadata"]["name"]
        if self._present.get("ReplicaSet", key_of(made)) is not None:
            # Its name is another's: the next hash is another.
            status = dict(status_of(deployment))
            status["collisionCount"] = integer_or(status.get("collisionCount")) + 1
            self._writes.append(UpdateObject("Deployment", {**deployment, "status": status}, "status"))
            return
        self._writes.append(CreateObject("ReplicaSet", made))
        if replicas:
            self._say_scaled(name, 0, replicas)
        status = told.with_progress(
            deployment,
            dict(status_of(deployment)),
            "NewReplicaSetCreated",
            f'Created new replica set "{name}"',
            self._now,
        )
        if status != status_of(deployment):
            self._writes.append(UpdateObject("Deployment", {**deployment, "status": status}, "status"))

    def _renewed(self, new: Object, old: Sequence[Object]) -> bool:
        """Bring the present ReplicaSet's revision and the Deployment's up to date; True when something was not."""
        changed = revisions.update_revision(new, self._deployment, old)
        if changed is not None:
            self._writes.append(UpdateObject("ReplicaSet", changed))
            return True
        revision = str(revisions.revision_of(new))
        have = self._deployment["metadata"].get("annotations") or {}
        if have.get(revisions.REVISION) != revision:
            annotations = {**have, revisions.REVISION: revision}
            self._writes.append(UpdateObject("Deployment", with_metadata(self._deployment, annotations=annotations)))
            return True
        if condition(self._deployment, "Progressing") is None and told.has_deadline(self._deployment):
            words = ("FoundNewReplicaSet", f'Found new replica set "{new["metadata"]["name"]}"')
            status = told.with_progress(self._deployment, dict(status_of(self._deployment)), *words, self._now)
            self._writes.append(UpdateObject("Deployment", {**self._deployment, "status": status}, "status"))
            return True
        return False

    def _roll(self, new: Object, old: Sequence[Object]) -> None:
        if not rollout.is_rolling(self._deployment):
            if not self._emptied(old):
                self._resize(new, self._limits.replicas)
            return
        mine, theirs = revisions.size_of(new), [revisions.size_of(each) for each in old]
        up = rollout.scale_new(mine, theirs, self._limits)
        if up != mine.replicas:
            self._resize(new, up)
            return
        for name, replicas in rollout.scale_old(mine, theirs, self._limits).items():
            self._resize(next(each for each in old if each["metadata"]["name"] == name), replicas)

    def _emptied(self, old: Sequence[Object]) -> bool:
        """Recreate: end all old pods; True while one of them may run."""
        sized = [each for each in old if spec_of(each).get("replicas")]
        for each in sized:
            self._resize(each, 0)
        running = any(
            (status_of(pod).get("phase") not in ("Succeeded", "Failed"))
            for each in old
            for pod in self._present.owned_of("Pod", each)
        )
        return bool(sized) or running

    def _resize(self, replica_set: Object, replicas: int) -> None:
        changed = revisions.scaled(replica_set, replicas, self._limits)
        if changed is None:
            return
        self._writes.append(UpdateObject("ReplicaSet", changed))
        before = integer_or(spec_of(replica_set).get("replicas"), 1)
        if before != replicas:
            self._say_scaled(replica_set["metadata"]["name"], before, replicas)

    def _say_scaled(self, name: str, before: int, after: int) -> None:
        words = f"Scaled {'up' if after > before else 'down'} replica set {name} from {before} to {after}"
        self._writes.append(event_about(self._deployment, "ScalingReplicaSet", words, self._now, source=self._source))

    def _forget(self, old: Sequence[Object]) -> None:
        deployment = self._deployment
        if not told.is_complete(deployment, dict(status_of(deployment))):
            return
        limit = spec_of(deployment).get("revisionHistoryLimit", 10)
        for each in revisions.surplus_revisions(old, integer_or(limit, 10)):
            key = key_of(each)
            self._writes.append(DeleteObject("ReplicaSet", key.namespace, key.name))

    def _tell(self, status: Object) -> Iterator[UpdateObject]:
        have = {
            name: value for name, value in status_of(self._deployment).items() if value or name == "observedGeneration"
        }
        if {name: value for name, value in status.items() if value or name == "observedGeneration"} != have:
            yield UpdateObject("Deployment", {**self._deployment, "status": status}, "status")
