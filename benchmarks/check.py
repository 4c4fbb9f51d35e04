"""Checking a node of 5,000 Services with 10 endpoints each in kube-proxy's iptables layout.

    python benchmarks/check.py [--quick] [--services 5000] [--endpoints 10] [--rounds 3] [--json FILE]

Each measurement is a process of its own: its processor seconds from the parsed objects and the text of the dump to the report, without
loading modules. The floor is parsing all rules, which a check has to read. Bars: 4 s, and eight times the floor.
"""

from __future__ import annotations

import sys
import time

import msgspec

from frame import big_dump
from frame.report import Report, parser
from narthex.linux.run import run
from narthex.model import EndpointPort, IPFamily
from narthex.netfilter.xtables.parse import read_rule
from narthex.proxy.plan.ir import Plan
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.trace.follow.views import LinkAddress
from narthex.trace.node.view import view_of_files
from narthex.trace.reports.check import check

_CHILD = "--child"
_OWN = "192.168.0.2"


class Measured(msgspec.Struct):
    """What one process saw."""

    floor: float
    seconds: float


def objects(services: int, each: int) -> Plan:
    """Return the plan of the cluster that the dump was made for."""
    ports = (EndpointPort(name="http", port=8080),)
    found = []
    for number in range(services):
        pods = (endpoint(big_dump.endpoint(number, which, each)) for which in range(each))
        found.append(service(f"shop/service-{number}", big_dump.cluster_ip(number)))
        found.append(endpoint_slice(f"shop/service-{number}", *pods, ports=ports))
    return plan(*found, cluster_cidrs=("10.128.0.0/9",), node_addresses=(_OWN,), node_port_addresses=None)


def measure(services: int, each: int) -> Measured:
    """Check in this process."""
    text = "\n".join(big_dump.save_lines(services * (2 + 3 * each), each)) + "\n"
    wanted = objects(services, each)
    begin = time.process_time()
    rules = [read_rule(line, IPFamily.IPV4) for line in text.split("\n") if line.startswith("-A ")]
    floor = time.process_time() - begin
    del rules
    begin = time.process_time()
    view = view_of_files([("save.txt", text)], "worker-a")
    view.addresses = (LinkAddress(_OWN, 24, "eth0"),)
    report = check(wanted, view, (_OWN,))
    seconds = time.process_time() - begin
    if report.status or report.frontends != services or report.endpoints != services * each:
        raise RuntimeError(f"not compared: {report.findings[:1]} {report.unknown[:1]}")
    return Measured(floor, seconds)


def main() -> int:
    """Measure and judge."""
    if sys.argv[1:2] == [_CHILD]:
        sys.stdout.write(msgspec.json.encode(measure(int(sys.argv[2]), int(sys.argv[3]))).decode())
        return 0
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=5_000)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    services, rounds = (500, 1) if asked.quick else (asked.services, asked.rounds)
    report = Report("check", asked)
    times = report.table(
        f"Checking {services:,} Services with {asked.endpoints} endpoints each", unit="s", floor="parsing all rules"
    )
    argv = [sys.executable, __file__, _CHILD, str(services), str(asked.endpoints)]
    found = [msgspec.json.decode(run(argv), type=Measured) for _ in range(rounds)]
    floor = times.row("parsing all rules", [each.floor for each in found])
    times.row("narthex check", [each.seconds for each in found], floor=floor, most_ratio=8.0, most=4.0)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
