"""Answers name exactly the packets that have the asked outcome: concrete walks of packets in and outside of them agree."""

import random
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trace.proof.own_rules import MODES_BY_RULES, draw, ruleset_of
from tests.trace.proof.test_changes import FACTS, close, contains, ends
from tests.trace.proof.test_prove import cluster

from narthex.model import Disposition, InputError, join_port
from narthex.netfilter import ast
from narthex.netfilter.sets.diagram import DiagramBuilder, leaves
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends import BACKENDS
from narthex.testing import strategies as some
from narthex.testing.build import HOST, endpoint, endpoint_slice, plan, service
from narthex.trace.evaluate import evaluate
from narthex.trace.proof.named_frontends import NamedFrontends
from narthex.trace.proof.packet_source import PacketSource, ends_of, space_of_sources
from narthex.trace.proof.sender_sets import SenderSets
from narthex.trace.query.answer import QueryReading, QueryScene, answer
from narthex.trace.query.question import read_question

SHOP = (
    service("shop/web", "10.110.0.5", node_port=30080),
    endpoint_slice("shop/web", endpoint("10.64.1.10"), endpoint("10.64.2.10", node="worker-b"), port=8080),
    service("shop/cart", "10.110.0.6", affinity_seconds=60),
    endpoint_slice(
        "shop/cart", endpoint("10.64.2.11", node="worker-b"), endpoint("10.64.2.12", node="worker-b"), port=9000
    ),
    service("shop/empty", "10.110.0.7"),
)


def scene(desired, mode="nftables", given_by=("rules", "objects")):
    ruleset = ruleset_of(mode, BACKENDS[mode].render(desired))
    deviations = BACKENDS[mode].deviations
    sources = {
        "rules": PacketSource(name="rules", family=desired.family, host=HOST, ruleset=ruleset),
        "objects": PacketSource(name="objects", family=desired.family, host=HOST, plan=desired, deviations=deviations),
    }
    sources = {name: sources[name] for name in given_by}
    space = space_of_sources(sources.values(), HOST, ("cni0", "veth*"))
    frontends = NamedFrontends(space)
    frontends.add_plan(desired)
    return QueryScene(
        node="worker-a",
        space=space,
        senders=SenderSets(space, FACTS),
        frontends=frontends,
        sources=sources,
        pods={"shop/web-1": ("10.64.1.10", "fd64:0:0:1::10")},
        local_pods=("10.64.1.0/24", "fd64:0:0:1::/64"),
        evidence=lambda name, _example, _share: name,
    )


def asked(text, *, mode="nftables", objects=SHOP):
    return answer(read_question(text), scene(plan(*objects), mode))


def told(report):
    return [(line.senders, line.destination, line.outcome) for line in report.lines]


CLUSTER_IP = "shop/web:http's cluster IP 10.110.0.5:80/TCP"
NODE_PORT = "shop/web:http's node port 30080/TCP on 10.20.0.11"
BOTH = "endpoints 10.64.1.10:8080 (1/2), 10.64.2.10:8080 (1/2)"


@pytest.mark.parametrize("mode", MODES_BY_RULES)
def test_who_reaches_an_endpoint(mode):
    report = asked("who reaches 10.64.2.10:8080?", mode=mode)
    assert ("pods", CLUSTER_IP, "1/2 of new connections, not masqueraded") in told(report)
    assert ("this node, other nodes and outside", CLUSTER_IP, "1/2 of new connections, masqueraded") in told(report)
    assert ("anyone", NODE_PORT, "1/2 of new connections, masqueraded") in told(report)
    assert told(report)[-1] == ("anyone", "10.64.2.10 port 8080", "directly, without a Service: left to routing")
    assert (report.certain, report.agree, report.status) == (True, True, 0)
    assert {line.given_by for line in report.lines} == {("rules", "objects")}


def test_what_a_sender_can_reach():
    assert told(asked("what can outside reach?")) == [
        ("outside", "shop/cart:http's cluster IP 10.110.0.6:80/TCP", "endpoints 10.64.2.11:9000 (1/2), 10.64.2.12:9000 (1/2), masqueraded, session affinity"),
        ("outside", NODE_PORT, f"{BOTH}, masqueraded"),
        ("outside", CLUSTER_IP, f"{BOTH}, masqueraded"),
    ]  # fmt: skip
    pods = asked("what can pods on worker-b reach?")
    assert ("pods on worker-b", CLUSTER_IP, BOTH) in told(pods)
    one = asked("what can pod shop/web-1 reach?")
    assert one.lines[0].senders == "pods 10.64.1.10"


def test_where_packets_go_and_what_becomes_of_them():
    assert told(asked("where does 10.110.0.5:80/tcp from pods go?")) == [("pods", CLUSTER_IP, BOTH)]
    assert ("anyone", "shop/empty:http's cluster IP 10.110.0.7:80/TCP", "refused") in told(asked("what is refused?"))
    assert told(asked("what is dropped?")) == []
    assert told(asked("what is masqueraded from pods to shop/cart?")) == []
    assert told(asked("what reaches shop/empty?")) == [
        ("anyone", "shop/empty:http's cluster IP 10.110.0.7:80/TCP", "refused")
    ]


