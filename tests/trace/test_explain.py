"""Explanations of hand-made rules beside their plan."""

import json
from fractions import Fraction

import msgspec
import pytest

from narthex.cli.output import json_text
from narthex.model.net import IPFamily
from narthex.model.objects import Node, Pod, PodSpec
from narthex.model.packet import Disposition, Packet, WalkStep, single
from narthex.netfilter.ast import (
    Chain,
    Compare,
    CtState,
    DnatMap,
    Field,
    Goto,
    Hook,
    Key,
    MarkIs,
    MarkOr,
    Masquerade,
    RejectPacket,
    Return,
    Rule,
    Ruleset,
    Set,
    Slot,
    Table,
    VerdictMap,
)
from narthex.netfilter.walk.walk import walk
from narthex.proxy.plan.ir import Plan
from narthex.testing.build import HOST, endpoint, endpoint_slice, node, packet, plan, service, snapshot
from narthex.trace.document import trace_document
from narthex.trace.evaluate import evaluate
from narthex.trace.explain import PlanCase, explain
from narthex.trace.model import PacketPath, PathEnd, fraction_text, probability_text
from narthex.trace.names import AddressName, AddressNames
from narthex.trace.render.outline import MOST_NAMED
from narthex.trace.render.text import text

OBJECTS = (
    node(),
    Node(name="worker-b", pod_cidrs=("10.64.2.0/24",), internal_ips=("10.20.0.12",)),
    service("shop/web", "10.110.0.5", node_port=30001),
    endpoint_slice(
        "shop/web", endpoint("10.64.1.10", target="web-1"), endpoint("10.64.2.10", node="worker-b", target="web-2"),
        port=8080,
    ),
    service("shop/empty", "10.110.0.6"),
    Pod(namespace="shop", name="client", ips=("10.64.1.200",), spec=PodSpec(node_name="worker-a")),
)  # fmt: skip
SNAPSHOT = snapshot(*OBJECTS)
NAMES = AddressNames(SNAPSHOT, {"198.51.100.7": AddressName("outside", "")})
FRONT: Key = (Field.DADDR, Field.L4PROTO, Field.DPORT)


def base(kind: str, hook: str, *rules: Rule, priority: int = 0) -> Chain:
    return Chain(name=f"{kind}-{hook}", rules=rules, hook=Hook(type=kind, hook=hook, priority=priority))


def rules() -> Ruleset:
    """What a backend could render for OBJECTS."""
    pick = DnatMap((*FRONT, Slot(2)), "endpoints")
    endpoints = {
        (address, "tcp", port, slot): (pod, 8080)
        for address, port in (("10.110.0.5", 80), ("10.20.0.11", 30001))
        for slot, pod in enumerate(("10.64.1.10", "10.64.2.10"))
    }
    chains = (
        base("nat", "prerouting", Rule((VerdictMap(FRONT, "services"),)), priority=-100),
        base("filter", "forward", Rule((CtState(("new",)), VerdictMap(FRONT, "empty")))),
        base("nat", "postrouting", Rule((MarkIs(0, 0x4000), Return())), Rule((Masquerade(),)), priority=100),
        Chain(
            name="send-c2",
            rules=(Rule((Compare(Field.SADDR, ("10.64.0.0/12",)), Goto("pick-2"))), Rule((Goto("send-c2m"),))),
        ),
        Chain(name="send-c2m", rules=(Rule((MarkOr(0x4000), Goto("pick-2")), comment="not a pod"),)),
        Chain(name="pick-2", rules=(Rule((pick,)),)),
    )
    sets = (
        Set(
            name="services",
            key=FRONT,
            data="verdict",
            elements={("10.110.0.5", "tcp", 80): Goto("send-c2"), ("10.20.0.11", "tcp", 30001): Goto("send-c2m")},
        ),
        Set(name="empty", key=FRONT, data="verdict", elements={("10.110.0.6", "tcp", 80): RejectPacket()}),
        Set(name="endpoints", key=(*FRONT, Slot(2)), data="endpoint", elements=endpoints),
    )
    return Ruleset(
        (
            Table(
                family=IPFamily.IPV4,
                name="narthex",
                chains={chain.name: chain for chain in chains},
                sets={each.name: each for each in sets},
            ),
        )
    )


