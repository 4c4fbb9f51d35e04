"""What changes between two sets of rules: classes are disjoint and complete, and each packet of one behaves as its class says."""

import random
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trace.kube_proxy_layouts import VERSIONS, saved
from tests.trace.proof.own_rules import MODES_BY_RULES, draw, ruleset_of
from tests.trace.proof.test_prove import cluster

from narthex.model import Disposition, IPFamily
from narthex.netfilter import ast
from narthex.netfilter.dump.read import read_dump
from narthex.netfilter.sets.diagram import leaves
from narthex.netfilter.walk.walk import walk
from narthex.proxy.backends import BACKENDS
from narthex.testing import strategies as some
from narthex.testing.build import HOST, endpoint, endpoint_slice, plan, service
from narthex.trace.proof.changes import change_report, changed_classes, compare_sources
from narthex.trace.proof.outcomes import outcome_of
from narthex.trace.proof.packet_source import PacketSource, packets_in
from narthex.trace.proof.prove import ProofOutcome
from narthex.trace.proof.sender_sets import SenderFacts

FACTS = SenderFacts(
    pods=("10.64.0.0/12", "fd64::/48"),
    pods_by_node={"worker-a": ("10.64.1.0/24",), "worker-b": ("10.64.2.0/24",)},
    nodes={"worker-a": HOST.addresses, "worker-b": ("10.20.0.12",)},
)
WEB = service("shop/web", "10.110.0.5", node_port=30080)
ONE, OTHER = endpoint("10.64.1.10"), endpoint("10.64.2.10", node="worker-b")


def source(mode, desired, name=""):
    ruleset = ruleset_of(mode, BACKENDS[mode].render(desired))
    return PacketSource(name=name or mode, family=desired.family, host=HOST, ruleset=ruleset)


def report(one, other, *plans, most=None):
    def name(frontends):
        for each in plans:
            frontends.add_plan(each)

    return change_report("worker-a", one, other, FACTS, name, most)


def described(found):
    return [change.described for change in found.changes]


def shop(*endpoints):
    return plan(WEB, endpoint_slice("shop/web", *endpoints, port=8080))


def test_a_lost_endpoint_is_one_line_for_each_way_and_treatment():
    before, after = shop(ONE, OTHER), shop(ONE)
    found = report(source("iptables", before, "A"), source("iptables", after, "B"), before)
    assert found.outcome is ProofOutcome.DIFFERENT
    both = "endpoints 10.64.1.10:8080 (1/2), 10.64.2.10:8080 (1/2)"
    assert sorted(described(found)) == [
        f"anyone to shop/web:http's node port 30080/TCP on 10.20.0.11: {both}, masqueraded -> endpoint 10.64.1.10:8080, masqueraded",
        f"pods to shop/web:http's cluster IP 10.110.0.5:80/TCP: {both} -> endpoint 10.64.1.10:8080",
        f"this node, other nodes and outside to shop/web:http's cluster IP 10.110.0.5:80/TCP: {both}, masqueraded -> "
        "endpoint 10.64.1.10:8080, masqueraded",
    ]
    assert {service for change in found.changes for service in change.services} == {"shop/web:http"}


def test_no_endpoint_is_left():
    before, after = shop(ONE), shop()
    found = report(source("nftables", before), source("nftables", after), before)
    assert all(line.endswith("-> refused") for line in described(found)), described(found)
    assert any(line.startswith("pods ") for line in described(found))


def test_some_of_many_endpoints_are_named():
    many = [endpoint(f"10.64.2.{10 + at}", node="worker-b") for at in range(8)]
    found = report(source("nftables", shop(*many)), source("nftables", shop(*many[1:])), shop())
    assert "8 endpoints (1/8 each) -> 7 endpoints (1/7 each), without 10.64.2.10:8080" in described(found)[-1]


def test_equal_changes_of_many_services_are_one_line():
    services = [service(f"shop/s{number}", f"10.110.0.{10 + number}") for number in range(9)]
    slices = [
        endpoint_slice(f"shop/s{number}", endpoint(f"10.64.2.{10 + number}", node="worker-b"), port=8080)
        for number in range(9)
    ]
    desired = plan(*services, *slices)
    masked = plan(*services, *slices, masquerade_all=True)
    found = report(source("nftables", desired), source("nftables", masked), desired)
    lines = described(found)
    assert "pods to cluster IPs of shop/s0:http, shop/s1:http, shop/s2:http and 6 more Service ports: not masqueraded -> masqueraded" in lines  # fmt: skip


