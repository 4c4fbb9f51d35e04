"""Proving one change of a large cluster before it is written, as `narthex proxy --verify` does.

    python benchmarks/proof_change.py [--quick] [--services 5000] [--endpoints 10] [--rounds 20] [--json FILE]

Each measurement is the processor time of one proof: from the changes and the plan to the verdict, with the application of the changes to
the known rules. Each mode is a process of its own. Bar: 20 ms.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from frame import big_dump
from frame.report import Report, parser
from narthex.linux.run import run
from narthex.model import AnyObject, Delete, EndpointPort, Event, IPFamily, Store, Upsert
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import NodeConfig, Planner
from narthex.runtime.process import without_collections
from narthex.testing.build import HOST, NODE, endpoint, endpoint_slice, node, service
from narthex.trace.proof.incremental import IncrementalProof

_CHILD = "--child"
MODES = ("nftables", "iptables")
_LONGEST = 3600.0
"""Seconds for all measurements of a mode on a slow machine."""
_PORTS = (EndpointPort(name="http", port=8080),)


def objects(number: int, each: int, count: int, node_port: int = 0) -> tuple[AnyObject, AnyObject]:
    """Return a Service with `count` of its `each` endpoints, of which the first is on this node."""
    nodes = (NODE if which == 0 else "worker-b" for which in range(count))
    pods = (endpoint(big_dump.endpoint(number, at, each), node=name) for at, name in enumerate(nodes))
    name = f"shop/service-{number}"
    made = service(name, big_dump.cluster_ip(number), node_port=node_port)
    return made, endpoint_slice(name, *pods, ports=_PORTS)


class Cluster:
    """The rules of a mode, and their proof."""

    def __init__(self, mode: str) -> None:
        self._backend: Any = BACKENDS[mode]
        self._store = Store()
        self._planner = Planner(NodeConfig(node_name=NODE, cluster_cidrs=("10.128.0.0/9",)), IPFamily.IPV4)
        self._proof: IncrementalProof[Any, Any] = IncrementalProof(self._backend, lambda: HOST)
        self._rules: Any = None

    def change(self, *events: Event) -> tuple[float, bool]:
        """Prove one change. Return the processor seconds, and whether all packets were looked at."""
        for event in events:
            self._store.apply(event)
        plan = self._planner.plan(self._store.snapshot, self._store.take_changed())
        want, changes = self._backend.advance(self._rules, plan)
        begin = time.process_time()
        with without_collections():
            verdict = self._proof.verify(self._rules, changes, want, plan)
        self._proof.written()
        seconds = time.process_time() - begin
        if verdict.refusal:
            raise RuntimeError(f"refused: {verdict.refusal}")
        self._rules = want
        return seconds, verdict.whole


def changes(services: int, each: int, rounds: int) -> Iterator[tuple[str, tuple[Event, ...]]]:
    """Yield changes with their names."""
    for at in range(rounds):
        number = (at * 37) % services
        made, slices = objects(services + at, each, each)
        yield "an endpoint less", (Upsert(objects(number, each, each - 1)[1]),)
        yield "an endpoint more", (Upsert(objects(number, each, each)[1]),)
        yield "a new Service", (Upsert(made), Upsert(slices))
        yield "a Service less", (Delete("Service", made.key), Delete("EndpointSlice", slices.key))
        yield "a new node port", (Upsert(objects(number, each, each, 30_000 + number % 2000)[0]),)
        yield "a node port less", (Upsert(objects(number, each, each)[0]),)


def measure(mode: str, services: int, each: int, rounds: int) -> Mapping[str, list[float]]:
    """Measure in this process."""
    cluster = Cluster(mode)
    gc.disable()
    begin = [Upsert(obj) for number in range(services) for obj in objects(number, each, each)]
    # The rules of some kinds are shared by Services, and the first of a kind may need a proof of the whole.
    first = cluster.change(Upsert(node()), *begin)[0]
    gc.collect()
    gc.freeze()
    gc.enable()
    found: dict[str, list[float]] = {}
    for name, events in changes(services, each, rounds):
        seconds, whole = cluster.change(*events)
        if whole:
            raise RuntimeError(f"{name}: all packets were looked at")
        found.setdefault(name, []).append(seconds * 1000)
    return {"the whole, at the start": [first * 1000], **found}


def main() -> int:
    """Measure and judge."""
    if sys.argv[1:2] == [_CHILD]:
        mode, services, each, rounds = sys.argv[2:6]
        sys.stdout.write(msgspec.json.encode(measure(mode, int(services), int(each), int(rounds))).decode())
        return 0
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=5_000)
    options.add_argument("--endpoints", type=int, default=10)
    options.add_argument("--rounds", type=int, default=20)
    asked = options.parse_args()
    services = 500 if asked.quick else asked.services
    report = Report("proof_change", asked)
    title = f"Proving one change of {services:,} Services with {asked.endpoints} endpoints each"
    for mode in MODES:
        argv = [sys.executable, __file__, _CHILD, mode, str(services), str(asked.endpoints), str(asked.rounds)]
        table = report.table(f"{title}, mode {mode}", unit="ms")
        for name, values in msgspec.json.decode(run(argv, timeout=_LONGEST), type=dict[str, list[float]]).items():
            table.row(name, values, most=None if name.startswith("the whole") else 20.0)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
