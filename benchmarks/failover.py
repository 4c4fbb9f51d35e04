"""How long an address of a load balancer is without an answer: when its node dies, and when it leaves as planned.

    PYTHONPATH=src python benchmarks/failover.py [--rounds 10]

Nodes, a switch and a client are network namespaces; see `narthex.testing.segment`. Needs root.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from narthex.testing.load import until
from narthex.testing.segment import VIP, VIP_SIX, Segment, Stream

NODES = ("a", "b", "c")


def _again(segment: Segment, name: str) -> None:
    """Start one, and wait until all know each other. It stands back, the longer the more often it died."""
    segment.start(name)
    segment.ready()
    until(lambda: len(segment.holders()) == 1, "one holder")


def killed(segment: Segment, address: str, *, fresh: bool) -> float:
    """Seconds from the death of the node that answers to the first answer of another one to a request that was sent after it.
    `fresh`: the client has to find out for each request who has the address."""
    (holder,) = segment.holders()
    rest = [name for name in segment.processes if name != holder]
    with Stream(segment, address, pause=0.002, fresh=fresh) as stream:
        until(lambda: bool(stream.seen) and stream.seen[-1][1] == holder, "answers")
        dead = time.monotonic()
        segment.kill(holder)
        segment.cut(holder)
        until(lambda: stream.first_answer_after(dead, rest) is not None, "another node")
    segment.cut(holder, up=True)
    _again(segment, holder)
    return stream.first_answer_after(dead, rest) or 0.0


def left(segment: Segment, address: str, *, fresh: bool) -> tuple[int, int]:
    """Requests, and how many of them got no answer, while the node that answers ends as planned."""
    (holder,) = segment.holders()
    with Stream(segment, address, pause=0.002, fresh=fresh, wait=0.5) as stream:
        until(lambda: len(stream.seen) > 20, "answers")
        segment.end(holder)
        count = len(stream.seen)
        until(lambda: len(stream.seen) > count + 50, "more answers")
    _again(segment, holder)
    return len(stream.seen), sum(not name for _, name, _ in stream.seen)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    for address in (VIP, VIP_SIX):
        for fresh in (False, True):
            with tempfile.TemporaryDirectory() as folder, Segment(Path(folder), "nxf", NODES) as segment:
                segment.start()
                segment.steady()
                how = "asks who has it each time" if fresh else "remembers who has it"
                times = sorted(killed(segment, address, fresh=fresh) for _ in range(rounds))
                print(
                    f"{address}, client {how}: dead node: median {statistics.median(times):.2f} s, "
                    f"{times[0]:.2f} to {times[-1]:.2f} s",
                    flush=True,
                )
                counts = [left(segment, address, fresh=fresh) for _ in range(max(1, rounds // 3))]
                total, lost = (sum(each[place] for each in counts) for place in (0, 1))
                print(f"{address}, client {how}: planned end: {lost} of {total} requests lost", flush=True)


if __name__ == "__main__":
    main()
