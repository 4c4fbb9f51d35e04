"""What the page shows of a cluster: its objects, from an API server or manifests, and the paths of packets.

Paths follow the rules that the objects result in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from narthex.kube.manifests import ManifestSource
from narthex.lab.ui.board import Board
from narthex.model.net import join_port
from narthex.model.store import Snapshot
from narthex.trace.causes.catalogue import CauseFinding, finding_records
from narthex.trace.causes.find import find
from narthex.trace.model import Fate, PacketPath, fraction_text
from narthex.trace.names import AddressName
from narthex.trace.program.inputs import ClusterObjects, InputError, NodeOptions, node_inputs
from narthex.trace.program.places import OUTSIDE, OwnerIndex, TraceError
from narthex.trace.program.rules_trace import answer, ask, question
from narthex.trace.render.text import text

if TYPE_CHECKING:
    from narthex.kube.access import Access
    from narthex.kube.source import KubeSource

_DISPOSITIONS = {Fate.LEAVES: "not-ours", Fate.UNKNOWN: "unsupported"}
"""Names that the page uses for ends of rules."""


class TracedPath(NamedTuple):
    """A packet's path, and why it fails."""

    path: PacketPath
    findings: Sequence[CauseFinding]


Tracer = Callable[[str, str], TracedPath]
"""Called with source and destination, as `narthex trace` takes them. Raises TraceError or InputError."""


def planned(snapshot: Snapshot, source: str, destination: str, mode: str = "") -> TracedPath:
    """Trace a packet by the rules that the objects result in. Raises TraceError, InputError.

    The nodes are not asked.
    """
    places = OwnerIndex(snapshot)
    sender, target, spec = ask(places, source, destination)
    node = sender.node or target.node or next(iter(sorted(key.name for key in snapshot.nodes)), "")
    inputs = node_inputs(ClusterObjects(snapshot=snapshot), NodeOptions(node=node, mode=mode))
    asked = question(places, sender, target, spec, inputs, inputs.host, None)
    found = answer(asked, inputs, inputs.host, others={ip: AddressName("outside", "") for ip in OUTSIDE})
    return TracedPath(found, find(found, {}, snapshot))


def path(trace: Tracer, snapshot: Snapshot, source: str, destination: str) -> dict[str, Any]:
    """Return a path as JSON values, with `error` alone if it cannot be traced."""
    try:
        found, findings = trace(source, destination)
    except (TraceError, InputError) as error:
        return {"error": str(error)}
    places = OwnerIndex(snapshot)

    def key_of(address: str) -> str:
        """Return the pod or node that has an address."""
        place = places.at(address)
        return place.name if place else ""

    service = found.service
    return {
        "packet": str(found.packet),
        "node": found.plan.node if found.plan else found.start,
        "rules": found.plan.rules if found.plan else "",
        "service": service.rpartition(":")[0] if ":" in service else service,
        "agree": found.plan is None or found.plan.agree,
        "text": text(found, findings),
        "findings": msgspec.to_builtins(finding_records(findings)),
        "ends": [
            {
                "probability": float(end.probability),
                "fraction": fraction_text(end.probability),
                "disposition": _DISPOSITIONS.get(end.fate, end.fate.value),
                "endpoint": join_port(end.address, end.port) if end.fate is Fate.DELIVERED else "",
                "key": key_of(end.address) if end.fate is Fate.DELIVERED else "",
                "masquerade": end.masqueraded,
                "note": end.reason if end.fate is Fate.UNKNOWN else "",
            }
            for end in found.weighted_ends()
        ],
    }


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
    def trace(source: str, destination: str) -> TracedPath:
        return planned(board.snapshot, source, destination, mode)

    return trace
