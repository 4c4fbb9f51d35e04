"""How long an address of a load balancer is without an answer: when its node dies, and when it leaves as planned.

    sudo python benchmarks/failover.py [--quick] [--rounds 10] [--json FILE]

Nodes, a switch and a client are network namespaces; see `narthex.testing.kernel.segment`. Needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from frame.report import Report, parser
from narthex.testing.kernel.segment import VIP, VIP_SIX, EthernetSegment, RequestStream
from narthex.testing.load import until

NODES = ("a", "b", "c")


def _again(segment: EthernetSegment, name: str) -> None:
    """Start one, and wait until all know each other. It stands back, the longer the more often it died."""
    segment.start(name)
    segment.ready()
    until(lambda: len(segment.holders()) == 1, "one holder")


def killed(segment: EthernetSegment, address: str, *, fresh: bool) -> float:
    """Seconds from the death of the node that answers to the first answer of another one to a request that was sent after it.
    `fresh`: the client has to find out for each request who has the address."""
    (holder,) = segment.holders()
    rest = [name for name in segment.processes if name != holder]
    with RequestStream(segment, address, pause=0.002, fresh=fresh) as stream:
        until(lambda: bool(stream.seen) and stream.seen[-1][1] == holder, "answers")
        dead = time.monotonic()
        segment.kill(holder)
        segment.cut(holder)
        until(lambda: stream.first_answer_after(dead, rest) is not None, "another node")
    segment.cut(holder, up=True)
    _again(segment, holder)
    return stream.first_answer_after(dead, rest) or 0.0


def left(segment: EthernetSegment, address: str, *, fresh: bool) -> tuple[int, int]:
    """Requests, and how many of them got no answer, while the node that answers ends as planned."""
    (holder,) = segment.holders()
    with RequestStream(segment, address, pause=0.002, fresh=fresh, wait=0.5) as stream:
        until(lambda: len(stream.seen) > 20, "answers")
        segment.end(holder)
        count = len(stream.seen)
        until(lambda: len(stream.seen) > count + 50, "more answers")
    _again(segment, holder)
    return len(stream.seen), sum(not name for _, name, _ in stream.seen)


def main() -> int:
    """Measure and print; 1 when a request is lost at a planned end."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=0)
    asked = options.parse_args()
    rounds = asked.rounds or (3 if asked.quick else 10)
    report = Report("failover", asked)
    deaths = report.table("A node dies: until another answers for its address", unit="s")
    ends = report.table("A node ends as planned: requests without an answer", unit="requests")
    for address in (VIP, VIP_SIX):
        for fresh in (False, True):
            with tempfile.TemporaryDirectory() as folder, EthernetSegment(Path(folder), "nxf", NODES) as segment:
                segment.start()
                segment.steady()
                how = f"{address}, {'asks each time' if fresh else 'remembers'}"
                deaths.row(how, [killed(segment, address, fresh=fresh) for _ in range(rounds)], most=1.0)
                counts = [left(segment, address, fresh=fresh) for _ in range(max(1, rounds // 3))]
                total, lost = (sum(each[place] for each in counts) for place in (0, 1))
                ends.row(how, lost, most=0, note=f"of {total:,}")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
