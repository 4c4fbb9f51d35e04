"""The page of a running lab: its objects, connection counts, and packet traces."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from narthex.lab.program import node_client as ask
from narthex.lab.program.labs import access_of, open_lab
from narthex.lab.program.state import LabState
from narthex.lab.program.trace import faults_of, trace_lab
from narthex.lab.ui.board import Board, ConnectionCounts
from narthex.lab.ui.path import Tracer, source_of
from narthex.model import InputError
from narthex.trace.program.rules_trace import TracedPath
from narthex.trace.program.travel import TraceRequest

_AT_ONCE = 16


def board_of(name: str) -> tuple[Board, Tracer]:
    """Return the content of the page of a lab, and its trace function. Raises LabError."""
    lab = open_lab(name)
    title = f"lab {lab.name}, {lab.mode} mode"
    board = Board(title, source_of(access_of(lab)), partial(connections, lab), partial(faults, name))
    return board, partial(_trace, name)


def _trace(name: str, source: str, destination: str) -> TracedPath:
    return trace_lab(name, TraceRequest(source=source, destination=destination))


def faults(name: str) -> tuple[str, ...]:
    """Return what is broken in a lab, each in one line; nothing once the lab is gone."""
    try:
        return faults_of(name)
    except InputError:
        return ()


def connections(lab: LabState) -> ConnectionCounts | None:
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


_LINE = re.compile(rb"^narthex_service_new_connections_total\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def count(pages: Iterable[bytes]) -> dict[str, int]:
    """Return connections by Service (`shop/web`) since the proxies' start, over the metrics pages of all nodes."""
    total: Counter[str] = Counter()
    for page in pages:
        for labels, value in _LINE.findall(page):
            found = dict(_LABEL.findall(labels.decode(errors="replace")))
            total[f"{found.get('namespace', '')}/{found.get('service', '')}"] += round(float(value))
    return dict(total)
