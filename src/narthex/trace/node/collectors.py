"""How `kubectl narthex` gets the state of nodes: through pods that are there, or through a pod for a moment.

It only says what will run. `program/kubectl.py` runs it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

OWNER_LABEL, OWNER = "app.kubernetes.io/managed-by", "kubectl-narthex"
RUN_LABEL = "narthex.dev/run"
"""Has the same value on all pods of one command."""
_OWN_IMAGE = "narthex"
_SECONDS = 180
"""After this time, the cluster ends a collector's pod that was not deleted."""


class NodeCollector(msgspec.Struct, frozen=True, kw_only=True):
    """What runs for one node."""

    node: str
    namespace: str
    pod: str
    container: str
    kind: Literal["narthex", "script", "new"]
    """`narthex`: the command in Narthex's pod; `script`: a shell in such a pod; `new`: a shell of the node, in a pod for the moment."""

    @property
    def exec_words(self) -> tuple[str, ...]:
        """Return what `kubectl` is given to collect the node's state."""
        command = {
            "narthex": ("narthex", "bundle", "--node", self.node),
            "script": ("sh",),
            "new": ("chroot", "/host", "/bin/sh"),
        }[self.kind]
        stdin = () if self.kind == "narthex" else ("-i",)
        return ("exec", *stdin, "-n", self.namespace, self.pod, "-c", self.container, "--", *command)


def collectors(
    nodes: Iterable[str], pods: Sequence[Mapping[str, Any]], run: str, namespace: str, *, new: bool = False
) -> tuple[NodeCollector, ...]:
    """Return how to get the state of each node.

    Args:
        nodes: Names of nodes.
        pods: All pods of the cluster.
        run: A name for this run, for new pods.
        namespace: The namespace of new pods.
        new: Whether to use new pods on all nodes.
    """
    return tuple(
        (not new and _in_pod(node, pods))
        or NodeCollector(
            node=node, namespace=namespace, pod=f"narthex-collector-{run}-{number}", container="collector", kind="new"
        )
        for number, node in enumerate(nodes)
    )


def _in_pod(node: str, pods: Sequence[Mapping[str, Any]]) -> NodeCollector | None:
    """Return the collector in a running pod of Narthex on the node."""
    for pod in pods:
        spec, status = pod.get("spec") or {}, pod.get("status") or {}
        if spec.get("nodeName") != node or not spec.get("hostNetwork") or status.get("phase") != "Running":
            continue
        for container in spec.get("containers") or ():
            kind = _kind_of(str(container.get("image", "")), str(container.get("name", "")))
            if kind is not None:
                meta = pod["metadata"]
                return NodeCollector(
                    node=node, namespace=meta["namespace"], pod=meta["name"], container=container["name"], kind=kind
                )
    return None


def _kind_of(image: str, container: str) -> Literal["narthex", "script"] | None:
    """Return how a container with Narthex's rules is asked; a lab shows its node's program as the image narthex/kube-proxy."""
    if image == f"{_OWN_IMAGE}/kube-proxy":
        return "script"
    name = image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    return "narthex" if name == _OWN_IMAGE and container == _OWN_IMAGE else None


def collector_pod(collector: NodeCollector, run: str, image: str) -> dict[str, Any]:
    """Return the pod that is a shell of a node.

    It sees the node's files read-only, and has a directory of its own, in memory, in place of /tmp. It is not privileged: it has the
    capabilities to read rules and connections.
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": collector.pod,
            "namespace": collector.namespace,
            "labels": {OWNER_LABEL: OWNER, RUN_LABEL: run},
        },
        "spec": {
            "nodeName": collector.node,
            "hostNetwork": True,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": collector.container,
                    "image": image,
                    "command": ["chroot", "/host", "/bin/sh", "-c", f"sleep {_SECONDS}"],
                    "securityContext": {
                        "runAsUser": 0,
                        "allowPrivilegeEscalation": False,
                        "capabilities": {
                            "drop": ["ALL"],
                            "add": ["NET_ADMIN", "NET_RAW", "SYS_CHROOT", "DAC_READ_SEARCH"],
                        },
                    },
                    "volumeMounts": [
                        {"name": "node", "mountPath": "/host", "readOnly": True},
                        {"name": "scratch", "mountPath": "/host/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "node", "hostPath": {"path": "/"}},
                {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
            ],
        },
    }


def intention(kubectl: Sequence[str], listed: Sequence[str], chosen: Sequence[NodeCollector], image: str) -> str:
    """Return what will run, and which permissions that needs."""
    prefix = shlex.join(kubectl)
    lines = ["This only reads. It runs:"]
    permissions = {f"list {kind}" for kind in listed}
    for each in chosen:
        lines.append(f"  on node {each.node}:")
        if each.kind == "new":
            lines.append(
                f"    {prefix} create -f -   (pod {each.namespace}/{each.pod}, image {image}, which sees the node's network,"
            )
            lines.append(
                "      its files read-only, with the capabilities NET_ADMIN, NET_RAW, SYS_CHROOT, and DAC_READ_SEARCH)"
            )
            permissions |= {f"create, get, watch, and delete pods in namespace {each.namespace}"}
        script = "" if each.kind == "narthex" else "   < the script that `narthex bundle --script` prints"
        lines.append(f"    {prefix} {shlex.join(each.exec_words)}{script}")
        if each.kind == "new":
            lines.append(f"    {prefix} delete pod -n {each.namespace} {each.pod}")
        permissions |= {f"create pods/exec in namespace {each.namespace}"}
    lines.append("Permissions: " + "; ".join(sorted(permissions)))
    return "".join(f"{line}\n" for line in lines)
