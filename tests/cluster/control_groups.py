"""Control groups of a cluster's nodes: what bounds them, and what is removed after them."""

import contextlib
import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_CLUSTER_BYTES = 12 << 30
"""Memory of all nodes together."""
_SHARES = 4096
"""Processor time of all nodes together beside one other program of the machine, which has 1024: they are several machines."""
_NEEDED = ("cpu", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids", "blkio")
"""Controllers of version 1 that a container runtime uses."""
UNIFIED = "unified"
"""Where machines with version 1 mount the hierarchy of version 2, for what only that has: programs for sockets."""
_PATIENCE_SECONDS = 20.0


def controllers() -> list[str]:
    """Return the mounted controllers of version 1; none: the machine has version 2 alone."""
    return [name for name in _NEEDED if (ROOT / name / "cgroup.procs").exists()]


def hierarchy() -> Path:
    """Return where the hierarchy of version 2 is mounted."""
    return ROOT / UNIFIED if controllers() else ROOT


def own_path(cluster: str, node: str) -> Path:
    """Return the path of a node's control group in each hierarchy."""
    return Path(f"narthex-{cluster}", node)


def create(cluster: str, node: str) -> list[Path]:
    """Create the control groups of a node, and return them."""
    made = [top / own_path(cluster, node) for top in _tops()]
    for path in made:
        for each in (path.parent, path):
            each.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                file = each / name
                if file.exists() and not file.read_text().strip() and (each.parent / name).exists():
                    file.write_text((each.parent / name).read_text())
    shares = ROOT / "cpu" / f"narthex-{cluster}" / "cpu.shares"
    if shares.exists():
        shares.write_text(str(_SHARES))
    for name in ("memory/{}/memory.limit_in_bytes", "{}/memory.max"):
        limit = ROOT / name.format(f"narthex-{cluster}")
        if limit.exists():
            limit.write_text(str(_CLUSTER_BYTES))
    return made


def remove(cluster: str) -> None:
    """Remove the control groups of a cluster, whose processes have been killed. Raises OSError if one of them stays."""
    end = time.monotonic() + _PATIENCE_SECONDS
    for top in _tops():
        path = top / f"narthex-{cluster}"
        while path.exists():
            for folder, _, _ in os.walk(path, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
            if path.exists() and time.monotonic() > end:
                raise OSError(f"{path} cannot be removed: look for its processes in cgroup.procs")
            time.sleep(0.05)


def left(cluster: str) -> list[Path]:
    """Return what is left of a cluster."""
    return [path for top in _tops() if (path := top / f"narthex-{cluster}").exists()]


def _tops() -> list[Path]:
    listed = [*controllers(), "systemd", UNIFIED]
    return [ROOT / name for name in listed if (ROOT / name).exists()] if controllers() else [ROOT]