def case(sent: Packet, decided: Plan | None = None) -> PlanCase:
    decided = decided or plan(*OBJECTS)
    return PlanCase(
        plan=decided,
        packet=sent,
        host=HOST,
        mode="nftables",
        planned=evaluate(decided, sent, HOST),
        walked=walk(rules(), sent, HOST, name_of=NAMES.of),
    )


def ends(path: PacketPath) -> list[PathEnd]:
    return [leaf.end for leaf in path.leaves()]


def told(sent: Packet) -> str:
    return text(explain(case(sent), NAMES, lambda address: NAMES.route(address, "worker-a")))


CASES = {
    "outside-to-node-port": packet("198.51.100.7", "10.20.0.11:30001"),
    "pod-to-cluster-ip": packet("10.64.1.200", "10.110.0.5:80"),
    "pod-to-empty-service": packet("10.64.1.200", "10.110.0.6:80"),
    "pod-to-elsewhere": packet("10.64.1.200", "192.0.2.1:443"),
}


@pytest.mark.parametrize("name", CASES)
def test_tree(name: str, golden) -> None:
    golden(f"trace/{name}.txt", told(CASES[name]))


def test_data_of_a_node_port(golden) -> None:
    explanation = explain(case(CASES["outside-to-node-port"]), NAMES, lambda address: NAMES.route(address, "worker-a"))
    document = json_text(trace_document(explanation))
    golden("trace/outside-to-node-port.json", document)
    data = json.loads(document)
    assert data["service"] == "shop/web:http"
    assert data["plan"]["sender"] == "other"
    assert [end["name"] for end in data["ends"]] == ["pod shop/web-1 on worker-a", "pod shop/web-2 on worker-b"]
    assert data["plan"]["agree"] is True


def test_difference_between_plan_and_rules_is_told() -> None:
    other = plan(*OBJECTS[:2], service("shop/web", "10.110.0.5"))
    explanation = explain(case(packet("10.64.1.200", "10.110.0.5:80"), other), NAMES, lambda _: "")
    assert not explanation.plan.agree
    assert explanation.plan.differences == (
        "the plan says: 100.00 % (1) rejected",
        "the rules say: 50.00 % (1/2) delivered to 10.64.1.10:8080",
        "the rules say: 50.00 % (1/2) delivered to 10.64.2.10:8080",
    )
    assert "plan and rules DIFFER" in text(explanation)


def test_hairpin_and_masquerade_reasons() -> None:
    hairpin = PlanCase(
        plan=plan(*OBJECTS),
        packet=packet("10.64.1.10", "10.110.0.5:80"),
        host=HOST,
        mode="iptables",
        planned=(trace := evaluate(plan(*OBJECTS), packet("10.64.1.10", "10.110.0.5:80"), HOST)),
        walked=trace,
    )
    mine, other = ends(explain(hairpin, NAMES, lambda _: ""))
    assert "(hairpin)" in mine.rewriting[1]
    assert other.rewriting[1] == "source kept: the endpoint sees 10.64.1.10"


@pytest.mark.parametrize(
    ("source", "destination", "config", "reason"),
    [
        ("198.51.100.7", "10.110.0.5:80", {}, "the sender is no pod"),
        ("10.64.1.200", "10.110.0.5:80", {"masquerade_all": True}, "masqueradeAll is set"),
        ("10.20.0.11", "10.20.0.11:30001", {}, "the sender is this node"),
        ("10.64.1.200", "10.20.0.11:30001", {}, "traffic to a node port may leave this node again"),
    ],
)
def test_reason_for_masquerade(source: str, destination: str, config: dict[str, object], reason: str) -> None:
    decided, sent = plan(*OBJECTS, **config), packet(source, destination)
    trace = evaluate(decided, sent, HOST)
    said = PlanCase(plan=decided, packet=sent, host=HOST, mode="nftables", planned=trace, walked=trace)
    for end in ends(explain(said, NAMES, lambda _: "")):
        assert reason in end.rewriting[1]


