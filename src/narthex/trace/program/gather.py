"""Taking a bundle: the output of the tools of this node, or of one network namespace, and the cluster's objects."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import msgspec

import narthex
from narthex.linux import namespaces as netns
from narthex.linux.run import CommandError, TimeoutExpired, run
from narthex.trace.node.layout import (
    ABSENT,
    CNI_DIRECTORY,
    CNI_FILE,
    FAILED,
    OBJECTS,
    PARTS,
    SETTINGS,
    TAKEN,
    BundleManifest,
    BundlePart,
    PartStatus,
)

_SECONDS = 120
_SYSCTLS = "net/sysctls.txt"
_REMARK = 300


class GatheredParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that were taken, and how taking each part went."""

    table: BundleManifest
    parts: dict[str, str]


def gather(node: str = "", namespace: str | None = None, *, without: frozenset[str] = frozenset()) -> GatheredParts:
    """Run all tools. `node` is the node's name (default: the machine's); `without` names parts to leave out."""
    parts: dict[str, str] = {}
    taken: list[PartStatus] = []
    for part in PARTS:
        if part.path in without or any(other in parts for other in part.unless):
            continue
        text, what = _settings(part, namespace) if part.path == _SYSCTLS else _asked(part, namespace)
        taken.append(what)
        if text is not None:
            parts[part.path] = text
    if CNI_FILE not in without:
        text, what = _cni(Path(CNI_DIRECTORY))
        taken.append(what)
        if text is not None:
            parts[CNI_FILE] = text
    name = node or namespace or socket.gethostname()
    return GatheredParts(
        table=BundleManifest(node=name, writer=f"narthex {narthex.__version__}", parts=tuple(taken)), parts=parts
    )


def _asked(part: BundlePart, namespace: str | None) -> tuple[str | None, PartStatus]:
    command = " ".join(part.command)
    if part.needs and not _there(part.needs, namespace):
        remark = f"this kernel has none of it: there is no {part.needs}"
        return None, PartStatus(path=part.path, status=ABSENT, command=command, remark=remark)
    try:
        text = run(part.command, namespace=namespace, timeout=_SECONDS)
    except FileNotFoundError:
        remark = f"{part.command[0]} is not installed"
        return None, PartStatus(path=part.path, status=ABSENT, command=command, remark=remark)
    except CommandError as error:
        said = " ".join(error.said.split())[:_REMARK] or f"exit status {error.status}"
        return None, PartStatus(path=part.path, status=FAILED, command=command, remark=said)
    except (TimeoutExpired, OSError, UnicodeDecodeError) as error:
        return None, PartStatus(path=part.path, status=FAILED, command=command, remark=str(error)[:_REMARK])
    return text, PartStatus(path=part.path, status=TAKEN, command=command, bytes=len(text.encode()))


def _there(path: str, namespace: str | None) -> bool:
    with netns.entered(namespace):
        return Path(path).exists()


def _settings(part: BundlePart, namespace: str | None) -> tuple[str | None, PartStatus]:
    """Read the settings from /proc/sys; `sysctl` would print the same, but isn't installed everywhere."""
    relevant = re.compile(SETTINGS)
    lines: list[str] = []
    with netns.entered(namespace):
        root = Path("/proc/sys")
        for folder, _, names in os.walk(root / "net"):
            for name in names:
                path = Path(folder) / name
                # A dot in an interface's name is written as a slash, as sysctl does.
                key = ".".join(piece.replace(".", "/") for piece in path.relative_to(root).parts)
                if relevant.match(key):
                    try:
                        lines.append(f"{key} = {' '.join(path.read_text().split())}")
                    except OSError:
                        continue
    text = "".join(line + "\n" for line in sorted(lines))
    return text, PartStatus(path=part.path, status=TAKEN, command="/proc/sys/net", bytes=len(text))


def _cni(directory: Path) -> tuple[str | None, PartStatus]:
    """Return the names of the CNI configurations and the types of their plugins."""
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as error:
        return None, PartStatus(path=CNI_FILE, status=ABSENT, command=f"ls {directory}", remark=error.strerror or "")
    text = "".join(f"{path.name}\t{' '.join(_types(path))}\n" for path in files)
    return text, PartStatus(path=CNI_FILE, status=TAKEN, command=f"ls {directory}", bytes=len(text))


def _types(path: Path) -> list[str]:
    try:
        data = json.loads(path.read_text())
        return [str(plugin.get("type", "")) for plugin in data.get("plugins", [data])]
    except (OSError, ValueError, AttributeError, TypeError):
        return ["(not readable)"]


def take(node: str = "", namespace: str | None = None, kubeconfig: str = "", master: str = "") -> GatheredParts:
    """Take a bundle; its manifest says what could not be taken, and why."""
    gathered = gather(node, namespace)
    if not (kubeconfig or master):
        return gathered
    from narthex.kube.access import Access
    from narthex.kube.snapshot import read_lists
    from narthex.runtime.configuration.values import ClientConnection

    lists = read_lists(Access(connection=ClientConnection(kubeconfig=kubeconfig), master=master))
    parts = dict(gathered.parts)
    taken = list(gathered.table.parts)
    for path, plural in OBJECTS.items():
        found = lists[plural]
        if isinstance(found, str):
            taken.append(PartStatus(path=path, status=FAILED, command=f"list {plural}", remark=found))
            continue
        parts[path] = json.dumps(scrubbed(plural, found))
        taken.append(PartStatus(path=path, status=TAKEN, command=f"list {plural}", bytes=len(parts[path])))
    table = msgspec.structs.replace(gathered.table, parts=tuple(taken))
    return GatheredParts(table=table, parts=parts)


def intended(kubeconfig: bool) -> BundleManifest:
    """Return what would be taken."""
    parts = [
        PartStatus(path=part.path, status="root" if part.root else "anyone", command=" ".join(part.command))
        for part in PARTS
    ]
    parts.append(PartStatus(path=CNI_FILE, status="anyone", command=f"ls {CNI_DIRECTORY}"))
    if kubeconfig:
        parts += [
            PartStatus(path=path, status="kubeconfig", command=f"list {plural}") for path, plural in OBJECTS.items()
        ]
    return BundleManifest(node="", writer="", parts=tuple(parts))


Kept = bool | dict[str, Any]
"""True: the whole value; otherwise the fields to keep, of a mapping or of each entry of a list."""

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
    """Return an API list reduced to the fields that bundles keep. Raises KeyError for a kind that no bundle holds.

    Only listed fields are kept: no environment, volumes, commands, images, or annotations of other programs.
    """
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
