"""The scheduler: spreads the pods of an owner over nodes and zones that fit, with kube-scheduler's reasons for those that do not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.endpointslice.pod_endpoints import ZONE
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.objects import (
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
    condition,
    condition_holds,
    controller_of,
    decimal,
    is_pod_finished,
    is_terminating,
    labels_of,
    spec_of,
    status_of,
    update_condition,
    with_fields,
)
from narthex.lab.topology import MAX_PODS_PER_NODE
from narthex.model.selector import NODE_OPERATORS, expression_matches

UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_ANY_ADDRESS = ("", "0.0.0.0", "::")
_DIGITS = re.compile(r"(\d+)", re.ASCII)

HostPort = tuple[str, str, int]
"""Host address, protocol, port."""


class Scheduler:
    """Binds pods to nodes and reports the reason when no node fits."""

    name = "default-scheduler"
    kinds = frozenset({"Pod", "Node"})

    def __init__(self) -> None:
        self._waiting: set[ObjectKey] = set()
        self._capacities: tuple[int, _NodeCapacities] | None = None
        """Capacities for one version of the state, including pods assigned since."""

    def affected_keys(self, change: ObjectChange, _state: ClusterState) -> Iterable[ObjectKey]:
        """Return a pod to schedule, or all unschedulable pods when a node changes or a pod releases its place."""
        if change.kind == "Pod":
            if change.after is not None and not is_terminating(change.after) and _needs_scheduling(change.after):
                return [change.key]
            self._waiting.discard(change.key)
            gone = change.after is None or is_pod_finished(change.after)
            return self._waiting if gone and spec_of(change.latest).get("nodeName") else []
        if change.kind == "Node" and _schedulable_state(change.before) != _schedulable_state(change.after):
            return self._waiting
        return []

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Bind the pod, or set its condition PodScheduled to False."""
        pod = state.get("Pod", key)
        if pod is None or is_terminating(pod) or not _needs_scheduling(pod):
            return
        if spec_of(pod).get("nodeName"):
            self._waiting.discard(key)
            yield _status_update(pod, {"type": "PodScheduled", "status": "True"}, now)
            return
        if self._capacities is None or self._capacities[0] != state.version:
            self._capacities = state.version, _NodeCapacities(state)
        name, message = self._capacities[1].select_node(pod)
        if name:
            self._waiting.discard(key)
            yield UpdateObject("Pod", with_fields(pod, "spec", nodeName=name), "binding")
            yield event_about(pod, "Scheduled", f"Successfully assigned {key} to {name}", now, source=self.name)
            return
        self._waiting.add(key)
        if condition(pod, "PodScheduled").get("message") != message:
            new = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            yield _status_update(pod, new, now)
            yield event_about(pod, "FailedScheduling", message, now, source=self.name, warning=True)


def _needs_scheduling(pod: Object) -> bool:
    """Return True if the pod has no node, or its condition PodScheduled is not yet True."""
    spec = spec_of(pod)
    if is_pod_finished(pod) or spec.get("schedulerName") not in (None, "", Scheduler.name):
        return False
    return not spec.get("nodeName") or not condition_holds(pod, "PodScheduled")


def _status_update(pod: Object, new: Object, now: datetime) -> UpdateObject:
    return update_condition("Pod", pod, new, now, phase=status_of(pod).get("phase") or "Pending")


def _schedulable_state(node: Object | None) -> object:
    """Return the fields of a node that decide which pods fit."""
    if node is None:
        return None
    spec = spec_of(node)
    return labels_of(node), spec.get("unschedulable"), spec.get("taints"), pod_capacity(node)


class _NodeCapacities:
    """Pods, host ports, and spread of owners on all nodes."""

    def __init__(self, state: ClusterState) -> None:
        self._nodes = sorted(
            (node for node in state.all("Node").values() if not is_terminating(node)),
            key=lambda node: _natural(node["metadata"]["name"]),
        )
        self._pods: Counter[str] = Counter()
        self._ports: dict[str, list[HostPort]] = {}
        self._siblings: Counter[tuple[str, str]] = Counter()
        self._zones = {node["metadata"]["name"]: labels_of(node).get(ZONE) or "" for node in self._nodes}
        for name in self._zones:
            for pod in state.pods_on_node(name):
                if not is_pod_finished(pod):
                    self._assign(pod, name)

    def _assign(self, pod: Object, node: str) -> None:
        self._pods[node] += 1
        self._ports.setdefault(node, []).extend(host_ports(pod))
        owner = _owner_uid(pod)
        if owner and not is_terminating(pod):
            self._siblings[owner, "node/" + node] += 1
            self._siblings[owner, "zone/" + self._zones[node]] += 1

    def select_node(self, pod: Object) -> tuple[str, str]:
        """Assign the pod to the best node and return its name; else return an empty name and the reason.

        Ranking: fewest untolerated PreferNoSchedule taints, fewest pods of the same owner on the node, then in the zone, fewest pods.
        """
        reasons: Counter[str] = Counter()
        best: tuple[tuple[int, ...], str] | None = None
        owner = _owner_uid(pod)
        for index, node in enumerate(self._nodes):
            name = node["metadata"]["name"]
            reason = rejection_reason(pod, node, self._pods[name], self._ports.get(name, ()))
            if reason:
                reasons[reason] += 1
                continue
            siblings, zone = self._siblings[owner, "node/" + name], self._siblings[owner, "zone/" + self._zones[name]]
            rank = (untolerated_preferences(pod, node), siblings, zone, self._pods[name], index)
            if best is None or rank < best[0]:
                best = rank, name
        if best is not None:
            self._assign(pod, best[1])
            return best[1], ""
        if not self._nodes:
            return "", "no nodes available to schedule pods"
        current = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        return "", f"0/{len(self._nodes)} nodes are available: {current}."


