"""Socket load balancing: its maps, what it adds to a connect, and what a stream and a request lose.

    sudo python benchmarks/socket_balancing.py [--quick] [--part PART ...] [--services 20000] [--endpoints 10] [--pairs 20000] [--json FILE]

`load` and `change` compare with the bare writes of the same elements in batches. `connect`, `stream`, and `requests` alternate between
sockets of two cgroups: one without programs, whose sockets connect to the endpoint, and one whose sockets connect to a Service. Node
and namespaces are those of the other benchmarks, with the rules of mode nftables in force. Bars: loading takes less than twice the bare
writes; a change has at most two writes and takes 0.2 ms from the event; a connect takes at most 0.5 us longer than a direct one;
a stream and requests reach 0.98 of direct ones; no connection is tracked with the address of a Service. Needs root and cgroup v2.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frame.cluster import FAMILY, LAST, store_of, store_with_last
from frame.path import BULK, CALLER, ENDPOINTS, NODE, SHORT, bulk, leading
from frame.report import Report, parser
from narthex.linux.bpf import BpfMap, mount_bpf_file_system, unmount
from narthex.linux.cgroups import cgroup_mount, create_cgroup, move_process, remove_cgroup
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.model import Upsert
from narthex.proxy.backends.sockets.layout import Capacity, family_maps
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.kernel.sockets import SocketTarget, remove_pins
from narthex.proxy.plan.planner import Planner
from narthex.testing.build import CONFIG, endpoint, endpoint_slice

PARTS = ("load", "change", "connect", "stream", "requests")
_PINS = Path(f"/run/nxbench-{os.getpid()}-bpf")
_BATCH = 200


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--part", action="append", choices=PARTS)
    options.add_argument("--services", type=int, default=0)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--pairs", type=int, default=20_000, help="of a direct connection and one through a Service")
    asked = options.parse_args()
    services = asked.services or (2000 if asked.quick else 20_000)
    report = Report("socket_balancing", asked)
    parts = asked.part or PARTS
    with cgroups() as (plain, balanced):
        if "load" in parts:
            _load(report, balanced, services, asked.endpoints, asked.rounds)
        if "change" in parts:
            _change(report, balanced, services, asked.endpoints, 200 if asked.quick else 1000)
        if not {"connect", "requests"}.isdisjoint(parts):
            _connect(report, plain, balanced, services, 1000 if asked.quick else asked.pairs)
        if "stream" in parts:
            # A stream's throughput depends on where the kernel places its two processes: many short streams, not a few long ones.
            _stream(report, plain, balanced, services, 300, asked.rounds if asked.quick else 40 * asked.rounds)
    return report.end()


@contextmanager
def cgroups() -> Iterator[tuple[Path, Path]]:
    """Two cgroups of this benchmark; its process returns to where it was."""
    mount = cgroup_mount()
    assert mount is not None, "no cgroup v2 hierarchy is mounted"
    top = mount / f"nxbench-{os.getpid()}"
    made = top / "plain", top / "balanced"
    for path in made:
        create_cgroup(path)
    mount_bpf_file_system(_PINS)
    try:
        yield made
    finally:
        move_process(mount)
        unmount(_PINS)
        _PINS.rmdir()
        remove_cgroup(top)


@contextmanager
def target_of(cgroup: Path, namespace: str) -> Iterator[SocketTarget]:
    """The maps and programs of a cgroup, for a node's namespace."""
    with in_namespace(namespace):
        target = SocketTarget(cgroup, _PINS)
        target.open()
    try:
        yield target
    finally:
        target.close()
        with in_namespace(namespace):
            remove_pins(FAMILY, _PINS)
            remove_pins(next(family for family in type(FAMILY) if family is not FAMILY), _PINS)


