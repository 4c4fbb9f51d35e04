"""Mirror pods: what the API shows of a node's own programs, kube-proxy and CoreDNS, which `narthex node` contains.

As for the static pods of a kubelet (pkg/kubelet/pod/mirror_client.go), a deletion removes only the mirror, which returns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from narthex.lab.cluster import DNS_LABELS, SYSTEM_NAMESPACE
from narthex.lab.controllers.objects import Object, annotations_of

MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a mirror pod."""


class StaticProgram(NamedTuple):
    """A program that each node runs, as clusters show it."""

    labels: Mapping[str, str]
    command: Sequence[str]
    config_map: str
    directory: str
    """Where a cluster mounts the ConfigMap."""


PROGRAMS: Mapping[str, StaticProgram] = {
    "kube-proxy": StaticProgram(
        {"k8s-app": "kube-proxy"},
        ("kube-proxy", "--config=/var/lib/kube-proxy-config/config"),
        "kube-proxy-config",
        "/var/lib/kube-proxy-config",
    ),
    "coredns": StaticProgram(DNS_LABELS, ("coredns", "-conf", "/etc/coredns/Corefile"), "coredns", "/etc/coredns"),
}
"""By name."""


def is_mirror(pod: Object) -> bool:
    """Return True if a pod only shows a program that its node runs anyway."""
    return "metadata" in pod and MIRROR in annotations_of(pod)


def mirror_name(program: str, node: str) -> str:
    """Return the name of a mirror pod."""
    return f"{program}-{node}"


def mirror_pods(node: Object) -> Iterator[Object]:
    """Yield the mirror pods of a node."""
    name = node["metadata"]["name"]
    for program, (labels, command, source, directory) in PROGRAMS.items():
        identity = hashlib.md5(f"{program} {name}".encode(), usedforsecurity=False).hexdigest()
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": mirror_name(program, name),
                "namespace": SYSTEM_NAMESPACE,
                "labels": dict(labels),
                "annotations": {
                    MIRROR: identity,
                    "kubernetes.io/config.hash": identity,
                    "kubernetes.io/config.source": "file",
                },
                "ownerReferences": [_controlled_by(node)],
            },
            "spec": {
                "nodeName": name,
                "hostNetwork": True,
                "priorityClassName": "system-node-critical",
                "tolerations": [{"operator": "Exists"}],
                "containers": [
                    {
                        "name": program,
                        "image": f"narthex/{program}",
                        "command": list(command),
                        "imagePullPolicy": "IfNotPresent",
                        # Commands there see and change the node's rules.
                        "securityContext": {"capabilities": {"add": ["NET_ADMIN"]}},
                        "volumeMounts": [{"name": "config", "mountPath": directory}],
                    }
                ],
                "volumes": [{"name": "config", "configMap": {"name": source}}],
            },
        }


def mirror_status(pod: Mapping[str, Any], addresses: Sequence[str], now: str) -> Object:
    """Return the status of a mirror pod whose program runs."""
    (container,) = pod["spec"]["containers"]
    conditions = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    ips = [{"ip": address} for address in addresses]
    return {
        **(pod.get("status") or {}),
        "phase": "Running",
        "conditions": [
            {"type": each, "status": "True", "lastProbeTime": None, "lastTransitionTime": now} for each in conditions
        ],
        "hostIP": addresses[0],
        "hostIPs": ips,
        "podIP": addresses[0],
        "podIPs": ips,
        "startTime": now,
        "containerStatuses": [
            {
                "name": container["name"],
                "state": {"running": {"startedAt": now}},
                "lastState": {},
                "ready": True,
                "restartCount": 0,
                "image": container["image"],
                "imageID": f"narthex://{container['image']}",
                "containerID": f"narthex://{pod['metadata']['uid']}",
                "started": True,
            }
        ],
    }


def _controlled_by(node: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "name": node["metadata"]["name"],
        "uid": node["metadata"]["uid"],
        "controller": True,
    }
