"""Connect latency through a Service by the number of Services, beside direct routing over the same links.

    sudo python benchmarks/connect.py [--quick] [--mode MODE ...] [--connections 3000] [--json FILE]

A client, a node and an endpoint in namespaces. The node holds the rules of so many Services; the client connects to the last of
them and to its endpoint directly, in turns, so that both ways meet the same machine. Only `connect` is timed: the handshake
over two links, and what the node's rules add. Bars: in mode nftables the median within 10 us of the direct way, at any size; and
flat, that is at the largest size within 10 us of the smallest. Needs root. Works in network namespaces of its own.
"""

from __future__ import annotations

import gc
import random
import socket
import sys
import time
from typing import Any

from frame.cluster import LAST, TARGETS, here
from frame.path import CALLER, ENDPOINTS, SHORT, leading
from frame.report import Report, Row, Table, parser
from narthex.linux.namespaces import in_namespace

SIZES = {
    "nftables": (1, 100, 1000, 5000, 20_000),
    "iptables-nft": (1, 100, 1000, 5000),
    "iptables-legacy": (1, 100, 1000, 5000),
    "userspace": (1, 100, 1000),
    "ipvs": (1, 100, 1000, 5000),
}
QUICK_SIZES = (1, 1000)
BAR_US = 10.0
_WARM = 200


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--mode", action="append", choices=TARGETS)
    options.add_argument("--connections", type=int, default=0)
    asked = options.parse_args()
    count = asked.connections or (1000 if asked.quick else 3000)
    report = Report("connect", asked)
    modes = asked.mode or (["nftables"] if asked.quick else here())
    for mode in modes:
        table = report.table(f"Connect, {mode}", unit="us", floor="direct routing", axis="Services")
        more = [(size, _size(table, mode, size, count)) for size in (QUICK_SIZES if asked.quick else SIZES[mode])]
        beside = report.table(f"What a Service adds to a connect, {mode}", unit="us", axis="Services")
        bar = BAR_US if mode == "nftables" else None
        for size, seconds in more:
            beside.row(f"{size:,} Services: median of differences", seconds, most=bar, size=size, series="added")
        beside.row("the largest more than the smallest", more[-1][1] - more[0][1], most=bar)
    return report.end()


def _size(table: Table, mode: str, services: int, count: int) -> float:
    """Rows of one size; microseconds that the Service's way takes more."""
    with leading(mode, services, SHORT):
        direct, through = _in_turns((ENDPOINTS[0], SHORT), (LAST, 80), count)
    floor = table.row(f"{services:,} Services, direct", direct, size=services, series="direct")
    row: Row = table.row(f"{services:,} Services, through one", through, floor=floor, size=services, series="through")
    return row.median - floor.median


def _in_turns(direct: tuple[str, int], through: tuple[str, int], count: int) -> tuple[list[float], list[float]]:
    """Microseconds of connects, by both ways."""
    times: dict[Any, list[float]] = {direct: [], through: []}
    order = random.Random(1)
    with in_namespace(CALLER):
        gc.disable()
        for turn in range(count + _WARM):
            ways = [direct, through]
            order.shuffle(ways)
            for way in ways:
                sock = socket.socket()
                sock.settimeout(30)
                start = time.perf_counter()
                sock.connect(way)
                took = time.perf_counter() - start
                # To its end, so that the other side has nothing to do when the next one comes.
                while sock.recv(100):
                    pass
                sock.close()
                if turn >= _WARM:
                    times[way].append(took * 1e6)
        gc.enable()
    return times[direct], times[through]


if __name__ == "__main__":
    sys.exit(main())
