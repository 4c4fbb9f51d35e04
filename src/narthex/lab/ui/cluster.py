"""The page of any cluster: objects from an API server or manifests, paths by the rules that they would result in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from narthex.kube.manifests import ManifestSource
from narthex.lab.ui.board import Board
from narthex.lab.ui.path import Tracer, planned
from narthex.trace.model import PacketPath

if TYPE_CHECKING:
    from narthex.kube.access import Access
    from narthex.kube.source import KubeSource


def board_of_manifests(path: Path, mode: str) -> tuple[Board, Tracer]:
    """Return the board and the tracer of a directory of manifests."""
    board = Board(str(path), ManifestSource(path))
    return board, _tracer(board, mode)


def board_of_server(kubeconfig: str, master: str, mode: str) -> tuple[Board, Tracer]:
    """Return the board and the tracer of a cluster. It follows the API server and does not ask the nodes."""
    # These imports take a third of a second.
    from narthex.kube.access import Access
    from narthex.runtime.configuration.values import ClientConnection

    access = Access(connection=ClientConnection(kubeconfig=kubeconfig), master=master)
    board = Board(access.origin, source_of(access))
    return board, _tracer(board, mode)


def source_of(access: Access) -> KubeSource:
    """Return the objects that the page needs, from an API server."""
    from narthex.kube.resources import ALL_SERVICES, ENDPOINT_SLICES, NODES, PODS
    from narthex.kube.source import KubeSource

    slices = msgspec.structs.replace(ENDPOINT_SLICES, labels="")
    return KubeSource(access, (ALL_SERVICES, slices, NODES, PODS))


def _tracer(board: Board, mode: str) -> Tracer:
    def trace(source: str, destination: str) -> PacketPath:
        return planned(board.snapshot, source, destination, mode)

    return trace
