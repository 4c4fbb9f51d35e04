"""What it costs to read the kernel's counters of new connections, and to answer a scrape of /metrics with them.

    sudo python benchmarks/count_connections.py [--quick] [--services 5000] [--endpoints 10] [--mode MODE ...]

The counters are part of the rules as they stand, so packets pay nothing more. Reading happens when somebody asks, at most a
twentieth of the time, and never in the loop that syncs. Needs root. Works in a network namespace of its own and removes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from frame.cluster import FAMILY, events, fresh
from frame.report import Report, Table, parser
from narthex.linux.clock import SystemClock
from narthex.model import Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel.dataplanes import dataplane
from narthex.proxy.plan.ir import Plan
from narthex.proxy.program.connections import ConnectionCollector
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.runtime.configuration.values import OwnConfiguration
from narthex.testing.build import plan

SERIES = (10_000, 1_000_000)
"""Settings of `connectionSeries`."""


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=0)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--mode", nargs="+", default=["nftables", "iptables"])
    asked = options.parse_args()
    services = asked.services or (200 if asked.quick else 5000)
    report = Report("count_connections", asked)
    made = plan(*(event.object for event in events(services, asked.endpoints) if isinstance(event, Upsert)))
    for mode in asked.mode:
        title = f"Counters of {services:,} Services x {asked.endpoints}, {mode}"
        with fresh("count") as namespace:
            _measure(report.table(title, unit="ms"), mode, made, namespace)
    return report.end()


def _measure(table: Table, mode: str, made: Plan, namespace: str) -> None:
    backend: Any = BACKENDS[mode]
    dataplane(mode).target(FAMILY, namespace).apply(backend.diff(None, backend.render(made)))
    reader = dataplane(mode).counter_reader(FAMILY, namespace)
    assert reader is not None
    for endpoints, what in ((False, "Service ports"), (True, "Service ports and endpoints")):
        count = len(list(reader(made, endpoints)))
        times = _timed(lambda: list(reader(made, endpoints)), 5)  # noqa: B023 - called at once
        table.row(f"read, {what}", times, note=f"{count:,} counters")
    for series in SERIES:
        own = OwnConfiguration(connection_series=series)
        connections = ConnectionCollector({FAMILY: reader}, lambda: [made], SystemClock(), own)
        metrics = ProxyMetrics(mode, (connections,))
        connections.look()
        size = len(metrics.exposition())
        table.row(f"a scrape, connectionSeries {series:,}", _timed(metrics.exposition, 3), note=f"{size / 1e6:.1f} MB")


def _timed(work: Callable[[], object], times: int) -> list[float]:
    """Of some runs, in ms."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


if __name__ == "__main__":
    sys.exit(main())
