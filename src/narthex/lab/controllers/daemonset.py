"""The DaemonSet controller (kubernetes `pkg/controller/daemon`): a pod on each node that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange, adopt_and_release
from narthex.lab.controllers.controller_revisions import HASH_LABEL, TemplateRevision, revision_history
from narthex.lab.controllers.deployment.rolling import part_of
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
    integer_or,
    is_pod_finished,
    is_pod_ready,
    is_terminating,
    labels_of,
    spec_of,
    status_of,
)
from narthex.lab.controllers.owned_pods import BURST, PodNames, available_at, created, deleted, keys_with_pods, pod_of
from narthex.lab.controllers.scheduler import is_chosen, tolerates

_FIELD = "metadata.name"
_SURVIVED = ("not-ready", "unreachable")
_IGNORED = ("disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")
"""Taints that pods of DaemonSets tolerate, as names of `node.kubernetes.io`: of effect NoExecute and NoSchedule."""


class DaemonSetController:
    """Keeps one pod on each node that fits, and replaces pods of old templates."""

    name = "daemonset-controller"
    kinds = frozenset({"DaemonSet", "ControllerRevision", "Pod", "Node"})

    def __init__(self) -> None:
        self._names = PodNames()

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the DaemonSet, those that a pod concerns, or all if a node changes."""
        if change.kind == "Node":
            changed = _schedulable_state(change.before) != _schedulable_state(change.after)
            return list(state.all("DaemonSet")) if changed else []
        return keys_with_pods("DaemonSet", change, state)

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Adopt and release pods, create and delete pods, and update the status."""
        daemon_set = state.get("DaemonSet", key)
        if daemon_set is None:
            return
        ownership = [
            write for kind in ("ControllerRevision", "Pod") for write in adopt_and_release(kind, daemon_set, state)
        ]
        if ownership:
            # The changed ownership takes effect in the next reconciliation.
            yield from ownership
            return
        history = revision_history(daemon_set, state)
        revision = history.present
        if history.write is not None:
            yield history.write
        pods = state.dependents_of_kind("Pod", daemon_set)
        nodes = [_daemon_node(daemon_set, revision, node, pods, now) for node in state.all("Node").values()]
        if not is_terminating(daemon_set):
            yield from self._place(key, daemon_set, revision, nodes, pods, state, now)
            in_use = {f"{key.name}-{labels_of(pod).get(HASH_LABEL)}" for pod in pods} | {revision.name}
            yield from history.surplus(daemon_set, in_use)
        yield from _status(daemon_set, nodes, now)

    def _place(
        self,
        key: ObjectKey,
        daemon_set: Object,
        revision: TemplateRevision,
        nodes: Sequence[_DaemonNode],
        pods: Sequence[Object],
        state: ClusterState,
        now: datetime,
    ) -> Iterator[ReconcileResult]:
        """Create missing pods, and delete superfluous, finished, and outdated ones."""
        known = {node.name for node in nodes}
        chosen = choose(nodes, update_limits(daemon_set, sum(node.should_run for node in nodes)))
        lost = [pod for pod in pods if _node_of(pod) not in known and not is_terminating(pod)]
        for pod in [*lost, *chosen.delete]:
            if is_pod_finished(pod):
                phase, name = status_of(pod)["phase"], pod["metadata"]["name"]
                text = f"Found {phase.lower()} daemon pod {key.namespace}/{name} on node {_node_of(pod)}, will try to "
                text += "kill it" if phase == "Failed" else "delete it"
                yield event_about(
                    daemon_set, f"{phase}DaemonPod", text, now, source=self.name, warning=phase == "Failed"
                )
            yield from deleted(daemon_set, pod, now, self.name)
        for node in chosen.create[:BURST]:
            made = _new_pod(daemon_set, revision, node, self._names.next(key, state))
            yield from created(daemon_set, made, now, self.name)


class UpdateLimits(msgspec.Struct, frozen=True):
    """Limits on the number of nodes during a rolling update."""

    rolling: bool = False
    """False: only missing pods are created (OnDelete)."""
    unavailable: int = 0
    surge: int = 0


def update_limits(daemon_set: Object, nodes: int) -> UpdateLimits:
    """Return the limits for a number of nodes; both are rounded up."""
    strategy = spec_of(daemon_set).get("updateStrategy") or {}
    rolling = strategy.get("rollingUpdate") or {}
    surge = part_of(rolling.get("maxSurge", 0), nodes, up=True)
    unavailable = part_of(rolling.get("maxUnavailable", 1), nodes, up=True)
    # One of both is positive, so that the update can proceed.
    return UpdateLimits(strategy.get("type") != "OnDelete", unavailable or (0 if surge else 1), surge)


class _DaemonNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node, and its pods of a DaemonSet, oldest first."""

    name: str
    should_run: bool
    """A pod is to be created."""
    may_stay: bool
    """A pod that runs may stay."""
    old: tuple[Object, ...] = ()
    """Pods of another template that neither end nor have ended."""
    new: tuple[Object, ...] = ()
    """Pods of the present template."""
    finished: tuple[Object, ...] = ()
    ending: tuple[Object, ...] = ()
    available: frozenset[str] = frozenset()
    """Names of the pods that are available."""

    @property
    def pods(self) -> tuple[Object, ...]:
        """The pods that count, the most useful first."""
        running = (*self.old, *self.new)
        return tuple(
            sorted(running, key=lambda pod: (not is_pod_ready(pod), pod["metadata"].get("creationTimestamp") or ""))
        )

    def has(self, pods: Sequence[Object]) -> bool:
        """Return True if one of these pods is available."""
        return any(pod["metadata"]["name"] in self.available for pod in pods)


