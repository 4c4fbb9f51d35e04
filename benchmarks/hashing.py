"""Consistent hashing: time of a lookup table, evenness, and clients that move, as in section 5.3 of the Maglev paper (NSDI 2016).

    python benchmarks/hashing.py [--quick] [--rounds 5] [--json FILE]

Needs no root. Evenness is the largest share of a table relative to the mean; the paper calls a table of 65,537 slots for 1,000
endpoints even within 2 %, and the last size is that one. Disruption is the share of slots with another endpoint after some endpoints
have left, in units of the share that had to move. Bars: a table of 10 endpoints in 5 ms, of 655 in 0.6 s; evenness 1.02; disruption 1.6.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from frame.report import Report, parser
from narthex.proxy.plan.ir import Endpoint
from narthex.proxy.plan.maglev import lookup_table

SIZES = ((10, 5.0), (20, 5.0), (100, 100.0), (320, 100.0), (655, 600.0), (1000, 600.0))
REFERENCE = "the paper, 1,000 endpoints in 65,537 slots: 1.02"
LEAVING = (1, 5, 10)
DISRUPTION = 1.8


def endpoints(count: int, start: int) -> tuple[Endpoint, ...]:
    """Return endpoints that no other round has."""
    return tuple(Endpoint(f"10.{start % 250}.{number // 250}.{number % 250}", 8080) for number in range(count))


def main() -> int:
    """Compute tables, and print."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    rounds = 2 if asked.quick else asked.rounds
    report = Report("hashing", asked)
    times = report.table("One lookup table", unit="ms")
    even = report.table(f"Largest share, relative to the mean ({REFERENCE})", unit="x")
    moved = report.table("Slots that move, relative to those that must", unit="x")
    for count, most in SIZES:
        seconds, shares, disruption = [], [], {}
        for number in range(rounds):
            ends = endpoints(count, number)
            start = time.perf_counter()
            table = lookup_table(ends)
            seconds.append((time.perf_counter() - start) * 1000)
            shares.append(max(Counter(table).values()) * count / len(table))
            for leaving in LEAVING:
                if leaving * 10 > count:
                    continue
                after = lookup_table(ends[leaving:])
                if len(after) == len(table):
                    gone = sum(map(Counter(table).__getitem__, ends[:leaving]))
                    apart = sum(one != other for one, other in zip(table, after, strict=True))
                    disruption.setdefault(leaving, []).append(apart / gone)
        label = f"{count} endpoints, {len(table):,} slots"
        times.row(label, seconds, most=most)
        even.row(label, shares, most=1.02)
        for leaving, ratios in disruption.items():
            moved.row(f"{label}, {leaving} leave", ratios, **({"most": DISRUPTION} if count <= 20 else {}))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