@pytest.mark.parametrize("mode", MODES_BY_RULES)
def test_equal_rules_are_proved_equal(mode):
    found = report(source(mode, shop(ONE, OTHER)), source(mode, shop(ONE, OTHER)))
    assert (found.outcome, found.changes, found.undecided, found.packets) == (ProofOutcome.PROVED, (), (), "0")


def test_lines_are_bounded_and_counted():
    before, after = shop(ONE, OTHER), shop(ONE)
    found = report(source("iptables", before), source("iptables", after), before, most=1)
    assert (len(found.changes), found.more) == (1, 2)


def test_a_rule_that_is_not_understood_is_undecided_even_if_both_sides_have_it():
    one = source("iptables", shop(ONE))
    nat = next(table for table in one.ruleset.tables if table.name == "nat")
    first = ast.Rule((ast.Compare(ast.Field.DADDR, ("192.0.2.1",)), ast.Unknown("-m magic"), ast.DropPacket()))
    base = nat.chains["PREROUTING"]
    chains = {**nat.chains, "PREROUTING": msgspec.structs.replace(base, rules=(first, *base.rules))}
    tables = tuple(
        msgspec.structs.replace(nat, chains=chains) if table is nat else table for table in one.ruleset.tables
    )
    one = msgspec.structs.replace(one, ruleset=ast.Ruleset(tables))
    found = report(one, one)
    assert found.outcome is ProofOutcome.UNDECIDED
    assert "-m magic" in found.undecided[0].rule
    assert 0 < found.undecided[0].share <= 2**-32


def test_the_layouts_of_kube_proxy_differ_by_what_its_versions_changed():
    family = IPFamily.IPV4
    found = {}
    for version in VERSIONS:
        ruleset = read_dump(saved(version)).for_family(family).ruleset
        found[version] = PacketSource(name=version, family=family, host=HOST, ruleset=ruleset)
    newest = found[VERSIONS[-1]]
    assert report(newest, newest).outcome is ProofOutcome.PROVED
    older = [report(each, newest) for each in found.values()]
    assert all(not each.undecided for each in older)


def ends(trace):
    return {
        (end[0], end[1] if end[0] is Disposition.DELIVERED else None, end[2]): share
        for end, share in trace.ends().items()
    }


def predicted(distribution):
    found = {}
    for each in outcome_of(distribution).shares:
        if not each.remembered:
            delivered = each.disposition is Disposition.DELIVERED
            found[each.disposition, each.endpoint if delivered else None, each.masquerade] = Fraction(*each.probability)
    return found


def close(one, other):
    return one.keys() == other.keys() and all(abs(one[end] - other[end]) < Fraction(1, 10**8) for end in one)


def contains(box, point):
    return all(value in each for each, value in zip(box, point, strict=True))


@pytest.mark.parametrize("modes", [("nftables", "iptables"), ("nftables", "nftables"), ("iptables", "iptables")])
@settings(max_examples=4)
@given(
    some.configs,
    some.families,
    st.lists(some.objects, min_size=2, max_size=6),
    st.lists(some.objects, max_size=3),
    st.integers(0, 2**32),
)
def test_changes_are_what_brute_force_finds(modes, config, family, objects, more, seed):
    rng = random.Random(seed)
    plans = cluster(modes[0], config, family, objects), cluster(modes[1], config, family, [*objects, *more])
    one, other = (source(mode, desired) for mode, desired in zip(modes, plans, strict=True))
    found = compare_sources(one, other)
    changed = list(changed_classes(found))
    undecided = [box for boxes in found.undecided.values() for box in boxes]
    for diagram in (found.before, found.after):
        for box, leaf in leaves(diagram, found.space):
            for sources, _ in leaf.regions:
                point = (*(draw(rng, each) for each in box[:-1]), draw(rng, sources))
                packet = found.space.packet(point)
                if packet is None or any(contains(each, point) for each in undecided):
                    continue
                held = [each for each in changed if contains(each.box, point)]
                before, after = (ends(walk(each.ruleset, packet, HOST)) for each in (one, other))
                assert len(held) <= 1, packet
                if held:
                    assert close(before, predicted(held[0].before)), (packet, before, held)
                    assert close(after, predicted(held[0].after)), (packet, after, held)
                else:
                    assert close(before, after), (packet, before, after)
    for each in changed:
        point = tuple(draw(rng, part) for part in each.box)
        assert sum(contains(every.box, point) for every in changed) == 1
    groups = report(one, other, *plans)
    assert groups.classes == len(changed)
    assert int(groups.packets) == sum(packets_in(each.box) for each in changed)
