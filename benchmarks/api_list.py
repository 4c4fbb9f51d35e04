"""10,000 Services and 10,000 slices of 10 at an API server: list and decode, first sync from process start, a burst.

    sudo python benchmarks/api_list.py [--quick] [--size 5000x10 ...] [--mode nftables] [--burst 1000] [--runs 3]

The server is our own for tests, in a process of its own, with objects as big as a real one sends them (managedFields,
owner references). The floor reads the same bytes with http.client and decodes them with the json module, without
collecting garbage (nor does a proxy before its first sync), before each run of ours.

Bars: list and decode under 2 s; a sync within 5 s of the start of the process (with 5,000 Services: 1.5 s, and 200 MB); resident
memory under 300 MB; a burst done within a second of its last change. Needs root. Works in a network namespace of its own and
removes it.
"""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from frame.proxy import Proxy
from frame.report import Report, Table, parser
from frame.server import Server
from narthex.kube.access import Access
from narthex.kube.resources import ENDPOINT_SLICES, SERVICES, of_a_proxy
from narthex.kube.source import KubeSource
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.testing.build import NODE

LIST_BAR, BURST_BAR = 2.0, 1.0
START_BAR, MEMORY_BAR = 5.0, 300.0
START_BARS, MEMORY_BARS = {(5000, 10): 1.5}, {(5000, 10): 200.0}
"""By Services and endpoints of each, where it is another."""
LIST_RATIO, START_RATIO = 4.0, 25.0
"""To the floor; these hold on any machine, and leave room for chance."""


def floor(url: str) -> tuple[float, float]:
    """Seconds to read both lists, and to decode them; what anybody in Python pays at least."""
    reading = decoding = 0.0
    gc.disable()
    for resource in (SERVICES, ENDPOINT_SLICES):
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        start = time.perf_counter()
        connection.request("GET", resource.paths[0] + "?resourceVersion=0")
        body = connection.getresponse().read()
        read = time.perf_counter()
        json.loads(body)
        reading, decoding = reading + read - start, decoding + time.perf_counter() - read
        connection.close()
    gc.enable()
    return reading, decoding


class Figure(NamedTuple):
    """Of one run: seconds that passed, of the CPU, and of the floor just before."""

    seconds: float
    cpu: float
    floor: float


def listed(url: str, *, streaming: bool) -> Figure:
    """Until a source has all lists as events."""
    base = sum(floor(url))
    source = KubeSource(Access(master=url), of_a_proxy(NODE), streaming=streaming)
    stop = threading.Event()
    gc.disable()  # As in a proxy before its first sync.
    start, cpu = time.perf_counter(), time.process_time()
    changes = source.changes(stop)
    events = next(changes)
    figure = Figure(time.perf_counter() - start, time.process_time() - cpu, base)
    gc.enable()
    assert not source.problems, source.problems[0]
    assert len(events) > 2 * 100
    stop.set()
    changes.close()
    return figure


def main() -> int:
    """Measure and print; 1 when a bar is missed."""
    options = parser(__doc__)
    options.add_argument("--size", action="append", metavar="SERVICESxENDPOINTS")
    options.add_argument("--mode", default="nftables")
    options.add_argument("--burst", type=int, default=1000)
    options.add_argument("--runs", type=int, default=3)
    given = options.parse_args()
    sizes = [tuple(map(int, each.split("x"))) for each in given.size or ()]
    report = Report("api_list", given)
    namespace = f"nxbench-{os.getpid()}-api"
    create_namespace(namespace)
    try:
        with in_namespace(namespace):
            for services, endpoints in sizes or ([(1000, 10)] if given.quick else [(5000, 10), (10_000, 10)]):
                measure(report, services, endpoints, given)
                subprocess.run(["nft", "flush", "ruleset"], check=True)
    finally:
        delete_namespace(namespace)
    return report.end()


def measure(report: Report, services: int, endpoints: int, given: argparse.Namespace) -> None:
    """Everything of one size, in the namespace of the calling thread."""
    size = f"{services:,} Services, {services:,} slices of {endpoints}"
    with Server(services, endpoints) as server:
        table = report.table(f"From an API server, {size}", unit="s", floor="http.client and json.loads")
        for name in ("list", "streaming list"):
            figures = [listed(server.url, streaming=name == "streaming list") for _ in range(given.runs)]
            _timed(table, f"{name}, decoded and checked", figures, LIST_BAR, LIST_RATIO)
        starts = []
        for _ in range(given.runs - 1):
            proxy, figure = started(server.url, given.mode)
            starts.append(figure)
            proxy.end()
            subprocess.run(["nft", "flush", "ruleset"], check=True)
        proxy, figure = started(server.url, given.mode)
        try:
            bar = START_BARS.get((services, endpoints), START_BAR)
            _timed(table, "process start to first sync", [*starts, figure], bar, START_RATIO)
            memory = report.table(f"Memory of the process, {size}", unit="MB")
            memory.row("resident", proxy.memory("VmRSS"), most=MEMORY_BARS.get((services, endpoints), MEMORY_BAR))
            memory.row("at most it was", proxy.memory("VmHWM"))
            began = time.time()
            last = server.change(given.burst, given.burst)
            syncs, done = proxy.settled(began)
            burst = report.table(f"A burst of {given.burst:,} changes in a second, {size}", unit="s")
            told = f"{syncs} syncs"
            burst.row("from the last change to the last sync", max(0.0, done - last), most=BURST_BAR, note=told)
        finally:
            proxy.end()


def started(url: str, mode: str) -> tuple[Proxy, Figure]:
    """A proxy that has just done its first sync."""
    base = sum(floor(url))
    proxy = Proxy(url, mode)
    ready = proxy.wait_for("ready: the first sync is done")
    return proxy, Figure(ready - proxy.started, proxy.cpu(), base)


def _timed(table: Table, what: str, figures: list[Figure], bar: float, ratio: float) -> None:
    """The floor of these runs, and they."""
    floor = table.row(f"{what}: floor", [figure.floor for figure in figures])
    seconds = [figure.seconds for figure in figures]
    table.row(what, seconds, floor=floor, most=bar, most_ratio=ratio)
    table.row(f"{what}: CPU", [figure.cpu for figure in figures], floor=floor)


if __name__ == "__main__":
    sys.exit(main())
