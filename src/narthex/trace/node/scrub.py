"""Kubernetes objects for a bundle: what a path depends on, and nothing that is nobody else's business.

Fields are named that stay; whatever is not named goes: environment, volumes, commands, images, annotations of strangers.
"""

from __future__ import annotations

from typing import Any

Kept = bool | dict[str, Any]
"""True: the whole value; else the fields that stay, for a mapping and for each entry of a list."""

_META: dict[str, Any] = {
    "name": True,
    "namespace": True,
    "uid": True,
    "labels": True,
    "creationTimestamp": True,
    "deletionTimestamp": True,
    "ownerReferences": {"kind": True, "name": True, "uid": True, "controller": True},
}
_PROBE = {"httpGet": {"port": True}, "tcpSocket": {"port": True}, "grpc": {"port": True}}
_KEPT: dict[str, dict[str, Any]] = {
    "services": {"metadata": {**_META, "annotations": True}, "spec": True, "status": True},
    "endpointslices": {"metadata": _META, "addressType": True, "endpoints": True, "ports": True},
    "nodes": {
        "metadata": {**_META, "annotations": True},
        "spec": {"podCIDR": True, "podCIDRs": True, "unschedulable": True, "taints": True},
        "status": {"addresses": True, "conditions": {"type": True, "status": True, "reason": True}},
    },
    "pods": {
        "metadata": _META,
        "spec": {
            "nodeName": True,
            "hostNetwork": True,
            "hostname": True,
            "subdomain": True,
            "readinessGates": True,
            "containers": {"name": True, "ports": True, "readinessProbe": _PROBE},
        },
        "status": {
            "phase": True,
            "podIP": True,
            "podIPs": True,
            "hostIP": True,
            "conditions": {"type": True, "status": True, "reason": True},
            "containerStatuses": {"name": True, "ready": True},
        },
    },
    "networkpolicies": {"metadata": _META, "spec": True},
}
_OWNERS = ("kubernetes.io", "k8s.io", "metallb.io", "metallb.universe.tf", "narthex.io", "flannel.alpha.coreos.com")
_NEVER = "kubectl.kubernetes.io/last-applied-configuration"


def scrubbed(plural: str, found: dict[str, Any]) -> dict[str, Any]:
    """A list as the API gives it, with what stays. Raises KeyError for a kind that no bundle holds."""
    kind, version = str(found.get("kind", "List")).removesuffix("List"), str(found.get("apiVersion", "v1"))
    items = [
        {"apiVersion": version, "kind": kind, **_keep(_KEPT[plural], item)}
        for item in found.get("items") or ()
        if isinstance(item, dict)
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _keep(kept: Kept, value: Any) -> Any:
    if kept is True:
        return value
    if isinstance(value, list):
        return [_keep(kept, each) for each in value]
    if not isinstance(value, dict) or not isinstance(kept, dict):
        return {}
    made: dict[str, Any] = {}
    for key, below in kept.items():
        if key in value:
            made[key] = _annotations(value[key]) if key == "annotations" else _keep(below, value[key])
    return made


def _annotations(held: Any) -> dict[str, Any]:
    if not isinstance(held, dict):
        return {}
    return {
        key: value
        for key, value in held.items()
        if key != _NEVER and any(key.partition("/")[0].endswith(owner) for owner in _OWNERS)
    }
