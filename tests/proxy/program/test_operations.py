"""One endpoint changes: what a proxy does then is the same in a small cluster and in a big one.

Counted are the steps of the interpreter, which see every loop of ours, and the memory taken meanwhile, which sees what C
makes of whole tables. Seconds are not looked at.
"""

import sys
import tracemalloc

import msgspec
import pytest

from narthex.kube.messages import DeadlineReached, LinesReceived, ResponseOpened
from narthex.kube.resources import ENDPOINT_SLICES
from narthex.kube.watch import Watch
from narthex.lab.encode import encode
from narthex.model.net import ConntrackFlow, IPFamily, Protocol
from narthex.model.store import Synced, Upsert
from narthex.netfilter.netlink.conntrack import ConntrackEntry
from narthex.netfilter.netlink.elements import encoder, key_encoder
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.base import Target
from narthex.proxy.backends.iptables.script import restore_blocks
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.flows import StaleFlowRemover
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import FamilySync
from narthex.testing.build import CONFIG, NODE, endpoint, endpoint_slice, node, service
from narthex.testing.fakes import FakeClock

V4 = IPFamily.IPV4
SMALL, BIG = {"nftables": 100, "iptables": 400}, 10_000
"""Above 1,000 endpoints rules of iptables have no comments, which are work, too."""
SPARE_BYTES = 40_000
"""How much more memory a big cluster may take for a moment: its tables are a level or two deeper. One list of all its
Services alone is twice that."""


class Inbox:
    """What is put into it comes out at the next turn."""

    def __init__(self, events):
        self.events, self.problems = events, ()

    def take(self):
        events, self.events = self.events, []
        return events


class Written(Target):
    """A Target that writes down what a kernel would be sent."""

    def __init__(self, mode):
        self.mode, self.sent = mode, []

    def read(self):
        return None

    def apply(self, changes):
        if changes.replace:
            return
        self.sent = (
            self._elements(changes) if self.mode == "nftables" else ["".join(restore_blocks(changes, in_pieces=True))]
        )

    def _elements(self, changes):
        assert changes.elements_only
        gone = [key_encoder(changes.declarations[name], V4)(some.items()) for name, some in changes.deletions.items()]
        come = [encoder(changes.declarations[name], V4)(some.items()) for name, some in changes.additions.items()]
        return [one for some in (*gone, *come) for one in some]


def web(number):
    return service(f"shop/web-{number}", f"10.110.{number >> 8}.{number & 255}")


def web_slice(number, count):
    ends = [
        endpoint(f"10.{64 + (number >> 12)}.{number >> 4 & 255}.{(number & 15) * 8 + each + 1}")
        for each in range(count)
    ]
    return endpoint_slice(f"shop/web-{number}", *ends)


def effort(act):
    """Steps of the interpreter, and most bytes held at once."""
    steps = 0

    def trace(frame, event, _):
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return steps, most


class Connections:
    """The kernel's: one to each endpoint that the changing Service ever had."""

    def entries(self, _family, _towards):
        ends = [each.address for each in web_slice(7, 4).endpoints]
        flows = [ConntrackFlow(Protocol.TCP, "10.64.1.200", 40_000, "10.110.0.7", 80, end, 80) for end in ends]
        return [ConntrackEntry(flow, b"") for flow in flows]

    def remove(self, _family, entries):
        return [True] * len(entries)


def running(mode, services):
    """A proxy that has done its first sync, its inbox, and what it writes to."""
    clock, target = FakeClock(), Written(mode)
    objects = [
        node(),
        *(each for number in range(services) for each in (web(number), web_slice(number, 3 + number % 2))),
    ]
    inbox = Inbox([*map(Upsert, objects), Synced()])
    sync = FamilySync(V4, Planner(CONFIG, V4), BACKENDS[mode], target, clock)
    flows = StaleFlowRemover(Connections(), tuple, clock, ProxyMetrics(mode))
    proxy = Proxy(inbox, [sync], clock, SyncPeriods(0.0), node_name=NODE, after_sync=flows.after)
    proxy.turn()
    return proxy, inbox, target


def one_change(mode, services):
    proxy, inbox, target = running(mode, services)

    def change(count):
        target.sent = []
        inbox.events = [Upsert(web_slice(7, count))]
        proxy.turn()

    change(3)
    change(4)
    change(3)
    steps, most = effort(lambda: change(4))
    wrote = target.sent
    # One that leaves, with a connection that it leaves behind.
    more, at_most = effort(lambda: change(3))
    assert wrote
    assert target.sent
    return steps + more, max(most, at_most), wrote


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_a_change_costs_the_same_in_a_big_cluster(mode):
    small, small_bytes, wrote = one_change(mode, SMALL[mode])
    big, big_bytes, wrote_big = one_change(mode, BIG)
    assert abs(big - small) <= small / 100, f"{small} steps with {SMALL[mode]} Services, {big} with {BIG}"
    assert big_bytes <= small_bytes + SPARE_BYTES
    assert wrote == wrote_big


def test_a_change_rewrites_its_own_chains_only():
    """The Service's chain, with one way more, and the new endpoint's."""
    for services in (SMALL["iptables"], BIG):
        (text,) = one_change("iptables", services)[2]
        written = [line for line in text.splitlines() if line.startswith(":")]
        assert sorted(line[1:9] for line in written) == ["KUBE-SEP", "KUBE-SVC"]
        assert text.count("\n-A ") == 4 + 1 + 2


def listed(services):
    """A watch that has listed so many slices."""
    kept = Watch(ENDPOINT_SLICES, lambda: 0.5)
    kept.take(DeadlineReached(), 0.0)
    kept.take(ResponseOpened(), 0.0)
    lines = [line("ADDED", web_slice(number, 3), number + 1) for number in range(services)]
    meta = {"resourceVersion": str(services), "annotations": {"k8s.io/initial-events-end": "true"}}
    lines.append(msgspec.json.encode({"type": "BOOKMARK", "object": {"metadata": meta}}) + b"\n")
    assert len(kept.take(LinesReceived(b"".join(lines)), 0.0).events) == services
    return kept


def line(kind, obj, version):
    made = encode(obj)
    made["metadata"]["resourceVersion"] = str(version)
    return msgspec.json.encode({"type": kind, "object": made}) + b"\n"


def test_a_line_of_a_watch_costs_the_same_in_a_big_cluster():
    found = []
    for services in (100, BIG):
        kept = listed(services)

        def told(count, version, kept=kept):
            assert kept.take(LinesReceived(line("MODIFIED", web_slice(7, count), version)), 1.0).events

        told(4, BIG + 1)
        found.append(effort(lambda told=told: told(3, BIG + 2)))
    (small, small_bytes), (big, big_bytes) = found
    assert small == big
    assert big_bytes <= small_bytes + SPARE_BYTES
