"""One endpoint of a big cluster changes: from the event to the kernel's commit, beside the bare tools.

    sudo python benchmarks/one_change.py [--quick] [--services 5000] [--endpoints 10] [--changes 300] [--mode MODE ...]

All of the way is measured: Store, plan, render, diff, apply, as the proxy's loop does it (`FamilySync`), IPv4, at the whole
load. The floor is the same change written by hand for the kernel's own tool: `nft -f` of the elements, `iptables-restore` of
the lines; both include the start of that process. Bars: nftables p50 under 1 ms and p99 under 10 ms, iptables under
500 ms with only the touched chains rewritten. Needs root. Works in network namespaces of its own and removes them.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import msgspec

from frame.cluster import fresh, slice_of, store_of, sync_of
from frame.report import Report, parser
from narthex.linux.run import run
from narthex.model import Upsert
from narthex.netfilter.nft.print import element_text
from narthex.proxy.backends.iptables.script import restore_blocks
from narthex.proxy.program.report import written

BARS = {"nftables": (1.0, 10.0), "iptables-nft": (500.0, 500.0), "iptables-legacy": (500.0, 500.0)}
"""p50 and p99 in ms."""
RATIOS = {"nftables": 1.0, "iptables-nft": 1.3, "iptables-legacy": 1.3}
"""To the bare tool, whose process has to start."""


class Measured(msgspec.Struct, kw_only=True):
    """What was measured of one mode; seconds."""

    first: float
    changes: list[float]
    phases: dict[str, list[float]]
    floor: list[float]
    wrote: str


def measure(mode: str, services: int, endpoints: int, changes: int) -> Measured:
    """Load everything, then change one endpoint again and again: one more, one less."""
    with fresh("one") as namespace:
        return _measure(mode, namespace, services, endpoints, changes)


def _measure(mode: str, namespace: str, services: int, endpoints: int, changes: int) -> Measured:
    sync, _ = sync_of(mode, namespace)
    store = store_of(services, endpoints)
    gc.disable()
    start = time.perf_counter()
    sync.sync(store.snapshot, store.take_changed())
    found = Measured(first=time.perf_counter() - start, changes=[], phases={}, floor=[], wrote="")
    # As a proxy that has started does: what it holds now is not looked through at every collection.
    gc.freeze()
    gc.enable()
    for turn in range(changes):
        number = turn // 2 * 7 % services
        event = Upsert(slice_of(number, endpoints + (turn + 1) % 2))
        start = time.perf_counter()
        store.apply(event)
        done = sync.sync(store.snapshot, store.take_changed())
        found.changes.append(time.perf_counter() - start)
        assert done.wrote, "the change wrote nothing"
        found.wrote = written(done.changes)
        for phase, seconds in done.seconds.items():
            found.phases.setdefault(phase, []).append(seconds)
    found.floor = [_floor(mode, namespace, done.changes) for _ in range(min(20, changes))]
    gc.unfreeze()
    return found


def _floor(mode: str, namespace: str, changes: Any) -> float:
    """The last change once more, by the kernel's own tool: written beforehand, so only the tool is measured."""
    if mode == "nftables":
        script = elements_again(changes)
        argv = ["nft", "-f", "-"]
    else:
        script = "".join(restore_blocks(changes, None))
        argv = [f"iptables-{mode.partition('-')[2]}-restore", "--noflush", "--counters", "-w", "5"]
    start = time.perf_counter()
    run(argv, stdin=script, namespace=namespace)
    return time.perf_counter() - start


def elements_again(changes: Any) -> str:
    """The same elements taken away and put back, so that it can be done again and again."""
    lines = []
    for name, elements in changes.additions.items():
        texts = ", ".join(element_text(key, data) for key, data in elements.items())
        lines.append(f"delete element ip narthex {name} {{ {texts} }}")
        lines.append(f"add element ip narthex {name} {{ {texts} }}")
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure and print; 1 when a bar is missed."""
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=0)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--changes", type=int, default=300)
    options.add_argument("--mode", action="append", choices=BARS)
    asked = options.parse_args()
    services = asked.services or (200 if asked.quick else 5000)
    report = Report("one_change", asked)
    for mode in asked.mode or BARS:
        count = asked.changes if mode == "nftables" else asked.changes // 6
        found = measure(mode, services, asked.endpoints, count)
        title = f"One endpoint of {services:,} Services x {asked.endpoints} changes, {mode}"
        table = report.table(title, unit="ms", floor="the bare tool with the same lines")
        floor = table.row("bare tool", [each * 1e3 for each in found.floor])
        ordered = sorted(each * 1e3 for each in found.changes)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        most, most_99 = BARS[mode]
        table.row("from event to commit", ordered, floor=floor, most=most, most_ratio=RATIOS[mode], note=found.wrote)
        table.row("99th percentile", p99, most=most_99)
        for phase, seconds in found.phases.items():
            table.row(f"of that, {phase}", [each * 1e3 for each in seconds])
        report.table(f"First load before that, {mode}", unit="s").row("plan, render, diff, apply", found.first)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
