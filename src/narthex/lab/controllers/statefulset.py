"""The StatefulSet controller (kubernetes `pkg/controller/statefulset`): pods with stable names, created and replaced in order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange, adopt_and_release
from narthex.lab.controllers.controller_revisions import HASH_LABEL, TemplateRevision, as_template, revision_history
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.objects import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
    integer_or,
    is_pod_finished,
    is_pod_ready,
    is_terminating,
    key_of,
    labels_of,
    replicas_of,
    spec_of,
    status_of,
)
from narthex.lab.controllers.owned_pods import BURST, available_at, keys_with_pods, pod_of

POD_NAME = "statefulset.kubernetes.io/pod-name"
POD_INDEX = "apps.kubernetes.io/pod-index"
_ORDINAL = re.compile(r"(.+)-(\d{1,9})", re.ASCII)


class StatefulSetController:
    """Keeps the pods NAME-0, NAME-1, and so on."""

    name = "statefulset-controller"
    kinds = frozenset({"StatefulSet", "ControllerRevision", "Pod"})

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the StatefulSet, or those that a pod concerns."""
        return keys_with_pods("StatefulSet", change, state)

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Adopt and release pods, create, delete, or replace those that are next, and update the status."""
        stateful_set = state.get("StatefulSet", key)
        if stateful_set is None:
            return
        ownership = [
            *adopt_and_release("ControllerRevision", stateful_set, state),
            *(each for each in adopt_and_release("Pod", stateful_set, state) if _ordinal(key, each.obj) is not None),
        ]
        if ownership:
            # The changed ownership takes effect in the next reconciliation.
            yield from ownership
            return
        history = revision_history(stateful_set, state)
        update = history.present
        if history.write is not None:
            yield history.write
        named = {each["metadata"]["name"]: as_template(each) for each in history.held}
        current = named.get(str(status_of(stateful_set).get("currentRevision")), update)
        owned = state.dependents_of_kind("Pod", stateful_set)
        pods = {number: pod for pod in owned if (number := _ordinal(key, pod)) is not None}
        observed = _Observed(stateful_set, pods, current, update, now)
        if not is_terminating(stateful_set):
            for step in next_steps(observed):
                yield from self._carry_out(stateful_set, step, observed)
            in_use = {current.name, update.name, *(labels_of(pod).get(HASH_LABEL, "") for pod in owned)}
            yield from history.surplus(stateful_set, in_use)
        yield from _status(observed)

    def _carry_out(self, owner: Object, step: PodStep, observed: _Observed) -> Iterator[ReconcileResult]:
        name = f"{owner['metadata']['name']}-{step.ordinal}"
        word, reason = ("Delete", "SuccessfulDelete") if step.delete else ("Create", "SuccessfulCreate")
        if step.delete:
            yield DeleteObject("Pod", key_of(observed.pods[step.ordinal]))
        else:
            yield CreateObject("Pod", _new_pod(owner, step.ordinal, observed))
        message = f"{word} Pod {name} in StatefulSet {owner['metadata']['name']} successful"
        yield event_about(owner, reason, message, observed.now, source=self.name)


class _Observed(msgspec.Struct, frozen=True):
    """A StatefulSet with its pods at one time."""

    stateful_set: Object
    pods: dict[int, Object]
    """By ordinal."""
    current: TemplateRevision
    update: TemplateRevision
    now: datetime

    @property
    def first(self) -> int:
        """The lowest ordinal."""
        return integer_or((spec_of(self.stateful_set).get("ordinals") or {}).get("start"))

    @property
    def ordinals(self) -> range:
        """Ordinals of the pods that should exist."""
        return range(self.first, self.first + replicas_of(self.stateful_set))

    @property
    def rolling(self) -> bool:
        """True unless pods are replaced by hand only."""
        return (spec_of(self.stateful_set).get("updateStrategy") or {}).get("type") != "OnDelete"

    @property
    def updated_from(self) -> int:
        """The lowest ordinal whose pod gets the new template."""
        rolling = (spec_of(self.stateful_set).get("updateStrategy") or {}).get("rollingUpdate") or {}
        return self.first + integer_or(rolling.get("partition"))

    def available_at(self, pod: Object) -> datetime | None:
        """Return when a pod is available; None while it is not ready."""
        min_ready = timedelta(seconds=integer_or(spec_of(self.stateful_set).get("minReadySeconds")))
        return available_at(pod, min_ready, self.now) if is_pod_ready(pod) and not is_terminating(pod) else None

    def is_available(self, ordinal: int) -> bool:
        """Return True if the pod with an ordinal exists and is available."""
        at = self.available_at(self.pods[ordinal]) if ordinal in self.pods else None
        return at is not None and at <= self.now

    def revision_of(self, ordinal: int) -> TemplateRevision:
        """Return the revision of which a new pod with an ordinal is."""
        return self.current if self.rolling and ordinal < self.updated_from else self.update


class PodStep(msgspec.Struct, frozen=True):
    """The creation or deletion of the pod with an ordinal."""

    ordinal: int
    delete: bool = False


def next_steps(observed: _Observed) -> list[PodStep]:
    """Return the steps to take now: one at a time with policy OrderedReady, else all that are due (updateStatefulSet)."""
    parallel = spec_of(observed.stateful_set).get("podManagementPolicy") == "Parallel"
    steps: list[PodStep] = []
    for ordinal in observed.ordinals:
        pod = observed.pods.get(ordinal)
        if pod is None:
            steps.append(PodStep(ordinal))
        elif is_pod_finished(pod) and not is_terminating(pod):
            steps.append(PodStep(ordinal, delete=True))
        if not parallel and not observed.is_available(ordinal):
            return steps
    for ordinal in sorted(set(observed.pods) - set(observed.ordinals), reverse=True):
        if not is_terminating(observed.pods[ordinal]):
            steps.append(PodStep(ordinal, delete=True))
        if not parallel:
            return steps
    return (steps or _replaced(observed))[:BURST]


def _replaced(observed: _Observed) -> list[PodStep]:
    """Return the next pod of an old template, the highest ordinal first; none while a pod above it is not available."""
    for ordinal in reversed(observed.ordinals) if observed.rolling else ():
        pod = observed.pods[ordinal]
        if ordinal < observed.updated_from:
            break
        if labels_of(pod).get(HASH_LABEL) != observed.update.name and not is_terminating(pod):
            return [PodStep(ordinal, delete=True)]
        if not observed.is_available(ordinal):
            break
    return []


def _ordinal(owner: ObjectKey, pod: Object) -> int | None:
    found = _ORDINAL.fullmatch(pod["metadata"]["name"])
    return int(found[2]) if found and found[1] == owner.name and str(int(found[2])) == found[2] else None


def _new_pod(owner: Object, ordinal: int, observed: _Observed) -> Object:
    spec, revision = spec_of(owner), observed.revision_of(ordinal)
    name, service = f"{owner['metadata']['name']}-{ordinal}", spec.get("serviceName") or ""
    names = {POD_NAME: name, POD_INDEX: str(ordinal), HASH_LABEL: revision.name}
    pod: dict[str, Any] = {"hostname": name, **({"subdomain": service} if service else {})}
    if claims := spec.get("volumeClaimTemplates"):
        # The lab has no persistent volumes: each claim is an empty directory.
        own = {each["metadata"]["name"] for each in claims}
        given = (revision.template.get("spec") or {}).get("volumes") or []
        kept = [each for each in given if each.get("name") not in own]
        pod["volumes"] = [*kept, *({"name": each, "emptyDir": {}} for each in sorted(own))]
    return pod_of(owner, revision.template, name, generated=False, labels=names, **pod)


def _status(observed: _Observed) -> Iterator[ReconcileResult]:
    stateful_set, update, current = observed.stateful_set, observed.update, observed.current
    pods = list(observed.pods.values())
    living = [pod for pod in pods if not is_terminating(pod) and not is_pod_finished(pod)]
    moments = [at for pod in living if (at := observed.available_at(pod)) is not None]
    numbers = {
        "currentReplicas": _of_revision(living, current),
        "updatedReplicas": _of_revision(living, update),
        "readyReplicas": len(moments),
    }
    complete = numbers["updatedReplicas"] == numbers["readyReplicas"] == len(pods)
    if observed.rolling and complete:
        current = update
        numbers["currentReplicas"] = numbers["updatedReplicas"]
    kept = {name: value for name, value in status_of(stateful_set).items() if name not in numbers}
    status = {
        **kept,
        "observedGeneration": stateful_set["metadata"].get("generation") or 0,
        "replicas": len(pods),
        "availableReplicas": sum(at <= observed.now for at in moments),
        **{name: value for name, value in numbers.items() if value},
        "currentRevision": current.name,
        "updateRevision": update.name,
        "collisionCount": 0,
    }
    if status != status_of(stateful_set):
        yield UpdateObject("StatefulSet", {**stateful_set, "status": status}, "status")
    later = [at for at in moments if at > observed.now]
    if later:
        yield RequeueAt(min(later))


def _of_revision(pods: Sequence[Object], revision: TemplateRevision) -> int:
    return sum(labels_of(pod).get(HASH_LABEL) == revision.name for pod in pods)
