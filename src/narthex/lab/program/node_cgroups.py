"""Control groups of a lab's nodes: the programs of socket load balancing concern the sockets that are made in one.

Each node has one, `narthex-lab/LAB/NODE` in the hierarchy of version 2, with its processes and those of its pods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from narthex.lab.containers.cgroups import LAB_CGROUPS
from narthex.lab.program.state import LabError
from narthex.linux.cgroups import cgroup_mount, create_cgroup, remove_cgroup
from narthex.linux.namespaces import in_namespace
from narthex.model import IPFamily
from narthex.runtime.configuration.values import DEFAULT_MODE


def check(mode: str, *, kube_proxy: bool) -> None:
    """Raise LabError if the nodes of a lab cannot balance sockets."""
    if kube_proxy:
        raise LabError("--socket-load-balancing is for the nodes' own proxy: omit --kube-proxy")
    if mode != DEFAULT_MODE:
        raise LabError(f"--socket-load-balancing works in mode {DEFAULT_MODE} only, not in mode {mode}")
    if cgroup_mount() is None:
        raise LabError("no cgroup v2 hierarchy is mounted: mount one (mount -t cgroup2 none /sys/fs/cgroup)")


def node_cgroup(lab: str, node: str) -> Path:
    """Return the control group of a node. Raises LabError if no hierarchy of version 2 is mounted."""
    mount = cgroup_mount()
    if mount is None:
        raise LabError("no cgroup v2 hierarchy is mounted any more")
    return mount / LAB_CGROUPS / lab / node


def create(lab: str, node: str) -> Path:
    """Create the control group of a node, and return it. Raises OSError, LabError."""
    path = node_cgroup(lab, node)
    create_cgroup(path)
    return path


def remove(lab: str, namespaces: Iterable[str]) -> None:
    """Remove the control groups of a lab, and what its nodes have pinned for their network namespaces."""
    mount = cgroup_mount()
    path = mount / LAB_CGROUPS / lab if mount is not None else None
    if path is None or not path.is_dir():
        return
    # Imported late, since few labs need it.
    from narthex.proxy.kernel.sockets import remove_pins

    for namespace in namespaces:
        with contextlib.suppress(OSError), in_namespace(namespace):
            for family in IPFamily:
                remove_pins(family)
    # A process that a user has moved there stays, and so does its group.
    with contextlib.suppress(OSError):
        remove_cgroup(path)
        path.parent.rmdir()
