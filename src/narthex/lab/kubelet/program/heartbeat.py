"""Registration, status, and Lease renewals of the nodes.

Follows Kubernetes 1.34: nodestatus/setters.go, lease/controller.go.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from narthex import __version__
from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import Registry
from narthex.lab.controllers.node_lifecycle import LEASES
from narthex.lab.controllers.objects import Object
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.topology import MAX_PODS_PER_NODE, LabNode

_CONDITIONS = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
)
_NODE_INFO = ("architecture", "bootID", "kernelVersion", "machineID", "osImage", "systemUUID")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def _machine() -> dict[str, str]:
    found = platform.machine()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "architecture": _ARCHITECTURES.get(found, found),
        "kernelVersion": platform.release(),
        "osImage": _os_image(),
        "bootID": _read("/proc/sys/kernel/random/boot_id"),
        "machineID": _read("/etc/machine-id"),
        "systemUUID": _read("/etc/machine-id"),
        "version": __version__,
        "cpu": str(os.cpu_count() or 1),
        "memory": f"{pages // 1024}Ki",
    }


def _os_image() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    return "Linux"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


class NodeHeartbeats:
    """Renews the Leases of all nodes. `run` belongs to one thread."""

    def __init__(
        self,
        nodes: Iterable[LabNode],
        registry: SharedRegistry,
        *,
        interval: float,
        lease_seconds: int,
        kubelet_port: int = 0,
        returned: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Prepare the heartbeats.

        Args:
            nodes: The nodes.
            registry: Where they are registered.
            interval: Seconds between two renewals.
            lease_seconds: The duration in the Leases.
            kubelet_port: Port of the kubelets' API; 0: they have none.
            returned: Called with a node that was taken for dead by mistake.
        """
        self._nodes = {node.name: node for node in nodes}
        self._registry = registry
        self._interval = interval
        self._lease_seconds = lease_seconds
        self._machine = _machine()
        self._kubelet_port = kubelet_port
        self._returned = returned
        self._stopped: set[str] = set()
        self._cut_off: frozenset[str] = frozenset()

    def register(self) -> None:
        """Create missing Nodes and Leases, and post the nodes' status."""
        with self._registry.held() as registry:
            for node in self._nodes.values():
                if registry.get("Node", "", node.name) is None:
                    status = self._status(node, {}, registry.stamp())
                    registry.create("Node", {**_node(node, self._machine), "status": status})
                else:
                    self._post_status(registry, node)
        self._renew()

    def _post_status(self, registry: Registry, node: LabNode) -> None:
        held = registry.get("Node", "", node.name) or {}
        status = self._status(node, held.get("status") or {}, registry.stamp())
        registry.update("Node", {**held, "status": status}, subresource="status")

    def _status(self, node: LabNode, before: Mapping[str, Any], now: str) -> Object:
        endpoints = {"kubeletEndpoint": {"Port": self._kubelet_port}}
        return {**_status(node, self._machine, before, now), "daemonEndpoints": endpoints}

    def stop(self, node: str) -> None:
        """End the heartbeats of a dead node."""
        self._stopped.add(node)

    def cut_off(self, names: frozenset[str]) -> None:
        """Suspend the heartbeats of these nodes only. Nodes that are reconnected post their status at once."""
        reconnected, self._cut_off = self._cut_off - names - self._stopped, names
        with contextlib.suppress(StatusError), self._registry.held() as registry:
            for name in sorted(reconnected):
                self._post_status(registry, self._nodes[name])
        self._renew()

    def run(self) -> None:
        """Renew Leases until the process ends."""
        while True:
            time.sleep(self._interval)
            self._renew()

    def _renew(self) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        for name in self._nodes.keys() - self._stopped - self._cut_off:
            with contextlib.suppress(StatusError), self._registry.held() as registry:
                node = registry.get("Node", "", name)
                if node is not None and _is_unknown(node):
                    self._post_status(registry, self._nodes[name])
                    self._returned(name)
                lease = _lease(name, self._lease_seconds, now)
                held = registry.get("Lease", LEASES, name)
                if held is None:
                    registry.create("Lease", lease)
                else:
                    registry.update("Lease", {**held, "spec": {**held.get("spec", {}), **lease["spec"]}})


def _is_unknown(node: Object) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each.get("status") == "Unknown" for each in conditions)


def _node(lab_node: LabNode, machine: Mapping[str, str]) -> Object:
    labels = {
        "kubernetes.io/hostname": lab_node.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": machine["architecture"],
    }
    return {
        "metadata": {"name": lab_node.name, "labels": labels},
        "spec": {"podCIDR": lab_node.pod_cidrs[0], "podCIDRs": list(lab_node.pod_cidrs)},
    }


def _status(lab_node: LabNode, machine: Mapping[str, str], before: Mapping[str, Any], now: str) -> Object:
    pods = str(MAX_PODS_PER_NODE)
    room = {"cpu": machine["cpu"], "ephemeral-storage": "0", "memory": machine["memory"], "pods": pods}
    held = {each["type"]: each for each in before.get("conditions") or ()}
    return {
        **before,
        "addresses": [
            *({"type": "InternalIP", "address": address} for address in lab_node.addresses),
            {"type": "Hostname", "address": lab_node.name},
        ],
        "allocatable": room,
        "capacity": room,
        "conditions": [
            *(each for kind, each in held.items() if kind not in {name for name, *_ in _CONDITIONS}),
            *(
                _condition(held.get(kind), kind, state, reason, words, now)
                for kind, state, reason, words in _CONDITIONS
            ),
        ],
        "nodeInfo": {
            **{name: machine[name] for name in _NODE_INFO},
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


def _lease(name: str, duration: int, now: str) -> Object:
    return {
        "metadata": {"name": name, "namespace": LEASES},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": duration, "renewTime": now},
    }
