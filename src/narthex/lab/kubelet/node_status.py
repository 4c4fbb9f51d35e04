"""A node's API objects: Node, its status, and its Lease.

Follows Kubernetes 1.34: nodestatus/setters.go, lease/controller.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.topology import MAX_PODS_PER_NODE, LabNode

Object = dict[str, Any]

LEASES = "kube-node-lease"
CONDITIONS = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
)


def node(lab_node: LabNode, machine: Mapping[str, str]) -> Object:
    """Return the Node that a kubelet registers; `machine` as in `status`."""
    labels = {
        "kubernetes.io/hostname": lab_node.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": machine["architecture"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": lab_node.name, "labels": labels},
        "spec": {"podCIDR": lab_node.pod_cidrs[0], "podCIDRs": list(lab_node.pod_cidrs)},
    }


def status(lab_node: LabNode, machine: Mapping[str, str], before: Mapping[str, Any], now: str) -> Object:
    """Return a Node's status.

    `machine` holds architecture, kernelVersion, osImage, bootID, machineID, systemUUID, version, cpu, and memory.
    """
    room = {
        "cpu": machine["cpu"],
        "ephemeral-storage": "0",
        "memory": machine["memory"],
        "pods": str(MAX_PODS_PER_NODE),
    }
    held = {each["type"]: each for each in before.get("conditions") or ()}
    made = {name: value for name, value in before.items() if name not in ("addresses",)}
    return {
        **made,
        "addresses": [
            *({"type": "InternalIP", "address": address} for address in lab_node.addresses),
            {"type": "Hostname", "address": lab_node.name},
        ],
        "allocatable": room,
        "capacity": room,
        "conditions": [
            *(each for kind, each in held.items() if kind not in {name for name, *_ in CONDITIONS}),
            *(_condition(held.get(kind), kind, state, reason, words, now) for kind, state, reason, words in CONDITIONS),
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
        "nodeInfo": {
            **{
                name: machine[name]
                for name in ("architecture", "bootID", "kernelVersion", "machineID", "osImage", "systemUUID")
            },
            "containerRuntimeVersion": f"narthex://{machine['version']}",
            "kubeProxyVersion": f"narthex-{machine['version']}",
            "kubeletVersion": f"v1.34.0-narthex-{machine['version']}",
            "operatingSystem": "linux",
        },
    }


def _condition(before: Any, kind: str, state: str, reason: str, words: str, now: str) -> Object:
    same = before is not None and before.get("status") == state
    return {
        "type": kind,
        "status": state,
        "lastHeartbeatTime": now,
        "lastTransitionTime": before["lastTransitionTime"] if same else now,
        "reason": reason,
        "message": words,
    }


def lease(name: str, duration: int, now: str) -> Object:
    """Return a node's Lease; `now` as `metav1.MicroTime`."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": LEASES},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": duration, "renewTime": now},
    }
