"""What a node needs for 1,000, 10,000, and 50,000 Services: time to the first sync, processor time, and memory.

    sudo python benchmarks/capacity.py [--quick] [--size 1000x10 ...] [--changes 200] [--json FILE]

`narthex proxy` in mode nftables is a process of its own and lists all objects from an API server, which is another process. The peer
is `nft -f` with the same rules, the tool by which kube-proxy's mode nftables writes them: its time and memory are what kube-proxy
needs besides its own. Endpoints then change at 20 a second. Needs root. Works in network namespaces of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from api_list import started
from frame.cluster import fresh, store_of, sync_of
from frame.report import Report, parser
from frame.server import Server
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.proxy.backends import BACKENDS

SIZES = ((1000, 10), (10_000, 10), (50_000, 2))
QUICK_SIZES = ((1000, 2),)
RATE = 20
"""Changes of endpoints a second."""


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--size", action="append", metavar="SERVICESxENDPOINTS")
    options.add_argument("--changes", type=int, default=200)
    given = options.parse_args()
    sizes = [tuple(map(int, each.split("x"))) for each in given.size or ()]
    report = Report("capacity", given)
    for services, endpoints in sizes or (QUICK_SIZES if given.quick else SIZES):
        _measure(report, services, endpoints, given)
    return report.end()


def _measure(report: Report, services: int, endpoints: int, given: argparse.Namespace) -> None:
    """One size."""
    namespace = f"nxbench-{os.getpid()}-size"
    size = f"{services:,} Services x {endpoints}"
    tool_seconds, tool_megabytes = _bare_load(services, endpoints)
    create_namespace(namespace)
    try:
        with in_namespace(namespace), Server(services, endpoints) as server:
            proxy, start = started(server.url, "nftables")
            try:
                seconds = report.table(f"Start, {size}", unit="s", floor="")
                seconds.row("process start to first sync", start.seconds)
                seconds.row("processor time of it", start.cpu)
                seconds.row("nft -f with the same rules", tool_seconds)
                memory = report.table(f"Memory, {size}", unit="MB", floor="")
                memory.row("resident after the first sync", proxy.memory("VmRSS"))
                memory.row("at most until then", proxy.memory("VmHWM"))
                memory.row("nft -f, at most", tool_megabytes)
                before, began = proxy.cpu(), time.time()
                server.change(given.changes, RATE)
                proxy.settled(began)
                each = (proxy.cpu() - before) / given.changes * 1e3
                change = report.table(f"A change of endpoints, {size}", unit="ms", floor="")
                change.row(f"processor time, at {RATE} changes/s", each)
                memory.row(f"resident after {given.changes} changes", proxy.memory("VmRSS"))
            finally:
                proxy.end()
    finally:
        delete_namespace(namespace)


def _bare_load(services: int, endpoints: int) -> tuple[float, float]:
    """Seconds and MB of `nft -f` for the same rules."""
    store = store_of(services, endpoints)
    with fresh("tool") as namespace:
        sync, target = sync_of("nftables", namespace)
        sync.sync(store.snapshot, store.take_changed())
        text = BACKENDS["nftables"].text(sync.rules)
        target.close()
    with fresh("bare") as namespace, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "load.nft"
        path.write_text(text)
        # A process of its own for each size: the kernel keeps only the largest child's memory.
        program = (
            "import resource, subprocess, time; start = time.perf_counter(); "
            f"subprocess.run(['nft', '-f', {str(path)!r}], check=True); "
            "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
        )
        with in_namespace(namespace):
            argv = [sys.executable, "-c", program]
            seconds, megabytes = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(megabytes)


if __name__ == "__main__":
    sys.exit(main())