class PodChoice(msgspec.Struct, frozen=True):
    """Pods to delete, and nodes that get one."""

    create: list[str]
    delete: list[Object]


def choose(nodes: Sequence[_DaemonNode], limits: UpdateLimits) -> PodChoice:
    """Return which pods to create and delete now."""
    create: list[str] = []
    delete: list[Object] = []
    replaceable: list[_DaemonNode] = []
    free = [node for node in nodes if node.should_run]
    room = limits.surge if limits.surge else limits.unavailable
    for node in nodes:
        delete += node.finished
        if not node.may_stay:
            delete += node.pods
        elif node.should_run and not node.pods:
            # A pod that ends keeps its place, as upstream.
            create += [node.name] if not node.ending and not node.finished else []
        else:
            surging = limits.surge and len(node.old) == len(node.new) == 1
            delete += () if surging else node.pods[1:]
    if not limits.rolling:
        return PodChoice(create, delete)
    for node in free:
        if limits.surge and node.old and node.new:
            # The new pod takes over once it is available.
            delete += node.old if node.has(node.new) else ()
            room -= not node.has(node.new)
        elif node.new or not node.old:
            room -= 0 if limits.surge or node.has(node.new) else 1
        elif node.has(node.old):
            replaceable.append(node)
        elif limits.surge:
            create.append(node.name)
        else:
            # It is not available anyway.
            delete += node.old
            room -= 1
    for node in replaceable[: max(0, room)]:
        if limits.surge:
            create.append(node.name)
        else:
            delete += node.old
    unique = {pod["metadata"]["name"]: pod for pod in delete}
    return PodChoice(create, list(unique.values()))


def _daemon_node(
    daemon_set: Object, revision: TemplateRevision, node: Object, pods: Sequence[Object], now: datetime
) -> _DaemonNode:
    name = node["metadata"]["name"]
    should_run, may_stay = fits(daemon_set, node)
    min_ready = timedelta(seconds=integer_or(spec_of(daemon_set).get("minReadySeconds")))
    mine = [pod for pod in pods if _node_of(pod) == name]
    active = [pod for pod in mine if not is_terminating(pod) and not is_pod_finished(pod)]
    return _DaemonNode(
        name=name,
        should_run=should_run and not is_terminating(node),
        may_stay=may_stay,
        old=tuple(pod for pod in active if labels_of(pod).get(HASH_LABEL) != revision.hash),
        new=tuple(pod for pod in active if labels_of(pod).get(HASH_LABEL) == revision.hash),
        finished=tuple(pod for pod in mine if is_pod_finished(pod) and not is_terminating(pod)),
        ending=tuple(pod for pod in mine if is_terminating(pod)),
        available=frozenset(
            pod["metadata"]["name"] for pod in active if is_pod_ready(pod) and available_at(pod, min_ready, now) <= now
        ),
    )


