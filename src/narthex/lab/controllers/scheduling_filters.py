"""Scheduling filters: whether a node fits a pod, with kube-scheduler's reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from narthex.lab.controllers.interfaces import Object
from narthex.lab.controllers.objects import labels_of, spec_of, status_of
from narthex.lab.topology import MAX_PODS_PER_NODE
from narthex.model.selector import NODE_OPERATORS, expression_matches

UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_ANY_ADDRESS = ("", "0.0.0.0", "::")

HostPort = tuple[str, str, int]
"""Host address, protocol, port."""


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
    if not _is_chosen(spec, node):
        return "node(s) didn't match Pod's node affinity/selector"
    if any(_collide(mine, other) for mine in host_ports(pod) for other in ports):
        return "node(s) didn't have free ports for the requested pod ports"
    if pods >= pod_capacity(node):
        return "Too many pods"
    return ""


def pod_capacity(node: Object) -> int:
    """Return the maximum number of pods on a node."""
    text = str((status_of(node).get("allocatable") or {}).get("pods", MAX_PODS_PER_NODE))
    return (
        min(int(text), MAX_PODS_PER_NODE) if text.isascii() and text.isdigit() and len(text) < 10 else MAX_PODS_PER_NODE
    )


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


def _is_chosen(spec: Mapping[str, Any], node: Object) -> bool:
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
