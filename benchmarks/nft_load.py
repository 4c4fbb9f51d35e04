"""Loading and changing the nftables rules of many Services, beside `nft -f` of the same elements.

    sudo python benchmarks/nft_load.py [--quick] [--size 5000x10 ...] [--rounds 3] [--changes 500] [--json FILE]

Needs root and the nft command. Works in network namespaces of its own and removes them. Every round loads in turn, so
that both ways meet the same machine. Bars: the kernel's part at most 1.5 times the bare elements, the whole from the plan at most 2 times; 44,000 x 1 in 2 s; one endpoint
change p50 under 1 ms, p99 under 10 ms.
"""

from __future__ import annotations

import gc
import resource
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from immutables import Map

from frame.cluster import FAMILY, fresh
from frame.report import Report, parser
from narthex.linux.run import run
from narthex.model import NamespacedName, Protocol, ServicePortName
from narthex.proxy.backends.nftables.backend import NftablesBackend
from narthex.proxy.kernel.nftables import NftablesTarget
from narthex.proxy.plan.ir import (
    Endpoint,
    Forward,
    Frontend,
    FrontendKind,
    Lineage,
    Plan,
    PodDetector,
    Pool,
    Scope,
    ServicePlan,
)

CLUSTER, CLUSTER_MASQUERADED = Forward(Scope.CLUSTER, False), Forward(Scope.CLUSTER, True)


def service(number: int, endpoints: int) -> ServicePlan:
    """A ClusterIP Service with so many endpoints, one in three of them on this node."""
    name = ServicePortName(NamespacedName("shop", f"service-{number}"), "http", Protocol.TCP)
    frontend = Frontend(
        kind=FrontendKind.CLUSTER_IP,
        address=f"10.110.{number >> 8}.{number & 255}",
        protocol=Protocol.TCP,
        port=80,
        pod=CLUSTER,
        node=CLUSTER_MASQUERADED,
        other=CLUSTER_MASQUERADED,
    )
    return ServicePlan(name=name, frontends=(frontend,), cluster=pool(number, endpoints))


def pool(number: int, endpoints: int) -> Pool:
    """Endpoints of one Service; no two Services share one."""
    first = number * 64
    ends = (first + index for index in range(endpoints))
    return Pool(
        endpoints=tuple(
            Endpoint(f"10.{64 + (end >> 16)}.{end >> 8 & 255}.{end & 255}", 8080, end % 3 == 0) for end in ends
        )
    )


def whole_plan(services: int, endpoints: int) -> Plan:
    """The plan of the load."""
    made = [service(number, endpoints) for number in range(services)]
    return Plan(
        family=FAMILY,
        services=Map({one.name: one for one in made}),
        pods=PodDetector(cidrs=("10.64.0.0/10",)),
        service_cidrs=("10.110.0.0/16",),
    )


def seconds(start: float) -> float:
    """Time since a reading of the clock."""
    return time.perf_counter() - start


def load_bare(path: Path) -> float:
    """`nft -f` of maps and elements, the whole process."""
    with fresh("bare") as namespace:
        start = time.perf_counter()
        run(["nft", "-f", str(path)], namespace=namespace)
        return seconds(start)


def load_ours(plan: Plan) -> tuple[float, float]:
    """Render, diff and apply; the apply alone."""
    backend = NftablesBackend()
    with fresh("ours") as namespace:
        target = NftablesTarget(FAMILY, namespace)
        start = time.perf_counter()
        changes = backend.diff(None, backend.render(plan))
        between = time.perf_counter()
        target.apply(changes)
        whole, kernel = seconds(start), seconds(between)
        target.close()
        return whole, kernel


def one_endpoint_changes(plan: Plan, endpoints: int, changes: int) -> tuple[list[float], int]:
    """Latency of render, diff and apply for one endpoint more or less, at the whole load; most elements written."""
    backend = NftablesBackend()
    latencies = []
    written = 0
    with fresh("change") as namespace:
        target = NftablesTarget(FAMILY, namespace)
        have = backend.render(plan)
        target.apply(backend.diff(None, have))
        # As a program that has started does: what it holds now is not looked through at every collection.
        gc.collect()
        gc.freeze()
        for turn in range(changes):
            number = turn // 2 * 7 % len(plan.services)
            changed = service(number, endpoints + (turn + 1) % 2)
            plan = msgspec.structs.replace(
                plan,
                services=plan.services.set(changed.name, changed),  # type: ignore[attr-defined]
                lineage=Lineage(plan.lineage, frozenset({changed.name})),
            )
            start = time.perf_counter()
            want, difference = backend.advance(have, plan)
            target.apply(difference)
            latencies.append(seconds(start))
            written = max(written, difference.element_count())
            have = want
        in_kernel = target.read()
        assert in_kernel is not None
        assert not backend.diff(in_kernel, have), "the kernel holds something else than was meant"
        target.close()
    return latencies, written


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--size", action="append", metavar="SERVICESxENDPOINTS")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--changes", type=int, default=500)
    asked = options.parse_args()
    sizes = asked.size or (["1000x10"] if asked.quick else ["5000x10", "44000x1", "50000x2"])
    report = Report("nft_load", asked)
    for text in sizes:
        services, endpoints = map(int, text.split("x"))
        _measure(report, services, endpoints, asked.rounds, asked.changes)
    return report.end()


def _measure(report: Report, services: int, endpoints: int, rounds: int, changes: int) -> None:
    plan = whole_plan(services, endpoints)
    size = f"{services:,} Services x {endpoints}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "elements.nft"
        backend = NftablesBackend()
        path.write_text(backend.text(backend.render(plan)))
        bare, whole, kernel = [], [], []
        for _ in range(rounds):
            bare.append(load_bare(path))
            ours = load_ours(plan)
            whole.append(ours[0])
            kernel.append(ours[1])
    table = report.table(f"Elements of {size}", unit="s", floor="nft -f of the bare elements")
    floor = table.row("nft -f, bare elements", bare)
    table.row("ours, apply", kernel, floor=floor, most_ratio=1.5)
    table.row("ours, render, diff, apply", whole, floor=floor, most_ratio=2.0)

    latencies, written = one_endpoint_changes(plan, endpoints, changes)
    table = report.table(f"One endpoint of {size} changes, from the plan to the commit", unit="ms")
    ordered = sorted(each * 1e3 for each in latencies)
    table.row("render, diff, apply", ordered, most=1.0, note=f"at most {written} elements written")
    table.row("99th percentile", ordered[int(len(ordered) * 0.99)], most=10.0)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report.table(f"Memory of this program after {size}", unit="MB").row("most resident", most)


if __name__ == "__main__":
    sys.exit(main())
