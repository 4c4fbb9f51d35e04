"""Bytes through a Service beside the direct path over the same links, in every mode.

    sudo python benchmarks/throughput.py [--quick] [--mode MODE ...] [--services 1000] [--megabytes 4000] [--rounds 5] [--json FILE]

One TCP stream from a client through a node to an endpoint, in turns with one that goes directly. Rules cost a packet of an
open connection nothing but the connection table's look-up, so the bar is a ratio of 0.8, which leaves room for chance, in the kernel's modes; in mode userspace
every byte passes a process. Needs root. Works in network namespaces of its own.
"""

from __future__ import annotations

import sys

from frame.cluster import LAST, TARGETS, here
from frame.path import BULK, ENDPOINTS, bulk, leading
from frame.report import Report, parser

RATIO = 0.8


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--mode", action="append", choices=TARGETS)
    options.add_argument("--services", type=int, default=0)
    options.add_argument("--megabytes", type=int, default=0)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    services = asked.services or (100 if asked.quick else 1000)
    megabytes = asked.megabytes or (1000 if asked.quick else 4000)
    report = Report("throughput", asked)
    table = report.table(f"One TCP stream, {services:,} Services", unit="MB/s", floor="direct routing")
    for mode in asked.mode or here():
        direct, through = _mode(mode, services, megabytes, asked.rounds)
        floor = table.row(f"{mode}: direct", direct)
        bar = RATIO if mode != "userspace" else None
        table.row(f"{mode}: through a Service", through, floor=floor, least_ratio=bar)
    return report.end()


def _mode(mode: str, services: int, megabytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Megabytes a second, direct and through a Service, in turns."""
    direct, through = [], []
    with leading(mode, services, BULK):
        for _ in range(rounds):
            direct.append(bulk((ENDPOINTS[0], BULK), megabytes))
            through.append(bulk((LAST, 80), megabytes))
    return direct, through


if __name__ == "__main__":
    sys.exit(main())