def fits(daemon_set: Object, node: Object) -> tuple[bool, bool]:
    """Return whether a node gets a pod, and whether one that runs may stay (nodeShouldRunDaemonPod)."""
    template = spec_of(daemon_set).get("template") or {}
    spec = {**(template.get("spec") or {})}
    spec["tolerations"] = _tolerations(spec)
    if spec.get("nodeName") not in (None, "", node["metadata"]["name"]) or not is_chosen(spec, node):
        return False, False
    pod = {"metadata": {}, "spec": spec}
    untolerated = {taint.get("effect") for taint in spec_of(node).get("taints") or () if not tolerates(pod, taint)}
    return not untolerated & {"NoSchedule", "NoExecute"}, "NoExecute" not in untolerated


def _tolerations(spec: Mapping[str, Any]) -> list[Object]:
    ignored = (*_IGNORED, "network-unavailable") if spec.get("hostNetwork") else _IGNORED
    added = [(name, "NoExecute") for name in _SURVIVED] + [(name, "NoSchedule") for name in ignored]
    made = [{"key": f"node.kubernetes.io/{name}", "operator": "Exists", "effect": effect} for name, effect in added]
    given = spec.get("tolerations") or []
    return [*(each for each in given if each not in made), *made]


def _new_pod(daemon_set: Object, revision: TemplateRevision, node: str, name: str) -> Object:
    spec = revision.template.get("spec") or {}
    affinity = spec.get("affinity") or {}
    only = [{"key": _FIELD, "operator": "In", "values": [node]}]
    of_node = affinity.get("nodeAffinity") or {}
    required = of_node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    # As upstream: the name of the node replaces the fields of each term.
    terms = [{**term, "matchFields": only} for term in required.get("nodeSelectorTerms") or [{}]]
    chosen = {**of_node, "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return pod_of(
        daemon_set,
        revision.template,
        name,
        labels={HASH_LABEL: revision.hash},
        affinity={**affinity, "nodeAffinity": chosen},
        tolerations=_tolerations(spec),
    )


def _node_of(pod: Object) -> str:
    """Return the node of a pod, also before it is scheduled."""
    spec = spec_of(pod)
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    for term in affinity.get("nodeSelectorTerms") or ():
        for each in term.get("matchFields") or ():
            if each.get("key") == _FIELD and each.get("values"):
                return str(each["values"][0])
    return ""


def _status(daemon_set: Object, nodes: Sequence[_DaemonNode], now: datetime) -> Iterator[ReconcileResult]:
    desired = [node for node in nodes if node.should_run]
    running = [node for node in desired if node.pods]
    available = sum(node.has(node.pods) for node in running)
    always = {
        "currentNumberScheduled": len(running),
        "numberMisscheduled": sum(bool(node.pods) for node in nodes if not node.should_run),
        "desiredNumberScheduled": len(desired),
        "numberReady": sum(any(map(is_pod_ready, node.pods)) for node in running),
        "observedGeneration": daemon_set["metadata"].get("generation") or 0,
    }
    others = {
        "updatedNumberScheduled": sum(bool(node.new) for node in running),
        "numberAvailable": available,
        "numberUnavailable": len(desired) - available,
    }
    kept = {name: value for name, value in status_of(daemon_set).items() if name not in {**always, **others}}
    status = {**kept, **always, **{name: value for name, value in others.items() if value}}
    if status != status_of(daemon_set):
        yield UpdateObject("DaemonSet", {**daemon_set, "status": status}, "status")
    min_ready = timedelta(seconds=integer_or(spec_of(daemon_set).get("minReadySeconds")))
    moments = [available_at(pod, min_ready, now) for node in running for pod in node.pods if is_pod_ready(pod)]
    later = [at for at in moments if at > now]
    if later:
        yield RequeueAt(min(later))


def _schedulable_state(node: Object | None) -> object:
    """Return the fields of a node that decide which pods fit."""
    if node is None:
        return None
    return labels_of(node), spec_of(node).get("taints"), spec_of(node).get("unschedulable")
