"""A running lab for the page: its objects, its nodes' counts, its live rules."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from narthex.lab.program import node_client as ask
from narthex.lab.program.labs import Lab, access_of, open_lab
from narthex.lab.program.trace import trace_lab
from narthex.lab.ui.board import Board, ConnectionCounts
from narthex.lab.ui.cluster import source_of
from narthex.lab.ui.counts import count
from narthex.lab.ui.path import Tracer

_AT_ONCE = 16


def board_of(name: str) -> tuple[Board, Tracer]:
    """What the page shows of a lab, and how it traces there. Raises LabError."""
    lab = open_lab(name)
    title = f"lab {lab.name}, {lab.mode} mode"
    board = Board(title, source_of(access_of(lab)), partial(connections, lab))
    return board, partial(trace_lab, name)


def connections(lab: Lab) -> ConnectionCounts | None:
    """New connections of all nodes together; None when no node can be asked."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pages = [page for page in pool.map(_metrics, (node.namespace for node in lab.nodes)) if page is not None]
    return count(pages) if pages else None


def _metrics(namespace: str) -> bytes | None:
    try:
        status, body = ask.get(namespace, ask.METRICS_PORT, "/metrics")
    except OSError:
        return None
    return body if status == 200 else None
