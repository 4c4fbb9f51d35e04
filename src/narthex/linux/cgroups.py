"""Cgroups of version 2: where the hierarchy is, which one a process is in, and moving processes."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


def cgroup_mount() -> Path | None:
    """Return where the version 2 hierarchy is mounted; None if it is not."""
    for line in _MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    return None


def cgroup_of(process: int | None = None) -> str | None:
    """Return the path of a process in the version 2 hierarchy, such as `/system.slice`; None: this process.

    None if the kernel has no such hierarchy.
    """
    text = Path(f"/proc/{process or 'self'}/cgroup").read_text()
    return next((line[3:] for line in text.splitlines() if line.startswith("0::")), None)


def create_cgroup(path: Path) -> None:
    """Create a cgroup and those above it. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True)


def move_process(path: Path, process: int | None = None) -> None:
    """Move a process with all of its threads into a cgroup; None: this process. Raises OSError."""
    (path / "cgroup.procs").write_text(str(process or os.getpid()))


def processes_in(path: Path) -> list[int]:
    """Return the processes of a cgroup, without those of cgroups below it; none if it does not exist."""
    try:
        return [int(line) for line in (path / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []


def remove_cgroup(path: Path) -> None:
    """Remove a cgroup and those below it. Raises OSError if a process is left in one."""
    for directory, _, _ in os.walk(path, topdown=False):
        Path(directory).rmdir()
