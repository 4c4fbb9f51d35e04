"""What a lab is to be: the options of `narthex lab up`, as its process gets them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from narthex.lab.topology import NONE


class LabOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one lab."""

    source: Path | None = None
    """Directory of the user's manifests; None: the lab's own, `StateDirectory.input`."""
    nodes: int
    """Number of nodes."""
    mode: str
    """Proxy mode of the nodes."""
    overlay: str = NONE
    """One of OVERLAYS."""
    socket_load_balancing: bool = False
    """Nodes send sockets to endpoints when they connect. Each node has a control group of its own."""
    pools: Sequence[str] = ()
    """Address ranges for load balancers, in addition to the pools among the manifests."""
    images: Sequence[str] = ()
    """What images stand for, as PREFIX=PATH."""
    control_plane: Path | None = None
    """Directory of the programs of an external control plane; None: the lab's own."""
    kube_proxy: Path | None = None
    """A kube-proxy that the nodes run instead of their own proxy."""

    def resolved(self) -> LabOptions:
        """Return the options with absolute paths, for a process with a working directory of its own."""
        paths = {"source": self.source, "control_plane": self.control_plane, "kube_proxy": self.kube_proxy}
        return msgspec.structs.replace(
            self, **{field: path.resolve() for field, path in paths.items() if path is not None}
        )
