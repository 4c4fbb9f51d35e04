"""Loading and changing the nftables rules of many Services, beside `nft -f` of the same elements.

    sudo python benchmarks/nft_load.py [--services 5000] [--endpoints 10] [--rounds 3] [--changes 500]

Needs root and the nft command. Works in network namespaces of its own and removes them. Every round loads in turn, so
that both ways meet the same machine; the ratio is of the best rounds. Bars: load at most 2 times the bare elements (aim
1.5); one endpoint change p50 under 1 ms, p99 under 10 ms.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
from immutables import Map

from narthex.backends.nftables import NftablesBackend
from narthex.host import netns
from narthex.host.nft import NftablesTarget
from narthex.host.run import run
from narthex.model.names import NamespacedName, ServicePortName
from narthex.model.net import IPFamily, Protocol
from narthex.plan.ir import (
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

FAMILY = IPFamily.IPV4
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


class Fresh:
    """A namespace for one measurement."""

    def __init__(self, label: str) -> None:
        self.name = f"nxbench-{os.getpid()}-{label}"

    def __enter__(self) -> str:
        netns.create(self.name)
        return self.name

    def __exit__(self, *_: object) -> None:
        netns.delete(self.name)


def seconds(start: float) -> float:
    """Time since a reading of the clock."""
    return time.perf_counter() - start


def load_bare(path: Path) -> float:
    """`nft -f` of maps and elements, the whole process."""
    with Fresh("bare") as namespace:
        start = time.perf_counter()
        run(["nft", "-f", str(path)], namespace=namespace)
        return seconds(start)


def load_ours(plan: Plan) -> tuple[float, float]:
    """Render, diff and apply; the apply alone."""
    backend = NftablesBackend()
    with Fresh("ours") as namespace:
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
    with Fresh("change") as namespace:
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
            want = backend.render(plan, have)
            difference = backend.diff(have, want)
            target.apply(difference)
            latencies.append(seconds(start))
            written = max(written, difference.element_count())
            have = want
        in_kernel = target.read()
        assert in_kernel is not None
        assert not backend.diff(in_kernel, have), "the kernel holds something else than was meant"
        target.close()
    return latencies, written


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--services", type=int, default=5000)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--changes", type=int, default=500)
    arguments = options.parse_args()

    plan = whole_plan(arguments.services, arguments.endpoints)
    print(f"{arguments.services} Services x {arguments.endpoints} endpoints, {arguments.rounds} rounds")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "elements.nft"
        backend = NftablesBackend()
        path.write_text(backend.text(backend.render(plan)))
        bare, whole, kernel = [], [], []
        for _ in range(arguments.rounds):
            bare.append(load_bare(path))
            ours = load_ours(plan)
            whole.append(ours[0])
            kernel.append(ours[1])
    print(f"nft -f, bare elements      {min(bare):7.3f} s")
    print(f"ours, apply                {min(kernel):7.3f} s   ratio {min(kernel) / min(bare):.2f}")
    print(f"ours, render, diff, apply  {min(whole):7.3f} s   ratio {min(whole) / min(bare):.2f}   (bar 2.00)")

    latencies, written = one_endpoint_changes(plan, arguments.endpoints, arguments.changes)
    cuts = statistics.quantiles(latencies, n=100)
    print(
        f"one endpoint change        p50 {cuts[49] * 1e3:.3f} ms   p99 {cuts[98] * 1e3:.3f} ms   "
        f"worst {max(latencies) * 1e3:.1f} ms   at most {written} elements written   ({len(latencies)} changes)"
    )
    print(f"most memory                {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:7.0f} MB")


if __name__ == "__main__":
    main()
