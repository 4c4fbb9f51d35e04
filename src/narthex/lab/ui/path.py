"""What the page shows of a cluster: its objects, from an API server or manifests, and the paths of packets.

Paths follow the rules that the objects result in.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.kube.manifests import ManifestSource
from narthex.lab.ui.board import Board
from narthex.model import InputError, Snapshot
from narthex.trace.causes.catalogue import finding_records
from narthex.trace.model import PacketPath, PathLeaf
from narthex.trace.program.inputs import ClusterObjects, NodeOptions, node_inputs
from narthex.trace.program.places import OwnerIndex
from narthex.trace.program.rules_trace import TracedPath, trace_by_objects
from narthex.trace.render.outline import Items, Row, Split, endpoint_of, heading, outline
from narthex.trace.render.verdict import GOOD, SIGNS, fate_text, judge, leaf_style, lost_replies, place_text, share_text

if TYPE_CHECKING:
    from narthex.kube.access import Access
    from narthex.kube.source import KubeSource


Tracer = Callable[[str, str], TracedPath]
"""Called with source and destination, as `narthex trace` takes them. Raises InputError."""


def planned(snapshot: Snapshot, source: str, destination: str, mode: str = "") -> TracedPath:
    """Trace a packet by the rules that the objects result in. Raises InputError.

    The nodes are not asked.
    """
    first = min((key.name for key in snapshot.nodes), default="")
    cluster = ClusterObjects(snapshot=snapshot)
    return trace_by_objects(
        snapshot, source, destination, lambda node: node_inputs(cluster, NodeOptions(node=node or first, mode=mode))
    )


def path(trace: Tracer, snapshot: Snapshot, source: str, destination: str) -> dict[str, Any]:
    """Return a path as JSON values, with `error` alone if it cannot be traced."""
    try:
        traced = trace(source, destination)
    except InputError as error:
        return {"error": str(error)}
    found, findings = traced.path, traced.findings
    places = OwnerIndex(snapshot)

    def key_of(address: str) -> str:
        """Return the pod or node that has an address."""
        place = places.at(address)
        return place.name if place else ""

    service = found.service
    title, rules = heading(found)
    verdict = judge(found, findings)
    return {
        "packet": str(found.packet),
        "service": service.rpartition(":")[0] if ":" in service else service,
        "verdict": {
            "word": verdict.word,
            "style": verdict.style.value,
            "reasons": [
                {**_share(each.share), "text": each.text, "style": each.style.value} for each in verdict.reasons
            ],
            "doubts": [*verdict.possible, *(f"assumed: {each}" for each in verdict.assumed)],
            "next": found.next_command,
        },
        "agree": found.plan is None or found.plan.agree,
        "findings": msgspec.to_builtins(finding_records(findings)),
        "heading": [title, rules],
        "differences": found.plan.differences if found.plan is not None else (),
        "outline": _items(outline(found)),
        "ends": [_end(found, leaf, key_of) for leaf in found.leaves()],
    }


def _end(path: PacketPath, leaf: PathLeaf, key_of: Callable[[str], str]) -> dict[str, Any]:
    """Return one end for the list and for the lines over the picture.

    `key` is the pod or node that receives the packet, or would have received it.
    """
    end = leaf.end
    address, port = endpoint_of(leaf.steps, [end], (path.packet.destination, path.packet.port))
    return {
        **_share(leaf.probability),
        "style": leaf_style(leaf).value,
        "endpoint": place_text(address, port),
        "address": address,
        "key": key_of(address) if address else "",
        "node": end.node,
        "arrives": end.fate in GOOD,
        "text": _end_text(leaf),
        "masquerade": end.masqueraded,
    }


def _end_text(leaf: PathLeaf) -> str:
    lost = lost_replies(leaf.end)
    if not lost:
        return leaf.end.reason or fate_text(leaf.end.fate)
    return "the reply does not arrive" if lost == 1 else f"{share_text(lost)} of the replies do not arrive"


def _share(share: Fraction) -> dict[str, Any]:
    return {"probability": float(share), "share": share_text(share)}


def _items(items: Items) -> list[dict[str, Any]]:
    """Return an outline as JSON values: rows, and splits with `groups`."""
    return [_row(each) if isinstance(each, Row) else _split(each) for each in items]


def _row(row: Row) -> dict[str, Any]:
    return {
        "stage": SIGNS[row.style] if row.sign else row.stage,
        "text": row.text,
        "style": row.style.value,
        "notes": [{"text": note.text, "style": note.style.value} for note in row.notes],
        "below": _items(row.below),
    }


def _split(split: Split) -> dict[str, Any]:
    groups = []
    for group in split.groups:
        named = group.heads[: split.named]
        left = group.heads[len(named) :]
        heads = [
            {**_share(each.share), "place": each.place, "name": each.name, "style": each.style.value} for each in named
        ]
        together = share_text(sum((each.share for each in left), Fraction(0)))
        more = f"… and {len(left)} more, {together} together" if left else ""
        groups.append({"heads": heads, "more": more, "rows": _items(group.rows)})
    return {"groups": groups}


def board_of_manifests(path: Path, mode: str) -> tuple[Board, Tracer]:
    """Return the board and the tracer of a directory of manifests."""
    board = Board(str(path), ManifestSource(path))
    return board, _tracer(board, mode)


def board_of_server(kubeconfig: str, master: str, mode: str) -> tuple[Board, Tracer]:
    """Return the board and the tracer of a cluster. It follows the API server and does not ask the nodes."""
    # These imports take a third of a second.
    from narthex.kube.access import access_to

    access = access_to(kubeconfig, master)
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
        """Trace by the objects that the page shows."""
        return planned(board.snapshot, source, destination, mode)

    return trace
