"""Nodes that are not heard of any more (kubernetes `pkg/controller/nodelifecycle`, `tainteviction`, `podgc`).

A node lives as long as its Lease in kube-node-lease is renewed. One that never had a Lease is left as it says of itself: it
is an object that somebody wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.interfaces import (
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    UpdateObject,
)
from narthex.lab.controllers.objects import (
    condition,
    format_time,
    integer_or,
    is_pod_finished,
    is_terminating,
    key_of,
    parse_time,
    spec_of,
    status_of,
    with_condition,
    with_spec,
    with_status,
)
from narthex.lab.controllers.scheduling_filters import UNSCHEDULABLE, toleration
from narthex.lab.controllers.settings import Settings

LEASES = "kube-node-lease"
NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"
_OURS = (NOT_READY, UNREACHABLE, UNSCHEDULABLE)
_HEALTH = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure")
_UNKNOWN = "NodeStatusUnknown"
_NODE_NOT_READY = "NodeNotReady"


_DOUBT = 0.25
"""The part of the grace that a node gets once it is over: whoever looks late must not take his own sleep for the node's."""


class _Heard(NamedTuple):
    """What was last heard of a node."""

    heartbeat: str
    """What its Lease says."""
    at: datetime
    """When that was seen here: the node's clock does not count."""
    doubted: datetime | None
    """When the grace was seen to be over."""


class NodeLifecycleController:
    """Tells that a node is unknown, taints it, takes its pods out of service, and in the end away."""

    name = "node-controller"
    kinds = frozenset({"Node", "Lease", "Pod"})

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._heard: dict[str, _Heard] = {}

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The node, that of a Lease, that of a pod when it has taints."""
        if seen.kind == "Node" or (seen.kind == "Lease" and seen.key.namespace == LEASES):
            return [ObjectKey("", seen.key.name)]
        if seen.kind == "Pod" and seen.after is not None:
            name = spec_of(seen.after).get("nodeName")
            node = present.get("Node", ObjectKey("", name)) if name else None
            if node is not None and spec_of(node).get("taints"):
                return [ObjectKey("", str(name))]
        return []

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """What the cluster makes of the node."""
        node = present.get("Node", key)
        if node is None:
            self._heard.pop(key.name, None)
            # Nobody else will ever say that these pods are gone.
            for pod in present.pods_on(key.name):
                yield DeleteObject("Pod", *key_of(pod), grace=0)
            return
        due = self._silent_at(node, present, now)
        if due is not None and due > now:
            yield RequeueAt(due)
        told = list(_condition(node, silent=due is not None and due <= now, heard=due is not None, now=now))
        if told:
            # Taints follow from what it says next.
            yield from told
            return
        taints = _taints(node, now)
        if taints != (spec_of(node).get("taints") or []):
            yield UpdateObject("Node", with_spec(node, taints=taints or None))
            return
        pods = present.pods_on(key.name)
        yield from _service(node, pods, now)
        yield from self._evict(taints, pods, now)

    def _silent_at(self, node: Object, present: ClusterState, now: datetime) -> datetime | None:
        """When the node counts as silent, if no heartbeat comes until then; None for one without a Lease."""
        name = node["metadata"]["name"]
        lease = present.get("Lease", ObjectKey(LEASES, name))
        if lease is None:
            return None
        grace = timedelta(seconds=self._settings.node_grace)
        renewed = str(spec_of(lease).get("renewTime") or "")
        known = self._heard.get(name)
        if known is None and (condition(node, "Ready") or {}).get("reason") == _UNKNOWN:
            # This controller is new, the node's silence is not: only the next heartbeat ends it.
            known = _Heard(renewed, now - grace, now - grace)
        elif known is None or known.heartbeat != renewed:
            known = _Heard(renewed, now, None)
        elif known.doubted is None and known.at + grace <= now:
            # Perhaps this process had no turn for as long, and the heartbeats wait beside it.
            known = known._replace(doubted=now)
        self._heard[name] = known
        return known.at + grace if known.doubted is None else known.doubted + grace * _DOUBT

    def _evict(self, taints: Sequence[Object], pods: Sequence[Object], now: datetime) -> Iterator[ReconcileResult]:
        lasting = [taint for taint in taints if taint.get("effect") == "NoExecute"]
        for pod in pods if lasting else ():
            if is_terminating(pod) or is_pod_finished(pod):
                continue
            ends = [self._end(pod, taint, now) for taint in lasting]
            due = min((end for end in ends if end is not None), default=None)
            if due is None:
                continue
            if due > now:
                yield RequeueAt(due)
                continue
            key = key_of(pod)
            yield DeleteObject("Pod", key.namespace, key.name)
            words = f"Marking for deletion Pod {key}"
            yield event_about(pod, "TaintManagerEviction", words, now, source="taint-eviction-controller")

    def _end(self, pod: Object, taint: Mapping[str, Any], now: datetime) -> datetime | None:
        """When the pod has to go for a taint; None: it may stay."""
        since = parse_time(taint.get("timeAdded")) or now
        found = toleration(pod, taint)
        if found is None:
            # kube-apiserver gives every pod such a toleration (DefaultTolerationSeconds).
            lost = taint.get("key") in (NOT_READY, UNREACHABLE)
            return since + timedelta(seconds=self._settings.lost_pod_seconds) if lost else now
        seconds = found.get("tolerationSeconds")
        return None if seconds is None else since + timedelta(seconds=max(0, integer_or(seconds)))


def _condition(node: Object, *, silent: bool, heard: bool, now: datetime) -> Iterator[ReconcileResult]:
    """The node's conditions, as long as nobody but this controller can tell them."""
    ready = condition(node, "Ready") or {}
    conditions = list(status_of(node).get("conditions") or [])
    name = node["metadata"]["name"]
    if silent and ready.get("reason") != _UNKNOWN:
        for kind in _HEALTH:
            have = condition(node, kind)
            if have is not None or kind == "Ready":
                words = "Kubelet stopped posting node status."
                lost = {**(have or {}), "type": kind, "status": "Unknown", "reason": _UNKNOWN, "message": words}
                conditions = with_condition(conditions, lost, now)
        yield UpdateObject("Node", with_status(node, conditions=conditions), "status")
        yield event_about(
            node, _NODE_NOT_READY, f"Node {name} status is now: {_NODE_NOT_READY}", now, source="node-controller"
        )
    elif heard and not silent and ready.get("reason") == _UNKNOWN:
        for kind in _HEALTH:
            have = condition(node, kind)
            if have is not None and have.get("reason") == _UNKNOWN:
                good = "True" if kind == "Ready" else "False"
                back = {**have, "status": good, "reason": "KubeletReady", "message": "kubelet is posting ready status"}
                conditions = with_condition(conditions, back, now)
        yield UpdateObject("Node", with_status(node, conditions=conditions), "status")
        yield event_about(node, "NodeReady", f"Node {name} status is now: NodeReady", now, source="node-controller")


