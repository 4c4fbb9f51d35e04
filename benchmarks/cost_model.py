"""What grows with what: time and memory of a node measured at three sizes and fitted, then 5,000 nodes with 100,000 endpoints on paper.

    sudo python benchmarks/cost_model.py [--quick] [--nodes 5000] [--services 10000] [--endpoints 10] [--json FILE]

Part one measures a node's first sync and its memory at small sizes, fits `a + b * Services + c * endpoints`, and holds the fit
against a size it has not seen. Part two simulates an API server and its watchers (`frame/fleet.py`): what one endpoint's change costs it,
what an outage costs it when all nodes come back, with the waits that Narthex makes and without them, and how long until all
nodes know. Nothing of part two touches a network. Needs root for part one.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from frame.cluster import events, fresh, quiet, sync_of
from frame.fleet import PRESENT, Server, changes_a_second, outage
from frame.report import Report, parser
from narthex.model import Store

FIT = ((500, 2), (2000, 2), (500, 20), (2000, 20))
SEEN_BY_NOBODY = (1500, 10)
QUICK_FIT = ((100, 2), (400, 2), (100, 20), (400, 20))
QUICK_SEEN_BY_NOBODY = (300, 10)
RATE = 100.0
FIT_RATIO = (0.5, 2.0)


class Cost(msgspec.Struct):
    """Of one size: seconds until the first sync is done, and MB that the process grew by."""

    seconds: float
    megabytes: float


def main() -> int:
    """Measure, fit, simulate, print."""
    options = parser(__doc__)
    options.add_argument("--nodes", type=int, default=5000)
    options.add_argument("--services", type=int, default=10_000)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--one", metavar="SERVICESxENDPOINTS", help="measure one size in this process and print it")
    asked = options.parse_args()
    if asked.one:
        services, endpoints = map(int, asked.one.split("x"))
        print(msgspec.json.encode(_here(services, endpoints)).decode())
        return 0
    report = Report("cost_model", asked)
    _fit(report, asked.quick)
    _fleet(report, asked.nodes, asked.services, asked.endpoints)
    return report.end()


def _here(services: int, endpoints: int) -> Cost:
    """Store, plan, rules and kernel of one size."""
    with fresh("cost") as namespace:
        sync, target = sync_of("nftables", namespace)
        gc.collect()
        before = _resident()
        with quiet():
            start = time.perf_counter()
            store = Store()
            for event in events(services, endpoints):
                store.apply(event)
            sync.sync(store.snapshot, store.take_changed())
            seconds = time.perf_counter() - start
        target.close()
        return Cost(seconds, _resident() - before)


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _apart(services: int, endpoints: int, rounds: int = 3) -> Cost:
    """The same in processes of their own; the quickest."""
    argv = [sys.executable, __file__, "--one", f"{services}x{endpoints}"]
    said = [subprocess.run(argv, capture_output=True, check=True).stdout for _ in range(rounds)]
    return min((msgspec.json.decode(each, type=Cost) for each in said), key=lambda cost: cost.seconds)


def _fit(report: Report, small: bool) -> None:
    sizes, unseen = (QUICK_FIT, QUICK_SEEN_BY_NOBODY) if small else (FIT, SEEN_BY_NOBODY)
    costs = [_apart(*size) for size in sizes]
    found = _apart(*unseen)
    for what, unit, values, real in (
        ("Time of a first sync from objects", "s", [cost.seconds for cost in costs], found.seconds),
        ("Memory of a node's Store, plan and rules", "MB", [cost.megabytes for cost in costs], found.megabytes),
    ):
        constant, service, endpoint = least_squares([(1.0, s, s * e) for s, e in sizes], values)
        table = report.table(f"{what}: what grows with what", unit=unit, floor="measured")
        for (services, endpoints), value in zip(sizes, values, strict=True):
            table.row(f"{services:,} x {endpoints}", value, size=services * endpoints, series="measured")
        size = f"{unseen[0]:,} x {unseen[1]}, not used for the fit"
        floor = table.row(f"{size}: measured", real)
        fitted = constant + service * unseen[0] + endpoint * unseen[0] * unseen[1]
        least, most = FIT_RATIO
        table.row(f"{size}: fitted", fitted, floor=floor, least_ratio=least, most_ratio=most)
        per = report.table(f"{what}: of each", unit="us" if unit == "s" else "bytes")
        per.row("Service", service * 1e6)
        per.row("endpoint", endpoint * 1e6)


def _fleet(report: Report, nodes: int, services: int, endpoints: int) -> None:
    size = f"{nodes:,} nodes, {services:,} Services x {endpoints}"
    steady = changes_a_second(PRESENT, nodes, endpoints, rate=RATE)
    table = report.table(f"{RATE:.0f} endpoint changes a second, {size}: what the API servers do", unit="a second")
    table.row("events sent to watchers", steady.events)
    table.row("MB sent", steady.bytes / 1e6)
    table.row("processors busy with that", steady.processors)
    table.row("changes a second that fill one 10 Gbit/s link", steady.most_rate)
    for label, how in OUTAGES:
        seen = outage(how, nodes, services, endpoints)
        table = report.table(f"After an outage, {label}, {size}", unit="s")
        table.row("until half of the nodes know all", seen.half)
        table.row("until all know all", seen.last, note=f"{seen.bytes / 1e9:.3g} GB sent")
        table = report.table(f"After an outage, {label}, {size}: requests", unit="requests")
        table.row("in the busiest second", seen.busiest)
        table.row("refused with 429", seen.refused)


OUTAGES: tuple[tuple[str, Server], ...] = (
    ("watches go on from their version", msgspec.structs.replace(PRESENT, history_kept=True)),
    ("the past is gone: everybody lists", PRESENT),
    ("the same without exponential backoff and jitter", msgspec.structs.replace(PRESENT, client_jitter=False)),
)


def least_squares(rows: list[tuple[float, ...]], values: list[float]) -> list[float]:
    """The factors that fit best, by the normal equations and elimination. Raises ZeroDivisionError when rows do not tell
    the factors apart."""
    width = len(rows[0])
    table = [
        [sum(row[i] * row[j] for row in rows) for j in range(width)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda row: abs(table[row][i]))
        table[i], table[pivot] = table[pivot], table[i]
        for j in range(width):
            if j != i:
                factor = table[j][i] / table[i][i]
                table[j] = [one - factor * other for one, other in zip(table[j], table[i], strict=True)]
    return [table[i][width] / table[i][i] for i in range(width)]


if __name__ == "__main__":
    sys.exit(main())
