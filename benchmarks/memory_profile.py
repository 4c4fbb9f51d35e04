"""What a proxy's memory goes to: bytes for each Service and for each endpoint, table by table.

    python benchmarks/memory_profile.py [--quick] [--services 2000] [--json FILE]

Objects come as JSON and go through all that a node proxy keeps of them; after each station the interpreter's own account of
memory is read. That is done with 1 endpoint for each Service and with 11: what is between is ten endpoints' worth, and what is left
of the first is the Service's. No kernel and no rights are needed. Bars: what 5,000 Services x 10 hold by this account, and that
an endpoint costs no more than so many bytes.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable

import msgspec

from frame.report import Report, parser
from frame.server import endpoint_slice, service
from narthex.kube.watch import ListCache
from narthex.lab.encode import encode
from narthex.model import IPFamily, Store, Synced, Upsert
from narthex.model.decode.objects import shape_of
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import Planner
from narthex.testing.build import CONFIG, node

MORE = 10
"""Endpoints by which the two sizes differ."""
MOST_BYTES_OF_AN_ENDPOINT = 1000.0
MOST_MB = 110.0
"""At 5,000 x 10, in mode nftables."""
STATIONS = {
    "objects": "objects of the lists, by name",
    "store": "the Store's tables",
    "plan": "decisions, and who claims what",
    "nftables": "rules of mode nftables",
    "iptables": "rules of mode iptables",
}


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--services", type=int, default=0)
    asked = options.parse_args()
    services = asked.services or (500 if asked.quick else 2000)
    report = Report("memory_profile", asked)
    held(services, 1)  # What is there once, such as modules, layouts and the table of names, is nobody's.
    one, many = held(services, 1), held(services, 1 + MORE)
    of_endpoint = {name: (many[name] - one[name]) / services / MORE for name in STATIONS}
    of_service = {name: one[name] / services - of_endpoint[name] for name in STATIONS}
    for what, figures, most in (
        ("endpoint", of_endpoint, MOST_BYTES_OF_AN_ENDPOINT),
        ("Service with one port", of_service, None),
    ):
        table = report.table(f"Memory of each {what}, by table; {services:,} Services", unit="bytes")
        for name, words in STATIONS.items():
            table.row(words, figures[name])
        table.row("all of these but iptables", sum(figures.values()) - figures["iptables"], most=most)
    table = report.table("Memory of all Services and endpoints, mode nftables, on paper", unit="MB", axis="endpoints")
    for count, each in ((5000, 10), (44_000, 1), (50_000, 2), (10_000, 100)):
        sizes = [of_service[name] * count + of_endpoint[name] * count * each for name in STATIONS if name != "iptables"]
        most = MOST_MB if (count, each) == (5000, 10) else None
        table.row(f"{count:,} x {each}", sum(sizes) / 1e6, most=most, size=float(count * each), series="memory")
    return report.end()


def held(services: int, endpoints: int) -> dict[str, float]:
    """Bytes that each station keeps."""
    texts = {
        "Service": msgspec.json.encode([service(number) for number in range(services)]),
        "EndpointSlice": msgspec.json.encode([endpoint_slice(number, endpoints) for number in range(services)]),
        "Node": msgspec.json.encode([encode(node())]),
    }
    lists = {kind: ListCache(kind) for kind in texts}
    store, planner = Store(), Planner(CONFIG, IPFamily.IPV4)
    kept: list[object] = []

    def listed() -> None:
        for kind, text in texts.items():
            for raw in msgspec.json.decode(text, type=list[shape_of(kind)]):  # type: ignore[misc]
                lists[kind].put(raw)

    def stored() -> None:
        objects = (each for kind in texts for each in lists[kind].objects)
        store.apply_all([*map(Upsert, objects), Synced()])
        store.take_changed()

    def planned() -> None:
        kept.append(planner.plan(store.snapshot))

    def rendered(mode: str) -> Callable[[], None]:
        def render() -> None:
            backend = BACKENDS[mode]
            rules, _ = backend.advance(None, kept[0])
            kept.append(rules)

        return render

    steps = (listed, stored, planned, rendered("nftables"), rendered("iptables"))
    found = {}
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for name, step in zip(STATIONS, steps, strict=True):
        step()
        gc.collect()
        now = tracemalloc.get_traced_memory()[0]
        found[name], before = float(now - before), now
    tracemalloc.stop()
    return found


if __name__ == "__main__":
    sys.exit(main())