def _load(report: Report, cgroup: Path, services: int, endpoints: int, rounds: int) -> None:
    plan = Planner(CONFIG, FAMILY).plan(store_of(services, endpoints).snapshot)
    bare, ours, rendered = [], [], []
    capacity = Capacity().at_least(services + 1, services, services * endpoints)
    for _ in range(rounds):
        rows = SocketRows(FAMILY)
        changes = rows.advance(plan)
        bare.append(_bare_writes(capacity, changes))
        name = f"nxbench-{os.getpid()}-load"
        create_namespace(name)
        try:
            with target_of(cgroup, name) as target:
                target.ensure(FAMILY, services + 1, services, services * endpoints)
                gc.collect()
                gc.disable()
                start = time.perf_counter()
                changes = SocketRows(FAMILY).advance(plan)
                middle = time.perf_counter()
                target.apply(FAMILY, changes)
                end = time.perf_counter()
                gc.enable()
                ours.append(end - start)
                rendered.append(middle - start)
        finally:
            delete_namespace(name)
    title = f"Loading {services:,} Services x {endpoints}"
    table = report.table(title, unit="s", floor="the same elements in batches")
    floor = table.row("bare writes", bare)
    table.row("rows of the plan", rendered)
    table.row("rows and writes", ours, floor=floor, most_ratio=2.0)


def _bare_writes(capacity: Capacity, changes: Any) -> float:
    """Seconds to write elements into fresh maps of the same layout."""
    layout = family_maps(FAMILY, capacity)
    parts = (layout.slots, changes.slots), (layout.pools, changes.pools), (layout.frontends, changes.frontends)
    made = [(BpfMap.create(spec), writes) for spec, writes in parts]
    start = time.perf_counter()
    for table, writes in made:
        table.update_many(writes.keys, writes.values)
    took = time.perf_counter() - start
    for table, _ in made:
        table.close()
    return took


def _change(report: Report, cgroup: Path, services: int, endpoints: int, changes: int) -> None:
    """One endpoint comes or goes: from the event in the Store to the last write."""
    store, planner, rows = store_of(services, endpoints), Planner(CONFIG, FAMILY), SocketRows(FAMILY)
    name = f"nxbench-{os.getpid()}-change"
    create_namespace(name)
    order = random.Random(1)
    times, writes = [], []
    try:
        with target_of(cgroup, name) as target:
            target.ensure(FAMILY, services + 1, services, 2 * services * endpoints)
            target.apply(FAMILY, rows.advance(planner.plan(store.snapshot)))
            store.take_changed()
            gc.collect()
            gc.freeze()
            for turn in range(changes):
                number = order.randrange(services)
                event = Upsert(_other_endpoints(number, endpoints, turn))
                before = target.writes
                start = time.perf_counter()
                store.apply(event)
                plan = planner.plan(store.snapshot, store.take_changed())
                target.apply(FAMILY, rows.advance(plan))
                times.append((time.perf_counter() - start) * 1e3)
                writes.append(target.writes - before)
                store.apply(Upsert(_other_endpoints(number, endpoints, None)))
                target.apply(FAMILY, rows.advance(planner.plan(store.snapshot, store.take_changed())))
            gc.unfreeze()
    finally:
        delete_namespace(name)
    title = f"One endpoint's change, {services:,} Services x {endpoints}"
    report.table(title, unit="writes").row("at most", max(writes), most=2)
    report.table(f"{title}, from the event", unit="ms").row("median", statistics.median(times), most=0.2)


def _other_endpoints(number: int, endpoints: int, turn: int | None) -> Any:
    """The endpoints of a Service: one more, one less, another one, or as at first (None)."""
    first = number * 128
    ends = [first + index for index in range(endpoints)]
    if turn is not None:
        if turn % 3:
            ends.pop(turn % endpoints)
        if turn % 3 != 1:
            ends.append(first + 100)
    made = [endpoint(f"10.{64 + (end >> 16)}.{end >> 8 & 255}.{end & 255}", node=f"worker-{end % 100}") for end in ends]
    return endpoint_slice(f"shop/service-{number}", *made, port=8080)


