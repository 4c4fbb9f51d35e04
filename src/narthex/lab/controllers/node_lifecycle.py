"""The node lifecycle controller (kubernetes `pkg/controller/{nodelifecycle,tainteviction,podgc}`).

A node is alive while its Lease in kube-node-lease is renewed. The status of a node that never had a Lease is not changed:
a user wrote the object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from narthex.lab.api.registry import stamp
from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.objects import (
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
    condition,
    integer_or,
    is_pod_finished,
    is_terminating,
    key_of,
    parse_time,
    spec_of,
    status_of,
    update_condition,
    with_condition,
    with_fields,
)
from narthex.lab.controllers.scheduler import UNSCHEDULABLE, toleration

LEASES = "kube-node-lease"
NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"
_MANAGED_TAINTS = (NOT_READY, UNREACHABLE, UNSCHEDULABLE)
_HEALTH = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure")
_UNKNOWN = "NodeStatusUnknown"
_NODE_NOT_READY = "NodeNotReady"
NODE_GRACE_SECONDS = 2.0
"""Time without a heartbeat after which a node is unknown (`--node-monitor-grace-period`). Kubernetes waits 40 s."""
EXTERNAL_NODE_GRACE_SECONDS = 10.0
"""The same for a kube-controller-manager, which does not notice that the whole machine was busy meanwhile."""
_GRACE = timedelta(seconds=NODE_GRACE_SECONDS)
_SUSPECT_GRACE = _GRACE / 4
"""Added once the grace period has passed: this process may have been suspended instead of the node."""
_LOST_POD_GRACE = timedelta(seconds=300)
"""Time that pods without a toleration of their own stay on a node that is not ready (`--default-unreachable-toleration-seconds`).
"""


class _LastHeartbeat(NamedTuple):
    """The last Lease renewal of a node."""

    renew_time: str
    """`spec.renewTime` of the Lease."""
    at: datetime
    """When the controller observed it; the node's clock is not used."""
    suspect_since: datetime | None
    """When the grace period was first observed to have passed."""


