"""Proving a node's rules equal to the plan, for all packets, by size.

    python benchmarks/proof.py [--quick] [--services 5000] [--endpoints 10] [--rounds 1] [--json FILE]

Each measurement is a process of its own: its processor seconds from the plan and the rules to the answer, without loading modules, and
what its memory grew by. The growth exponent compares a fifth of the size with the whole. Bars: 1.1 for the exponent.
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
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Plan
from narthex.testing.build import HOST, NODE, endpoint, endpoint_slice, plan, service
from narthex.trace.proof.prove import ProofOutcome, prove

_CHILD = "--child"
MODES = ("nftables", "iptables")


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


def measure(mode: str, services: int, each: int) -> Measured:
    """Prove in this process."""
    backend = BACKENDS[mode]
    desired = objects(services, each)
    rendered: Any = backend.render(desired)
    ruleset: Ruleset = rendered.ruleset() if mode == "nftables" else rendered.ruleset
    gc.collect()
    gc.disable()  # as `narthex check --prove`
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    report = prove(desired, ruleset, HOST, backend.deviations)
    seconds = time.process_time() - begin
    if report.outcome is not ProofOutcome.PROVED:
        raise RuntimeError(f"not proved: {report}")
    return Measured(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> int:
    """Measure and judge."""
    if sys.argv[1:2] == [_CHILD]:
        mode, services, each = sys.argv[2:5]
        sys.stdout.write(msgspec.json.encode(measure(mode, int(services), int(each))).decode())
        return 0
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=5_000)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--rounds", type=int, default=1)
    asked = options.parse_args()
    services = 500 if asked.quick else asked.services
    report = Report("proof", asked)
    size = f"{services:,} Services with {asked.endpoints} endpoints each"
    times = report.table(f"Proving the rules of {size}", unit="s")
    memory = report.table(f"Memory for the proof of {size}", unit="MiB")
    growth = report.table("Growth exponent of the time, from a fifth of the size", unit="")
    for mode in MODES:
        found = {
            count: [
                msgspec.json.decode(
                    run([sys.executable, __file__, _CHILD, mode, str(count), str(asked.endpoints)]), type=Measured
                )
                for _ in range(asked.rounds)
            ]
            for count in (services // 5, services)
        }
        whole, part = found[services], found[services // 5]
        times.row(mode, [each.seconds for each in whole], most=None if asked.quick else 20.0)
        memory.row(mode, [each.mebibytes for each in whole], most=None if asked.quick else 1024.0)
        exponents = [math.log(a.seconds / b.seconds, 5) for a, b in zip(whole, part, strict=True)]
        growth.row(mode, exponents, most=1.1)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