def test_many_endpoints_are_named_in_one_line_each_and_the_rest_is_counted() -> None:
    many = tuple(endpoint(f"10.64.1.{number}", target=f"wide-{number}") for number in range(1, 21))
    wide = plan(service("shop/wide", "10.110.0.7"), endpoint_slice("shop/wide", *many))
    sent = packet("10.64.1.200", "10.110.0.7:80")
    trace = evaluate(wide, sent, HOST)
    names = AddressNames(snapshot(endpoint_slice("shop/wide", *many)))
    explanation = explain(
        PlanCase(plan=wide, packet=sent, host=HOST, mode="nftables", planned=trace, walked=trace), names, lambda _: ""
    )
    said = text(explanation)
    assert said.startswith("✓ delivered: tcp 10.64.1.200 -> 10.110.0.7:80\n  to one of 20 endpoints\n")
    assert said.count("1/20  10.64.1.") == MOST_NAMED == 8
    assert "├─ 1/20  10.64.1.1:80   pod shop/wide-1 on worker-a\n" in said
    assert "└─ … and 12 more, 3/5 together; --all lists them\n" in said
    assert said.count("✓ delivered to the endpoint") == 1
    assert text(explanation, every=True).count("1/20  10.64.1.") == 20


def test_unsupported_is_told_with_its_reason() -> None:
    sent = packet("10.64.1.200", "10.110.0.5:80")
    walked = single(
        sent,
        Disposition.UNSUPPORTED,
        [WalkStep(where="prerouting nat PREROUTING", what="b")],
        note="not understood: -m mystery",
    )
    said = msgspec.structs.replace(case(sent), walked=walked)
    assert "unknown: not understood: -m mystery" in text(explain(said, NAMES, lambda _: ""))


def test_control_characters_do_not_reach_the_terminal() -> None:
    sent = packet("10.64.1.200", "10.110.0.5:80")
    walked = single(sent, Disposition.UNSUPPORTED, note="\x1b[2J")
    assert "\x1b" not in text(explain(msgspec.structs.replace(case(sent), walked=walked), NAMES, lambda _: ""))


def test_probabilities_are_readable() -> None:
    assert probability_text(Fraction(1, 3)) == "33.33 % (1/3)"
    assert fraction_text(Fraction("0.14286000002")) == "about 1/7"
    assert fraction_text(Fraction(1)) == "1"


def test_routes_from_nodes() -> None:
    assert (
        NAMES.route("10.64.1.10", "worker-a")
        == "10.64.1.0/24 is this node's pod range: over its bridge (cni0) to the pod"
    )
    assert (
        NAMES.route("10.64.2.10", "worker-a") == "10.64.2.0/24 is worker-b's pod range: by way of worker-b (10.20.0.12)"
    )
    assert NAMES.route("10.20.0.11", "worker-a") == "stays on this node"
    assert NAMES.route("10.20.0.12", "worker-a") == "straight to node worker-b"
    assert NAMES.route("192.0.2.1", "worker-a") == "in no pod range of a known Node: by the node's own routes"
    no_ranges = AddressNames(snapshot(Node(name="worker-a"), *OBJECTS[2:4]))
    assert no_ranges.route("10.64.2.10", "worker-a").startswith("on worker-b, says its EndpointSlice")


def test_names() -> None:
    assert NAMES.of("10.64.1.200") == "pod shop/client on worker-a"
    assert NAMES.of("10.64.2.10") == "pod shop/web-2 on worker-b"
    assert NAMES.of("10.110.0.5") == "Service shop/web"
    assert NAMES.of("10.20.0.11") == "node worker-a"
    assert NAMES.of("198.51.100.7") == "outside"
    assert NAMES.of("192.0.2.1") == ""
    manual = AddressNames(snapshot(endpoint_slice("shop/ext", endpoint("192.0.2.8", node=""))))
    assert manual.of("192.0.2.8") == "endpoint of shop/ext"
    host_pod = Pod(namespace="kube", name="proxy", ips=("10.20.0.11",), spec=PodSpec(host_network=True))
    assert AddressNames(snapshot(node(), host_pod)).of("10.20.0.11") == "node worker-a"
