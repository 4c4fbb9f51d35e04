"""Proving a node's rules equal to the plan, for all packets, by size.

    python benchmarks/proof.py [--quick] [--rounds 1] [--json FILE]

Each measurement is a process of its own: its processor seconds from the plan and the rules to the answer, without loading modules, and
the memory of the process with plan and rules. The growth exponent compares a fifth of the size with the whole. The rules are those of
Narthex, whose layout in mode iptables is kube-proxy's, and those of kube-proxy in mode nftables: a chain for each Service and endpoint.
Bars: 20 s for 5,000 Services with 10 endpoints each, 180 s for 44,000 with 1 each, 1 GiB, and 1.1 for the exponent.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
import time
from typing import Any

import msgspec

from frame import big_dump
from frame.report import Report, parser
from narthex.linux.run import run
from narthex.model import EndpointPort
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.dump.read import read_dump
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Deviation, Plan
from narthex.testing.build import HOST, NODE, endpoint, endpoint_slice, plan, service
from narthex.trace.program.reports import KUBE_PROXY_NFTABLES
from narthex.trace.proof.prove import ProofOutcome, prove

_CHILD = "--child"
LAYOUTS = ("nftables", "iptables", "kube-proxy nftables")
SIZES = ((5_000, 10, 20.0), (44_000, 1, 180.0))
"""Services, endpoints of each, and the most seconds."""


class Measured(msgspec.Struct):
    """What one process saw."""

    seconds: float
    mebibytes: float


def objects(services: int, each: int) -> Plan:
    """Return the plan of a cluster with so many Services, of whose endpoints one in `each` is on this node."""
    ports = (EndpointPort(name="http", port=8080),)
    found = []
    for number in range(services):
        nodes = (NODE if which == 0 else "worker-b" for which in range(each))
        pods = (endpoint(big_dump.endpoint(number, at, each), node=name) for at, name in enumerate(nodes))
        found.append(service(f"shop/service-{number}", big_dump.cluster_ip(number)))
        found.append(endpoint_slice(f"shop/service-{number}", *pods, ports=ports))
    return plan(*found, cluster_cidrs=("10.128.0.0/9",))


def rules_of(layout: str, desired: Plan, services: int, each: int) -> tuple[Ruleset, frozenset[Deviation]]:
    """Return the rules of a layout for a plan, and its deviations from the plan."""
    if layout == "kube-proxy nftables":
        text = "\n".join(big_dump.nft_lines(services * (2 + 2 * each), each))
        return read_dump(text).for_family(desired.family).ruleset, KUBE_PROXY_NFTABLES
    rendered: Any = BACKENDS[layout].render(desired)
    ruleset: Ruleset = rendered.ruleset() if layout == "nftables" else rendered.ruleset
    return ruleset, BACKENDS[layout].deviations


def measure(layout: str, services: int, each: int) -> Measured:
    """Prove in this process."""
    desired = objects(services, each)
    ruleset, deviations = rules_of(layout, desired, services, each)
    gc.collect()
    gc.disable()  # as `narthex check --prove`
    begin = time.process_time()
    report = prove(desired, ruleset, HOST, deviations)
    seconds = time.process_time() - begin
    if report.outcome is not ProofOutcome.PROVED:
        raise RuntimeError(f"not proved: {report}")
    return Measured(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measured(layout: str, services: int, each: int, rounds: int) -> list[Measured]:
    """Prove in processes of their own."""
    command = [sys.executable, __file__, _CHILD, layout, str(services), str(each)]
    return [msgspec.json.decode(run(command), type=Measured) for _ in range(rounds)]


def main() -> int:
    """Measure and judge."""
    if sys.argv[1:2] == [_CHILD]:
        layout, services, each = sys.argv[2:5]
        sys.stdout.write(msgspec.json.encode(measure(layout, int(services), int(each))).decode())
        return 0
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=1)
    asked = options.parse_args()
    report = Report("proof", asked)
    for services, each, most in SIZES:
        services = services // 20 if asked.quick else services
        size = f"{services:,} Services with {each} endpoint{'s' * (each > 1)} each"
        times = report.table(f"Proving the rules of {size}", unit="s")
        memory = report.table(f"Memory of a process that proves the rules of {size}", unit="MiB")
        growth = report.table(f"Growth exponent of the time up to {size}, from a fifth", unit="")
        for layout in LAYOUTS:
            part, whole = (measured(layout, count, each, asked.rounds) for count in (services // 5, services))
            times.row(layout, [one.seconds for one in whole], most=None if asked.quick else most)
            memory.row(layout, [one.mebibytes for one in whole], most=None if asked.quick else 1024.0)
            exponents = [math.log(a.seconds / b.seconds, 5) for a, b in zip(whole, part, strict=True)]
            growth.row(layout, exponents, most=1.1)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