@contextmanager
def balancing(cgroup: Path, services: int, port: int) -> Iterator[None]:
    """The node with rules and programs for so many Services, of which LAST leads to this port of the first endpoint."""
    with leading("nftables", services, port), target_of(cgroup, NODE) as target:
        plan = Planner(CONFIG, FAMILY).plan(store_with_last(services, ENDPOINTS[0], port).snapshot)
        target.ensure(FAMILY, services + 2, services + 1, 2 * services)
        target.apply(FAMILY, SocketRows(FAMILY).advance(plan))
        with in_namespace(NODE):
            target.activate()
        yield


def _connect(report: Report, plain: Path, balanced: Path, services: int, count: int) -> None:
    direct, through, differences = [], [], []
    rates: dict[Path, list[float]] = {plain: [], balanced: []}
    with balancing(balanced, services, SHORT):
        ways = {plain: (ENDPOINTS[0], SHORT), balanced: (LAST, 80)}
        for _ in range(count // _BATCH):
            socks = {cgroup: _sockets(cgroup, _BATCH) for cgroup in (plain, balanced)}
            spent = {plain: 0.0, balanced: 0.0}
            gc.disable()
            for number in range(_BATCH):
                took = {}
                for cgroup in (plain, balanced) if number % 2 else (balanced, plain):
                    sock, way = socks[cgroup][number], ways[cgroup]
                    start = time.perf_counter()
                    sock.connect(way)
                    took[cgroup] = time.perf_counter() - start
                    while sock.recv(100):
                        pass
                    sock.close()
                    spent[cgroup] += time.perf_counter() - start
                direct.append(took[plain] * 1e6)
                through.append(took[balanced] * 1e6)
                differences.append(through[-1] - direct[-1])
            gc.enable()
            for cgroup, seconds in spent.items():
                rates[cgroup].append(_BATCH / seconds)
        tracked = run(["conntrack", "-L", "-d", LAST], namespace=NODE).splitlines()
        others = run(["conntrack", "-L", "-d", ENDPOINTS[0]], namespace=NODE).splitlines()
    table = report.table(f"Connect, {services:,} Services", unit="us", floor="direct routing")
    floor = table.row("direct", direct)
    table.row("through a Service", through, floor=floor)
    added = report.table(f"What a Service adds to a connect, {services:,} Services", unit="us")
    added.row(
        "median of the differences", statistics.median(differences), most=0.5, note=f"95 %: {_interval(differences)}"
    )
    requests = report.table("Requests, each by a connection of its own", unit="/s", floor="direct routing")
    floor = requests.row("direct", rates[plain])
    requests.row("through a Service", rates[balanced], floor=floor, least_ratio=0.98)
    entries = report.table("Tracked connections of the node", unit="entries")
    entries.row("to the endpoint, also of direct connections", len(others))
    entries.row("to the Service", len(tracked), most=0)


def _interval(values: list[float]) -> str:
    """The median's confidence interval: on a busy machine, few pairs say little."""
    ordered = sorted(values)
    middle, reach = len(ordered) / 2, 0.98 * len(ordered) ** 0.5
    return f"{ordered[int(middle - reach)]:.2f} to {ordered[int(middle + reach)]:.2f}"


def _sockets(cgroup: Path, count: int) -> list[socket.socket]:
    """Sockets of the client's namespace that belong to a cgroup."""
    move_process(cgroup)
    with in_namespace(CALLER):
        made = [socket.socket() for _ in range(count)]
    for sock in made:
        sock.settimeout(30)
    return made


def _stream(report: Report, plain: Path, balanced: Path, services: int, megabytes: int, rounds: int) -> None:
    direct, through = [], []
    with balancing(balanced, services, BULK):
        for turn in range(rounds):
            for cgroup in (plain, balanced) if turn % 2 else (balanced, plain):
                move_process(cgroup)
                if cgroup is plain:
                    direct.append(bulk((ENDPOINTS[0], BULK), megabytes))
                else:
                    through.append(bulk((LAST, 80), megabytes))
    table = report.table(f"One TCP stream, {services:,} Services", unit="MB/s", floor="direct routing")
    floor = table.row("direct", direct)
    table.row("through a Service", through, floor=floor, least_ratio=0.98)


if __name__ == "__main__":
    sys.exit(main())
