"""One endpoint of a big cluster changes: from the event to the kernel's commit, beside the bare tools.

    sudo python benchmarks/one_change.py [--services 5000] [--endpoints 10] [--changes 300] [--mode MODE ...]

All of the way is measured: Store, plan, render, diff, apply, as the proxy's loop does it (`FamilySync`), IPv4, at the whole
load. The floor is the same change written by hand for the kernel's own tool: `nft -f` of the elements, `iptables-restore` of
the lines; both include the start of that process. Bars: nftables p50 under 1 ms and p99 under 10 ms, iptables under
500 ms with only the touched chains rewritten. Needs root. Works in network namespaces of its own and removes them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from narthex.apps.proxy.sync import FamilySync
from narthex.apps.proxy.written import written
from narthex.backends import BACKENDS
from narthex.backends.iptables_script import restore_input
from narthex.host import netns
from narthex.host.clock import SystemClock
from narthex.host.nft import NftablesTarget
from narthex.host.run import run
from narthex.host.xtables import IptablesTarget
from narthex.model.events import Synced, Upsert
from narthex.model.net import IPFamily
from narthex.model.objects import EndpointSlice
from narthex.netfilter.nft_print import element_text
from narthex.plan.planner import Planner
from narthex.state.store import Store
from narthex.testing.build import CONFIG, endpoint, endpoint_slice, node, service

FAMILY = IPFamily.IPV4
TARGETS: dict[str, Callable[[str], Any]] = {
    "nftables": lambda namespace: NftablesTarget(FAMILY, namespace),
    "iptables-nft": lambda namespace: IptablesTarget(FAMILY, namespace),
    "iptables-legacy": lambda namespace: IptablesTarget(FAMILY, namespace, legacy=True),
}
BARS = {"nftables": (1.0, 10.0), "iptables-nft": (500.0, 500.0), "iptables-legacy": (500.0, 500.0)}
"""p50 and p99 in ms."""


class Row(msgspec.Struct, kw_only=True):
    """What was measured of one mode; seconds."""

    mode: str
    first: float
    changes: list[float]
    phases: dict[str, list[float]]
    floor: list[float]
    wrote: str


def slice_of(number: int, endpoints: int) -> EndpointSlice:
    """The endpoints of one Service; no two Services share one."""
    first = number * 64
    ends = (first + index for index in range(endpoints))
    made = [endpoint(f"10.{64 + (end >> 16)}.{end >> 8 & 255}.{end & 255}") for end in ends]
    return endpoint_slice(f"shop/service-{number}", *made, port=8080)


def measure(mode: str, services: int, endpoints: int, changes: int) -> Row:
    """Load everything, then change one endpoint again and again: one more, one less."""
    namespace = f"nxbench-{os.getpid()}-one"
    netns.create(namespace)
    try:
        return _measure(mode, namespace, services, endpoints, changes)
    finally:
        netns.delete(namespace)


def _measure(mode: str, namespace: str, services: int, endpoints: int, changes: int) -> Row:
    target, backend = TARGETS[mode](namespace), BACKENDS[mode.partition("-")[0]]
    sync: FamilySync[Any, Any] = FamilySync(FAMILY, Planner(CONFIG, FAMILY), backend, target, SystemClock())
    store = Store()
    store.apply(Upsert(node()))
    for number in range(services):
        store.apply(Upsert(service(f"shop/service-{number}", f"10.110.{number >> 8}.{number & 255}")))
        store.apply(Upsert(slice_of(number, endpoints)))
    store.apply(Synced())
    gc.disable()
    start = time.perf_counter()
    sync.sync(store.snapshot, store.take_changed())
    row = Row(mode=mode, first=time.perf_counter() - start, changes=[], phases={}, floor=[], wrote="")
    # As a proxy that has started does: what it holds now is not looked through at every collection.
    gc.freeze()
    gc.enable()
    for turn in range(changes):
        number = turn // 2 * 7 % services
        event = Upsert(slice_of(number, endpoints + (turn + 1) % 2))
        start = time.perf_counter()
        store.apply(event)
        done = sync.sync(store.snapshot, store.take_changed())
        row.changes.append(time.perf_counter() - start)
        assert done.wrote, "the change wrote nothing"
        row.wrote = written(done.changes)
        for phase, seconds in done.seconds.items():
            row.phases.setdefault(phase, []).append(seconds)
    row.floor = [_floor(mode, namespace, done.changes) for _ in range(min(20, changes))]
    gc.unfreeze()
    return row


def _floor(mode: str, namespace: str, changes: Any) -> float:
    """The last change once more, by the kernel's own tool: written beforehand, so only the tool is measured."""
    if mode == "nftables":
        script = _elements(changes)
        argv = ["nft", "-f", "-"]
    else:
        script = restore_input(changes, None)
        argv = [f"iptables-{mode.partition('-')[2]}-restore", "--noflush", "--counters", "-w", "5"]
    start = time.perf_counter()
    run(argv, stdin=script, namespace=namespace)
    return time.perf_counter() - start


def _elements(changes: Any) -> str:
    """The same elements taken away and put back, so that it can be done again and again."""
    lines = []
    for name, elements in changes.additions.items():
        texts = ", ".join(element_text(key, data) for key, data in elements.items())
        lines.append(f"delete element ip narthex {name} {{ {texts} }}")
        lines.append(f"add element ip narthex {name} {{ {texts} }}")
    return "\n".join([*lines, ""])


def ms(values: list[float], percent: int) -> float:
    """A percentile in milliseconds."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1e3


def show(row: Row) -> bool:
    """Print one line and the phases below; whether the bars are met."""
    p50, p99 = ms(row.changes, 50), ms(row.changes, 99)
    bars = BARS[row.mode]
    met = p50 < bars[0] and p99 < bars[1]
    print(
        f"{row.mode:16} {row.first:8.2f} s {p50:9.3f} {p99:9.3f} {max(row.changes) * 1e3:9.3f} "
        f"{bars[0]:6g}/{bars[1]:<5g} {'met' if met else 'MISSED':6} {ms(row.floor, 50):9.3f}   {row.wrote}"
    )
    phases = "  ".join(f"{phase} {ms(seconds, 50):.3f}" for phase, seconds in row.phases.items())
    print(f"{'':16} p50 by phase, ms: {phases}")
    return met


def main() -> int:
    """Measure and print; 1 when a bar is missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--services", type=int, default=5000)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--changes", type=int, default=300)
    options.add_argument("--mode", action="append", choices=TARGETS)
    asked = options.parse_args()
    print(
        f"{asked.services} Services x {asked.endpoints} endpoints, {asked.changes} changes of one endpoint; times in ms"
    )
    print(f"{'':16} {'first':>10} {'p50':>9} {'p99':>9} {'worst':>9} {'bar':^12} {'':6} {'bare tool':>9}   last change")
    met = [
        show(
            measure(mode, asked.services, asked.endpoints, asked.changes if mode == "nftables" else asked.changes // 6)
        )
        for mode in asked.mode or TARGETS
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
