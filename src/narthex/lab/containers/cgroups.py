"""The control group of a process in a lab, which it joins before it makes sockets."""

from __future__ import annotations

from pathlib import Path

from narthex.linux.cgroups import cgroup_mount, cgroup_of, move_process

LAB_CGROUPS = "narthex-lab"
"""Directory of the control groups of all labs, in the hierarchy of version 2."""


def join_cgroup(path: str) -> None:
    """Move this process to a control group; empty: it stays where it is. Raises OSError."""
    if path:
        move_process(Path(path))


def join_cgroup_of(process: int) -> None:
    """Move this process to the control group of a program of a lab; others stay where they are. Raises OSError."""
    held, mount = cgroup_of(process), cgroup_mount()
    if held is not None and mount is not None and held.startswith(f"/{LAB_CGROUPS}/"):
        move_process(mount / held.lstrip("/"))
