"""Where in a lab a command runs: in the network of a node, of a pod, or of the client outside."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from narthex.apps.lab.state import LabError, LabState, StateDirectory
from narthex.host import mounts
from narthex.lab import topology


class Inside(NamedTuple):
    """What a command sees that runs somewhere in a lab."""

    network_namespace: str
    resolv_conf: Path | None = None
    """Its /etc/resolv.conf; None: the machine's own, as for nodes and what shares their network."""


def where(state: LabState, target: str) -> Inside:
    """Inside of a node, of `outside`, or of a pod (`name` or `namespace/name`). Raises LabError."""
    if target == topology.OUTSIDE:
        return Inside(state.outside)
    for node in state.nodes:
        if node.name == target:
            return Inside(node.namespace)
    pods = [pod for pod in state.pods if target in (pod.name, f"{pod.namespace}/{pod.name}") and pod.network_namespace]
    if len(pods) > 1:
        choices = ", ".join(f"{pod.namespace}/{pod.name}" for pod in pods)
        raise LabError(f"there are several pods {target!r}: {choices}")
    if not pods:
        known = [topology.OUTSIDE, *(node.name for node in state.nodes), *(pod.name for pod in state.pods)]
        raise LabError(f"lab {state.name!r} has no {target!r}; there are: {', '.join(known)}")
    (pod,) = pods
    if pod.network_namespace in (node.namespace for node in state.nodes):
        return Inside(pod.network_namespace)
    resolv_conf = StateDirectory(state.name).resolv_conf(pod.namespace)
    return Inside(pod.network_namespace, resolv_conf if resolv_conf.exists() else None)


def show(source: Path, at: Path) -> None:
    """Let this process, and what it starts, see another file at a path. Raises LabError."""
    try:
        mounts.show(source, at)
    except OSError as error:
        raise LabError(f"{at} cannot be the pod's: {error}") from error