def test_services_that_leave_without_masquerade():
    report = asked("which Services can leave this node without masquerade?")
    cluster_ips = "cluster IPs of shop/cart:http and shop/web:http"
    assert told(report) == [("pods", cluster_ips, "to endpoints on other nodes, with the address of the sender")]
    assert report.lines[0].services == ("shop/cart:http", "shop/web:http")


def test_what_is_masqueraded():
    report = asked("what is masqueraded from pods?", mode="iptables")
    assert told(report) == [
        ("endpoints to themselves", "cluster IPs of shop/cart:http and shop/web:http", "masqueraded"),
        ("pods", NODE_PORT, "masqueraded"),
    ]


def test_addresses_of_the_other_family_have_no_answer():
    assert asked("who reaches fd64::1?") is None
    assert asked("what can fd64::1 reach?") is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("who reaches shop/wob?", "did you mean shop/web"),
        ("who reaches pod shop/web-2?", "did you mean shop/web-1"),
        ("what can pods on worker-z reach?", "worker-z are unknown"),
    ],
)
def test_unknown_names_are_refused(text, message):
    with pytest.raises(InputError, match=message):
        asked(text)


def test_what_is_undecided_is_named():
    known = scene(plan(*SHOP), "iptables")
    rules = known.sources["rules"]
    nat = next(table for table in rules.ruleset.tables if table.name == "nat")
    first = ast.Rule((ast.Compare(ast.Field.DADDR, ("10.110.0.5",)), ast.Unknown("-m magic"), ast.DropPacket()))
    base = nat.chains["PREROUTING"]
    chains = {**nat.chains, "PREROUTING": msgspec.structs.replace(base, rules=(first, *base.rules))}
    changed = msgspec.structs.replace(nat, chains=chains)
    tables = tuple(changed if table is nat else table for table in rules.ruleset.tables)
    rules = msgspec.structs.replace(rules, ruleset=ast.Ruleset(tables))
    known = msgspec.structs.replace(known, sources={"rules": rules})
    report = answer(read_question("what can outside reach?"), known)
    assert not report.certain
    assert report.status == 2
    assert "-m magic" in report.undecided[0].rule
    assert answer(read_question("what can outside reach?"), scene(plan(*SHOP), "iptables")).certain
    elsewhere = answer(read_question("where does shop/cart go?"), known)
    assert elsewhere.certain


def fits(question, end, packet):
    """Whether a packet that ends so has the outcome that is asked for."""
    disposition, address, masquerade = end
    if question.text.startswith("what can"):
        return disposition is Disposition.DELIVERED
    if question.text.startswith("who reaches"):
        direct = disposition is Disposition.NOT_OURS and packet.destination == question.target.address
        return direct or (disposition is Disposition.DELIVERED and address[0] == question.target.address)
    if question.fate == "masqueraded":
        return masquerade
    return disposition is {"refused": Disposition.REJECTED, "dropped": Disposition.DROPPED}[question.fate]


QUESTIONS = (
    "what can anyone reach?",
    "what can pods reach?",
    "who reaches 10.64.1.10?",
    "who reaches fd64:0:0:1::10?",
    "what is refused?",
    "what is dropped from outside?",
    "what is masqueraded?",
)


@pytest.mark.parametrize("mode", MODES_BY_RULES)
@settings(max_examples=4)
@given(
    some.configs,
    some.families,
    st.lists(some.objects, min_size=2, max_size=6),
    st.sampled_from(QUESTIONS),
    st.integers(0, 2**32),
)
def test_packets_have_the_asked_outcome_just_if_the_answer_has_them(mode, config, family, objects, text, seed):
    rng, question = random.Random(seed), read_question(text)
    desired = cluster(mode, config, family, objects)
    for name in ("rules", "objects"):
        known = scene(desired, mode, (name,))
        source, space = known.sources[name], known.space
        asked_for = QueryReading(question, known).asked()
        if asked_for is None:
            return
        everything = list(ends_of(source, space, [space.possible]))
        undecided = [each.box for each in everything if each.end.note]
        classes = QueryReading(question, known).classes(ends_of(source, space, asked_for.boxes))
        for box, leaf in leaves(DiagramBuilder(space).build(everything), space):
            for sources, _ in leaf.regions:
                point = (*(draw(rng, each) for each in box[:-1]), draw(rng, sources))
                packet = space.packet(point)
                if packet is None or any(contains(each, point) for each in undecided):
                    continue
                if source.ruleset is not None:
                    walked = ends(walk(source.ruleset, packet, HOST))
                else:
                    walked = ends(evaluate(desired, packet, HOST, source.deviations))
                inside = any(contains(each, point) for each in asked_for.boxes)
                expected = {end: share for end, share in walked.items() if inside and fits(question, end, packet)}
                held = [outcome for each, outcome in classes if contains(each, point)]
                assert len(held) <= 1
                answered = {
                    (each.disposition, each.endpoint if each.endpoint[0] else None, each.masquerade): Fraction(*each.probability)
                    for outcome in held
                    for each in outcome.shares
                    if not each.remembered
                }  # fmt: skip
                assert close(answered, expected), (packet, answered, expected)


def test_an_endpoint_is_named_as_in_the_rules():
    assert join_port("10.64.2.10", 8080) in asked("what can pods reach?").lines[-1].outcome