def _owner_uid(pod: Object) -> str:
    owner = controller_of(pod)
    return str(owner.get("uid") or "") if owner is not None else ""


def _natural(name: str) -> tuple[object, ...]:
    """Return a sort key that places node-2 before node-10."""
    return tuple((part.zfill(20) if part.isdigit() else part) for part in _DIGITS.split(name))


def rejection_reason(pod: Object, node: Object, pods: int, ports: Iterable[HostPort]) -> str:
    """Return the reason why a node does not fit a pod, empty if it does.

    Args:
        pod: The pod to schedule.
        node: The node to check.
        pods: Number of pods on the node.
        ports: Host ports in use on the node.
    """
    spec = spec_of(pod)
    cordon = {"key": UNSCHEDULABLE, "effect": "NoSchedule"}
    if spec_of(node).get("unschedulable") and not tolerates(pod, cordon):
        return "node(s) were unschedulable"
    for taint in spec_of(node).get("taints") or ():
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not tolerates(pod, taint):
            return f"node(s) had untolerated taint {{{taint.get('key')}: {taint.get('value') or ''}}}"
    if not is_chosen(spec, node):
        return "node(s) didn't match Pod's node affinity/selector"
    if any(_collide(mine, other) for mine in host_ports(pod) for other in ports):
        return "node(s) didn't have free ports for the requested pod ports"
    if pods >= pod_capacity(node):
        return "Too many pods"
    return ""


def pod_capacity(node: Object) -> int:
    """Return the maximum number of pods on a node."""
    number = decimal(str((status_of(node).get("allocatable") or {}).get("pods")))
    return MAX_PODS_PER_NODE if number is None else min(number, MAX_PODS_PER_NODE)


def tolerates(pod: Object, taint: Mapping[str, Any]) -> bool:
    """Return True if the pod tolerates the taint."""
    return toleration(pod, taint) is not None


def toleration(pod: Object, taint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first toleration of the pod that matches the taint, None if there is none."""
    for each in spec_of(pod).get("tolerations") or ():
        if each.get("effect") not in (None, "", taint.get("effect")):
            continue
        exists = each.get("operator") == "Exists"
        if not each.get("key"):
            if exists:
                return dict(each)
        elif each["key"] == taint.get("key") and (exists or (each.get("value") or "") == (taint.get("value") or "")):
            return dict(each)
    return None


def untolerated_preferences(pod: Object, node: Object) -> int:
    """Return the number of untolerated PreferNoSchedule taints."""
    taints = spec_of(node).get("taints") or ()
    return sum(1 for taint in taints if taint.get("effect") == "PreferNoSchedule" and not tolerates(pod, taint))


def host_ports(pod: Object) -> Iterator[HostPort]:
    """Yield the host ports that a pod uses."""
    for container in spec_of(pod).get("containers") or ():
        for port in container.get("ports") or ():
            number = port.get("hostPort") or (port.get("containerPort") if spec_of(pod).get("hostNetwork") else None)
            if number:
                yield port.get("hostIP") or "", port.get("protocol") or "TCP", number


def _collide(one: HostPort, other: HostPort) -> bool:
    return one[1:] == other[1:] and (one[0] == other[0] or one[0] in _ANY_ADDRESS or other[0] in _ANY_ADDRESS)


def is_chosen(spec: Mapping[str, Any], node: Object) -> bool:
    """Return True if a pod's node selector and required node affinity select the node."""
    labels = labels_of(node)
    if any(labels.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(_meets_term(term, node) for term in required.get("nodeSelectorTerms") or ())


def _meets_term(term: Mapping[str, Any], node: Object) -> bool:
    labels, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    named = {"metadata.name": node["metadata"]["name"]}
    # An empty term matches no node.
    return bool(labels or fields) and all(
        expression_matches(each, have, NODE_OPERATORS)
        for some, have in ((labels, labels_of(node)), (fields, named))
        for each in some
    )
