"""A node's proxy in a cluster that changes: processor and memory at rest, at 100 endpoint changes a second, and over an hour.

    sudo python benchmarks/churn.py [--quick] [--services 5000] [--endpoints 10] [--seconds 60] [--json FILE]

`narthex node` as a process, an API server in another. After the first sync: nothing for so many seconds; then 100 changes a
second for as long; then the 36,000 changes that an hour of ten a second brings, as fast as they go, in twelve parts: memory after
each. Bars: under 200 MB at 5,000 x 10, under 1 % of a core at rest, under 20 % at 100 changes a second, and no growth by a tenth
after the first quarter of the hour. Needs root. Works in a network namespace of its own.
"""

from __future__ import annotations

import os
import sys
import time

from frame.proxy import Proxy
from frame.report import Report, parser
from frame.server import Server
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run

RATE = 100
HOUR = 36_000
PARTS = 12
MEMORY_MB, REST_PERCENT, BUSY_PERCENT, GROWTH = 200.0, 1.0, 20.0, 1.1


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=0)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--mode", default="nftables")
    options.add_argument("--seconds", type=int, default=0)
    asked = options.parse_args()
    services = asked.services or (500 if asked.quick else 5000)
    seconds = asked.seconds or (5 if asked.quick else 60)
    report = Report("churn", asked)
    name = f"nxbench-{os.getpid()}-churn"
    create_namespace(name)
    try:
        run(["ip", "link", "set", "lo", "up"], namespace=name)
        with in_namespace(name), Server(services, asked.endpoints) as server:
            proxy = Proxy(server.url, asked.mode, "node")
            try:
                proxy.wait_for("ready: the first sync is done")
                changes = HOUR // 10 if asked.quick else HOUR
                _measure(report, proxy, server, f"{services:,} x {asked.endpoints}", seconds, changes)
            finally:
                proxy.end()
    finally:
        delete_namespace(name)
    return report.end()


def _measure(report: Report, proxy: Proxy, server: Server, size: str, seconds: int, changes: int) -> None:
    time.sleep(2.0)
    processor = report.table(f"Processor of narthex node, {size}", unit="% of a core")
    before = proxy.cpu()
    time.sleep(seconds)
    # Counted in hundredths of a second: a process that does nothing has none.
    processor.row(f"at rest, {seconds} s", (proxy.cpu() - before) / seconds * 100, most=REST_PERCENT)
    memory = report.table(f"Memory of narthex node, {size}", unit="MB")
    memory.row("at rest, resident", proxy.memory("VmRSS"), most=MEMORY_MB)
    before, began = proxy.cpu(), time.time()
    server.change(RATE * seconds, RATE)
    proxy.settled(began)
    label = f"{RATE} endpoint changes a second, {seconds} s"
    processor.row(label, (proxy.cpu() - before) / seconds * 100, most=BUSY_PERCENT)
    memory.row("after these", proxy.memory("VmRSS"), most=MEMORY_MB)
    began = time.time()
    before = proxy.cpu()
    quarter = None
    for part in range(PARTS):
        server.change(changes // PARTS, 1_000_000)
        proxy.settled(began, quiet=0.5)
        last = part == PARTS - 1
        label = f"after {changes // PARTS * (part + 1):,} more as fast as they go"
        now = memory.row(label, proxy.memory("VmRSS"), floor=quarter, most_ratio=GROWTH if last else None)
        # By then every Service has changed, and room for that is had.
        quarter = now if part == PARTS // 4 else quarter
    took = time.time() - began
    told = f"{(proxy.cpu() - before) / changes * 1e6:.0f} us of processor each"
    report.table(f"An hour's changes, {size}", unit="s").row(f"{changes:,} changes", took, note=told)


if __name__ == "__main__":
    sys.exit(main())
