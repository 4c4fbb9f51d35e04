"""Pods get a node: where fewest of their siblings are, then in the zone with fewest of them, then where fewest pods are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime

from narthex.lab.controllers import scheduling_filters as fitness
from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.endpointslice.pod_endpoints import ZONE
from narthex.lab.controllers.events import event_about
from narthex.lab.controllers.interfaces import (
    Object,
    ObjectKey,
    ReconcileResult,
    UpdateObject,
)
from narthex.lab.controllers.objects import (
    condition,
    controller_of,
    is_pod_finished,
    is_terminating,
    labels_of,
    spec_of,
    status_of,
    with_condition,
    with_spec,
    with_status,
)

_DIGITS = re.compile(r"(\d+)", re.ASCII)


class Scheduler:
    """Binds pods, and tells those that no node takes why."""

    name = "default-scheduler"
    kinds = frozenset({"Pod", "Node"})

    def __init__(self) -> None:
        self._waiting: set[ObjectKey] = set()
        self._room: tuple[int, _Room] | None = None
        """Of one version of the cluster, with what pods have been promised since: all of a turn see the same version."""

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """A pod that needs a node or has just got one; all that wait, when a node changes or a pod makes room."""
        del present
        if seen.kind == "Pod":
            if seen.after is not None and not is_terminating(seen.after) and _unsettled(seen.after):
                return [seen.key]
            self._waiting.discard(seen.key)
            gone = seen.after is None or is_pod_finished(seen.after)
            return self._waiting if gone and spec_of(seen.latest).get("nodeName") else []
        if seen.kind == "Node" and _offer(seen.before) != _offer(seen.after):
            return self._waiting
        return []

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterable[ReconcileResult]:
        """A node for the pod."""
        pod = present.get("Pod", key)
        if pod is None:
            return ()
        if self._room is None or self._room[0] != present.version:
            self._room = present.version, _Room(present)
        return self._look(key, pod, self._room[1], now)

    def _look(self, key: ObjectKey, pod: Object, room: _Room, now: datetime) -> Iterator[ReconcileResult]:
        if is_terminating(pod) or not _unsettled(pod):
            return
        if spec_of(pod).get("nodeName"):
            self._waiting.discard(key)
            yield _told(pod, {"type": "PodScheduled", "status": "True"}, now)
            return
        name, message = room.choose(pod)
        if name:
            self._waiting.discard(key)
            yield UpdateObject("Pod", with_spec(pod, nodeName=name), "binding")
            yield event_about(pod, "Scheduled", f"Successfully assigned {key} to {name}", now, source=self.name)
            return
        self._waiting.add(key)
        said = condition(pod, "PodScheduled") or {}
        if said.get("message") != message:
            new = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            yield _told(pod, new, now)
            yield event_about(pod, "FailedScheduling", message, now, source=self.name, warning=True)


def _unsettled(pod: Object) -> bool:
    """It has no node, or is not told yet that it has one."""
    spec = spec_of(pod)
    if is_pod_finished(pod) or spec.get("schedulerName") not in (None, "", Scheduler.name):
        return False
    return not spec.get("nodeName") or (condition(pod, "PodScheduled") or {}).get("status") != "True"


def _told(pod: Object, new: Object, now: datetime) -> UpdateObject:
    conditions = with_condition(status_of(pod).get("conditions") or [], new, now)
    phase = status_of(pod).get("phase") or "Pending"
    return UpdateObject("Pod", with_status(pod, phase=phase, conditions=conditions), "status")


def _offer(node: Object | None) -> object:
    """What of a node decides which pods it takes."""
    if node is None:
        return None
    spec = spec_of(node)
    return labels_of(node), spec.get("unschedulable"), spec.get("taints"), fitness.pod_capacity(node)


class _Room:
    """What the nodes have and have had promised during one look."""

    def __init__(self, present: ClusterState) -> None:
        self._nodes = sorted(
            (node for node in present.all("Node").values() if not is_terminating(node)),
            key=lambda node: _natural(node["metadata"]["name"]),
        )
        self._pods: Counter[str] = Counter()
        self._ports: dict[str, list[fitness.HostPort]] = {}
        self._siblings: Counter[tuple[str, str]] = Counter()
        self._zones = {node["metadata"]["name"]: labels_of(node).get(ZONE) or "" for node in self._nodes}
        for name in self._zones:
            for pod in present.pods_on(name):
                if not is_pod_finished(pod):
                    self._take(pod, name)

    def _take(self, pod: Object, node: str) -> None:
        self._pods[node] += 1
        self._ports.setdefault(node, []).extend(fitness.host_ports(pod))
        family = _family(pod)
        if family and not is_terminating(pod):
            self._siblings[family, "node/" + node] += 1
            self._siblings[family, "zone/" + self._zones[node]] += 1

    def choose(self, pod: Object) -> tuple[str, str]:
        """The node for a pod, which it then has; else an empty name and why no node takes it."""
        reasons: Counter[str] = Counter()
        best: tuple[tuple[int, ...], str] | None = None
        family = _family(pod)
        for index, node in enumerate(self._nodes):
            name = node["metadata"]["name"]
            reason = fitness.rejection_reason(pod, node, self._pods[name], self._ports.get(name, ()))
            if reason:
                reasons[reason] += 1
                continue
            siblings, zone = self._siblings[family, "node/" + name], self._siblings[family, "zone/" + self._zones[name]]
            rank = (fitness.untolerated_preferences(pod, node), siblings, zone, self._pods[name], index)
            if best is None or rank < best[0]:
                best = rank, name
        if best is not None:
            self._take(pod, best[1])
            return best[1], ""
        if not self._nodes:
            return "", "no nodes available to schedule pods"
        said = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        return "", f"0/{len(self._nodes)} nodes are available: {said}."


def _family(pod: Object) -> str:
    """Whose pod it is: what its siblings have in common."""
    owner = controller_of(pod)
    return str(owner.get("uid") or "") if owner is not None else ""


def _natural(name: str) -> tuple[object, ...]:
    """Sorts node-2 before node-10."""
    return tuple((part.zfill(20) if part.isdigit() else part) for part in _DIGITS.split(name))
