"""What it costs to read the kernel's counters of new connections, and to answer a scrape of /metrics with them.

    sudo python benchmarks/count_connections.py [--services 5000] [--endpoints 10] [--mode MODE ...]

The counters are part of the rules as they stand, so packets pay nothing more. Reading happens when somebody asks, at most a
twentieth of the time, and never in the loop that syncs. Needs root. Works in a network namespace of its own and removes it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from narthex.apps.proxy.connections import Connections
from narthex.apps.proxy.metrics import Metrics
from narthex.backends import BACKENDS
from narthex.host import netns
from narthex.host.clock import SystemClock
from narthex.host.counters import reader_for
from narthex.host.targets import target_for
from narthex.model.net import IPFamily
from narthex.sources.proxy_configuration import OwnConfiguration
from narthex.testing.build import endpoint, endpoint_slice, plan, service

FAMILY = IPFamily.IPV4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--services", type=int, default=5000)
    parser.add_argument("--endpoints", type=int, default=10)
    parser.add_argument("--mode", nargs="+", default=["nftables", "iptables"])
    told = parser.parse_args()
    objects = []
    for number in range(told.services):
        name = f"shop/s{number}"
        ends = [endpoint(f"10.{64 + i // 250}.{number % 250}.{1 + i % 250}") for i in range(told.endpoints)]
        objects += [
            service(name, f"10.{110 + number // 60000}.{number // 250 % 240}.{1 + number % 250}"),
            endpoint_slice(name, *ends),
        ]
    made = plan(*objects)
    print(f"{told.services} Services of {told.endpoints}, {FAMILY.label}")
    for mode in told.mode:
        measure(mode, made)


def measure(mode, made) -> None:
    namespace = f"nxbench-{os.getpid()}"
    netns.create(namespace)
    try:
        backend = BACKENDS[mode]
        target_for(mode, FAMILY, namespace).apply(backend.diff(None, backend.render(made)))
        reader = reader_for(mode, FAMILY, namespace)
        assert reader is not None
        for endpoints in (False, True):
            count = len(list(reader(made, endpoints)))
            seconds = timed(lambda: list(reader(made, endpoints)), 5)  # noqa: B023 - called at once
            print(f"{mode:9} {count} counters: {seconds * 1000:.0f} ms a reading")
        for series in (10_000, 1_000_000):
            own = OwnConfiguration(connection_series=series)
            connections = Connections({FAMILY: reader}, lambda: [made], SystemClock(), own)
            metrics = Metrics(mode, (connections,))
            connections.look()
            size = len(metrics.exposition())
            seconds = timed(metrics.exposition, 3)
            print(f"{'':9} connectionSeries {series}: a scrape of {size / 1e6:.1f} MB takes {seconds * 1000:.0f} ms")
    finally:
        netns.delete(namespace)


def timed(work, times: int) -> float:
    """The median of some runs, in seconds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
