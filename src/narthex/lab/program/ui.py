"""The page of a running lab: its objects, connection counts, and packet traces."""

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
    """Return the content of the page of a lab, and its trace function. Raises LabError."""
    lab = open_lab(name)
    title = f"lab {lab.name}, {lab.mode} mode"
    board = Board(title, source_of(access_of(lab)), partial(connections, lab))
    return board, partial(trace_lab, name)


def connections(lab: Lab) -> ConnectionCounts | None:
    """Return the new connections on all nodes, None if no node answers."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pages = [page for page in pool.map(_metrics, (node.namespace for node in lab.nodes)) if page is not None]
    return count(pages) if pages else None


def _metrics(namespace: str) -> bytes | None:
    try:
        status, body = ask.get(namespace, ask.METRICS_PORT, "/metrics")
    except OSError:
        return None
    return body if status == 200 else None
