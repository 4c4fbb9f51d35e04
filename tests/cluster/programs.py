"""The programs that a cluster needs, and which of them are missing."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from narthex.lab.program.control_plane import PROGRAMS

PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "runc": "runc",
    "podman": "podman",
    "debootstrap": "debootstrap",
    "busybox": "busybox-static",
    "kubectl": "kubernetes-client",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "ip": "iproute2",
}
"""Debian's package of each program of the machine."""
_RUNTIME = ("containerd", "ctr", "containerd-shim-runc-v2")


class ClusterPrograms(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the programs that are not Debian's."""

    control_plane: Path
    """The directory with etcd, kube-apiserver, kube-controller-manager, and kube-scheduler."""
    kubelet: Path
    containerd: Path | None = None
    """The directory with containerd, ctr, and containerd-shim-runc-v2; None: Debian's."""
    kube_proxy: Path | None = None
    e2e: Path | None = None
    agnhost: Path | None = None

    def program(self, name: str) -> str:
        """Return the path of a program of the container runtime."""
        return str(self.containerd / name) if self.containerd else str(shutil.which(name))


def missing(programs: ClusterPrograms, path: str | None = None) -> Mapping[str, str]:
    """Return the programs that a cluster lacks, with what to do. `path` replaces PATH."""
    lacks = {}
    for name in PROGRAMS:
        if not _is_program(programs.control_plane / name):
            lacks[name] = f"put it into CONTROL_PLANE={programs.control_plane}"
    given = {"KUBELET": programs.kubelet, "KUBE_PROXY": programs.kube_proxy, "E2E": programs.e2e}
    for option, file in {**given, "AGNHOST": programs.agnhost}.items():
        if file is not None and not _is_program(file):
            lacks[option.lower().replace("_", "-")] = f"{option}={file} is not a program"
    for name, package in PACKAGES.items():
        if programs.containerd is not None and name in _RUNTIME:
            if not _is_program(programs.containerd / name):
                lacks[name] = f"put it into CONTAINERD={programs.containerd}"
        elif shutil.which(name, path=path) is None:
            lacks[name] = f"apt-get install {package}"
    return lacks


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