class NodeLifecycleController:
    """Marks unresponsive nodes as unknown, taints them, and evicts their pods."""

    name = "node-controller"
    kinds = frozenset({"Node", "Lease", "Pod"})

    def __init__(self) -> None:
        self._heartbeats: dict[str, _LastHeartbeat] = {}

    def affected_keys(self, change: ObjectChange, state: ClusterState) -> Iterable[ObjectKey]:
        """Return the node, the node of a Lease, or the tainted node of a pod."""
        if change.kind == "Node" or (change.kind == "Lease" and change.key.namespace == LEASES):
            return [ObjectKey("", change.key.name)]
        if change.kind == "Pod" and change.after is not None:
            name = spec_of(change.after).get("nodeName")
            node = state.get("Node", ObjectKey("", name)) if name else None
            if node is not None and spec_of(node).get("taints"):
                return [ObjectKey("", str(name))]
        return []

    def reconcile(self, key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Yield the writes that the node and its pods need."""
        node = state.get("Node", key)
        if node is None:
            self._heartbeats.pop(key.name, None)
            # The kubelet of a deleted node does not confirm the deletion of its pods.
            for pod in state.pods_on_node(key.name):
                yield DeleteObject("Pod", key_of(pod), grace=0)
            return
        due = self._unresponsive_at(node, state, now)
        if due is not None and due > now:
            yield RequeueAt(due)
        updates = list(_condition_updates(node, due, now))
        if updates:
            # Taints follow from the updated conditions.
            yield from updates
            return
        taints = _taints(node, now)
        if taints != (spec_of(node).get("taints") or []):
            yield UpdateObject("Node", with_fields(node, "spec", taints=taints or None))
            return
        pods = state.pods_on_node(key.name)
        yield from _update_pod_readiness(node, pods, now)
        yield from _evict(taints, pods, now)

    def _unresponsive_at(self, node: Object, state: ClusterState, now: datetime) -> datetime | None:
        """Return the time at which the node becomes unresponsive without a further heartbeat; None if it has no Lease."""
        name = node["metadata"]["name"]
        lease = state.get("Lease", ObjectKey(LEASES, name))
        if lease is None:
            return None
        renewed = str(spec_of(lease).get("renewTime") or "")
        last = self._heartbeats.get(name)
        if last is None and condition(node, "Ready").get("reason") == _UNKNOWN:
            # The node was unresponsive before this controller started: wait for a new heartbeat.
            last = _LastHeartbeat(renewed, now - _GRACE, now - _GRACE)
        elif last is None or last.renew_time != renewed:
            last = _LastHeartbeat(renewed, now, None)
        elif last.suspect_since is None and last.at + _GRACE <= now:
            # This process may have been suspended itself, with renewals still pending.
            last = last._replace(suspect_since=now)
        self._heartbeats[name] = last
        return last.at + _GRACE if last.suspect_since is None else last.suspect_since + _SUSPECT_GRACE


def _evict(taints: Sequence[Object], pods: Sequence[Object], now: datetime) -> Iterator[ReconcileResult]:
    no_execute = [taint for taint in taints if taint.get("effect") == "NoExecute"]
    for pod in pods if no_execute else ():
        if is_terminating(pod) or is_pod_finished(pod):
            continue
        ends = [_eviction_time(pod, taint, now) for taint in no_execute]
        due = min((end for end in ends if end is not None), default=None)
        if due is None:
            continue
        if due > now:
            yield RequeueAt(due)
            continue
        key = key_of(pod)
        yield DeleteObject("Pod", key)
        message = f"Marking for deletion Pod {key}"
        yield event_about(pod, "TaintManagerEviction", message, now, source="taint-eviction-controller")


def _eviction_time(pod: Object, taint: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return the time at which a taint evicts the pod; None if the pod tolerates it forever."""
    since = parse_time(taint.get("timeAdded")) or now
    found = toleration(pod, taint)
    if found is None:
        # kube-apiserver adds this toleration to every pod (DefaultTolerationSeconds).
        lost = taint.get("key") in (NOT_READY, UNREACHABLE)
        return since + _LOST_POD_GRACE if lost else now
    seconds = found.get("tolerationSeconds")
    return None if seconds is None else since + timedelta(seconds=max(0, integer_or(seconds)))


def _condition_updates(node: Object, due: datetime | None, now: datetime) -> Iterator[ReconcileResult]:
    """Yield the status update when a node becomes unresponsive (at `due`) or responsive again."""
    is_unknown = condition(node, "Ready").get("reason") == _UNKNOWN
    unresponsive = due is not None and due <= now
    if due is None or unresponsive == is_unknown:
        return
    conditions = list(status_of(node).get("conditions") or [])
    for kind in _HEALTH:
        have = condition(node, kind)
        if unresponsive and (have or kind == "Ready"):
            new = {"status": "Unknown", "reason": _UNKNOWN, "message": "Kubelet stopped posting node status."}
        elif not unresponsive and have.get("reason") == _UNKNOWN:
            good = "True" if kind == "Ready" else "False"
            new = {"status": good, "reason": "KubeletReady", "message": "kubelet is posting ready status"}
        else:
            continue
        conditions = with_condition(conditions, {**have, "type": kind, **new}, now)
    yield UpdateObject("Node", with_fields(node, "status", conditions=conditions), "status")
    reason = _NODE_NOT_READY if unresponsive else "NodeReady"
    message = f"Node {node['metadata']['name']} status is now: {reason}"
    yield event_about(node, reason, message, now, source="node-controller")


def _taints(node: Object, now: datetime) -> list[Object]:
    """Return foreign taints and those that follow from the node's condition."""
    have: list[Object] = list(spec_of(node).get("taints") or [])
    status = condition(node, "Ready").get("status")
    desired = []
    if status in ("False", "Unknown"):
        name = UNREACHABLE if status == "Unknown" else NOT_READY
        desired += [(name, "NoSchedule"), (name, "NoExecute")]
    if spec_of(node).get("unschedulable"):
        desired.append((UNSCHEDULABLE, "NoSchedule"))
    kept = [
        taint
        for taint in have
        if taint.get("key") not in _MANAGED_TAINTS or (taint["key"], taint.get("effect")) in desired
    ]
    existing = {(taint.get("key"), taint.get("effect")) for taint in kept}
    new = [
        {"key": name, "effect": effect, "timeAdded": stamp(now)}
        for name, effect in desired
        if (name, effect) not in existing
    ]
    return [*kept, *new]


def _update_pod_readiness(node: Object, pods: Sequence[Object], now: datetime) -> Iterator[ReconcileResult]:
    """Mark the pods of a node that is not ready as not ready, and restore them when it is ready again."""
    ready_status = condition(node, "Ready").get("status")
    for pod in pods:
        ready = condition(pod, "Ready")
        if ready_status in ("False", "Unknown") and ready.get("status") == "True":
            new = {**ready, "status": "False", "reason": _NODE_NOT_READY}
            yield event_about(pod, _NODE_NOT_READY, "Node is not ready", now, source="node-controller", warning=True)
        elif ready_status == "True" and ready.get("status") == "False" and ready.get("reason") == _NODE_NOT_READY:
            new = {name: value for name, value in ready.items() if name != "reason"} | {"status": "True"}
        else:
            continue
        yield update_condition("Pod", pod, new, now)
