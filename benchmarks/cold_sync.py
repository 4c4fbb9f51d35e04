"""First load and one change by size, in every mode of this machine's kernel, beside the kernel's own tools.

    sudo python benchmarks/cold_sync.py [--quick] [--mode MODE ...] [--size 5000x10 ...] [--rounds 3] [--json FILE]

First load: from the objects in memory (Store, plan, render, diff, apply: the proxy's own `FamilySync`), beside the bare tool
that is given the same lines: `nft -f`, `iptables-restore`. One change: one endpoint more or less, from event to commit, beside the
bare tool with the same elements or lines. In modes userspace and ipvs there is no such tool: a relay opens a port for each
Service port, and a virtual server is a message for itself. Mode ipvs is measured where the kernel has it. Needs root. Works in network namespaces of its own.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from frame.cluster import FAMILY, TARGETS, WITHOUT_TOOL, fresh, here, quiet, slice_of, store_of, sync_of
from frame.report import Report, Row, Table, parser
from narthex.linux.run import run
from narthex.model import Store, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.iptables.script import find, restore_blocks

SIZES = ((100, 1), (100, 10), (1000, 1), (1000, 10), (1000, 100), (5000, 10), (20_000, 2), (44_000, 1), (50_000, 2))
LARGEST = {"nftables": 100_000, "iptables-nft": 50_000, "iptables-legacy": 50_000, "userspace": 10_000, "ipvs": 50_000}
"""Endpoints of the largest size in each mode; a larger one takes longer than anybody wants to wait."""
QUICK_SIZES = ((100, 1), (1000, 10))
CHANGES = {"nftables": 200, "iptables-nft": 30, "iptables-legacy": 10, "userspace": 20, "ipvs": 30}
LOAD_RATIO = {"nftables": 1.5, "iptables-nft": 1.3, "iptables-legacy": 1.3}
"""Of the kernel's part in mode nftables, of the whole in the others, from 5,000 endpoints on: below, a millisecond counts."""
LOAD_SECONDS = {("nftables", 44_000, 1): 2.0}
CHANGE_MS = {"nftables": 1.0}
_LARGE = 5000


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--mode", action="append", choices=TARGETS)
    options.add_argument("--size", action="append", metavar="SERVICESxENDPOINTS")
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    sizes = [tuple(map(int, each.split("x"))) for each in asked.size or ()] or (QUICK_SIZES if asked.quick else SIZES)
    report = Report("cold_sync", asked)
    for mode in asked.mode or here():
        fitting = [(s, e) for s, e in sizes if s * e <= LARGEST[mode]]
        bare = "no tool" if mode in WITHOUT_TOOL else "nft -f" if mode == "nftables" else f"{mode}-restore"
        load = report.table(f"First load, {mode}", unit="s", floor=bare, axis="endpoints")
        measured = [_load(load, mode, s, e, asked.rounds) for s, e in fitting]
        change = report.table(f"One endpoint changes, {mode}", unit="ms", floor=bare, axis="endpoints")
        for (services, endpoints), (latencies, floor) in zip(fitting, measured, strict=True):
            _change(change, mode, services, endpoints, latencies, floor)
    return report.end()


def _load(table: Table, mode: str, services: int, endpoints: int, rounds: int) -> tuple[list[float], list[float]]:
    """First loads of one size; the latencies (ms) of one change at the last of them, ours and the bare tool's."""
    whole, kernel, bare, changes = [], [], [], ([], [])
    for turn in range(rounds):
        store = store_of(services, endpoints)
        with fresh("load") as namespace:
            sync, target = sync_of(mode, namespace)
            snapshot, changed = store.snapshot, store.take_changed()
            with quiet():
                start = time.perf_counter()
                done = sync.sync(snapshot, changed)
                whole.append(time.perf_counter() - start)
            kernel.append(done.seconds["apply"])
            if turn == rounds - 1:
                changes = _changes(mode, namespace, sync, store, services, endpoints)
            if hasattr(target, "close"):
                target.close()
        if mode not in WITHOUT_TOOL:
            with fresh("bare") as namespace:
                bare.append(_bare_load(mode, namespace, sync.rules, done.changes))
        del sync, target, done
    size = float(services * endpoints)
    name = f"{services:,} x {endpoints}"
    floor: Row | None = (
        table.row(f"{name}, {table.data.floor}", bare, size=size, series=table.data.floor) if bare else None
    )
    bar = LOAD_RATIO.get(mode) if size >= _LARGE else None
    nft = mode == "nftables"
    table.row(
        f"{name}, kernel's part",
        kernel,
        floor=floor,
        most_ratio=bar if nft else None,
        size=size,
        series="kernel's part",
    )
    seconds = LOAD_SECONDS.get((mode, services, endpoints))
    table.row(
        f"{name}, whole", whole, floor=floor, most_ratio=None if nft else bar, most=seconds, size=size, series="whole"
    )
    return changes


def _changes(
    mode: str, namespace: str, sync: Any, store: Store, services: int, endpoints: int
) -> tuple[list[float], list[float]]:
    latencies = []
    done = None
    for turn in range(CHANGES[mode]):
        number = turn // 2 * 7 % services
        event = Upsert(slice_of(number, endpoints + (turn + 1) % 2))
        start = time.perf_counter()
        store.apply(event)
        done = sync.sync(store.snapshot, store.take_changed())
        latencies.append((time.perf_counter() - start) * 1e3)
        assert done.wrote, "the change wrote nothing"
    floor = [_bare_change(mode, namespace, done) * 1e3 for _ in range(5)] if done and mode not in WITHOUT_TOOL else []
    return latencies, floor


def _change(table: Table, mode: str, services: int, endpoints: int, latencies: list[float], bare: list[float]) -> None:
    size, name = float(services * endpoints), f"{services:,} x {endpoints}"
    floor = table.row(f"{name}, {table.data.floor}", bare, size=size, series=table.data.floor) if bare else None
    p99 = statistics.quantiles(latencies, n=100, method="inclusive")[98]
    most = CHANGE_MS.get(mode)
    table.row(f"{name}, ours", latencies, floor=floor, most=most, size=size, series="ours", note=f"p99 {p99:.3g} ms")


def _bare_load(mode: str, namespace: str, rules: Any, changes: Any) -> float:
    """Seconds of the bare tool for the same load."""
    if mode == "nftables":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "load.nft"
            path.write_text(BACKENDS[mode].text(rules))
            return _timed(["nft", "-f", str(path)], namespace)
    text = "".join(restore_blocks(changes, find("", FAMILY), in_pieces=mode == "iptables-nft"))
    return _timed([f"{mode}-restore".replace("-nft", ""), "--noflush"], namespace, text)


def _bare_change(mode: str, namespace: str, done: Any) -> float:
    """Seconds of the bare tool for the last change, once more."""
    if mode == "nftables":
        from one_change import elements_again

        return _timed(["nft", "-f", "-"], namespace, elements_again(done.changes))
    text = "".join(restore_blocks(done.changes))
    return _timed([f"{mode}-restore".replace("-nft", ""), "--noflush"], namespace, text)


def _timed(argv: list[str], namespace: str, stdin: str = "") -> float:
    start = time.perf_counter()
    run(argv, stdin=stdin, namespace=namespace, timeout=1800)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