def _taints(node: Object, now: datetime) -> list[Object]:
    """Others' taints, and those that follow from the node's state."""
    have: list[Object] = list(spec_of(node).get("taints") or [])
    status = (condition(node, "Ready") or {}).get("status")
    wanted = []
    if status in ("False", "Unknown"):
        name = UNREACHABLE if status == "Unknown" else NOT_READY
        wanted += [(name, "NoSchedule"), (name, "NoExecute")]
    if spec_of(node).get("unschedulable"):
        wanted.append((UNSCHEDULABLE, "NoSchedule"))
    kept = [taint for taint in have if taint.get("key") not in _OURS or (taint["key"], taint.get("effect")) in wanted]
    present = {(taint.get("key"), taint.get("effect")) for taint in kept}
    new = [
        {"key": name, "effect": effect, "timeAdded": format_time(now)}
        for name, effect in wanted
        if (name, effect) not in present
    ]
    return [*kept, *new]


def _service(node: Object, pods: Sequence[Object], now: datetime) -> Iterator[ReconcileResult]:
    """Nothing is sent to the pods of a node that is not ready; they serve again when it is back."""
    state = (condition(node, "Ready") or {}).get("status")
    for pod in pods:
        ready = condition(pod, "Ready") or {}
        if state in ("False", "Unknown") and ready.get("status") == "True":
            new = {**ready, "status": "False", "reason": _NODE_NOT_READY}
            yield event_about(pod, _NODE_NOT_READY, "Node is not ready", now, source="node-controller", warning=True)
        elif state == "True" and ready.get("status") == "False" and ready.get("reason") == _NODE_NOT_READY:
            new = {name: value for name, value in ready.items() if name != "reason"} | {"status": "True"}
        else:
            continue
        conditions = with_condition(status_of(pod).get("conditions") or [], new, now)
        yield UpdateObject("Pod", with_status(pod, conditions=conditions), "status")
