"""Rules of kube-proxy in their layouts for iptables and nftables, walked by packets."""

from __future__ import annotations

from fractions import Fraction

import pytest
from tests.netfilter.walk.rulesets import (
    DADDR,
    DPORT,
    FRONTEND,
    HOST,
    PROTO,
    SADDR,
    SEVEN,
    base,
    chain,
    ends,
    ladder,
    mapping,
    nat,
    only,
    packet,
    rule,
    table,
)

from narthex.model.net import Protocol
from narthex.model.packet import Host
from narthex.netfilter.ast import (
    Accept,
    Chain,
    Compare,
    Counter,
    CtState,
    Dnat,
    DnatMap,
    DropPacket,
    ElementData,
    ElementKey,
    Expression,
    Goto,
    IsLocal,
    Jump,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    RandomGoto,
    RejectPacket,
    Return,
    Ruleset,
    Slot,
    VerdictMap,
)
from narthex.netfilter.walk.walk import walk

# ---- iptables: kube-proxy's chains of today ------------------------------------------------------------------------

LADDER = ("0.14286000002", "0.16667000018", "0.20000000019", "0.25000000000", "0.33332999982", "0.50000000000")


def tcp(address: str, port: int) -> tuple[Expression, ...]:
    return Compare(DADDR, (f"{address}/32",)), Compare(PROTO, ("tcp",)), Compare(DPORT, (port,))


def endpoint_chain(name: str, address: str, port: int = 80) -> Chain:
    return chain(
        name,
        rule(Compare(SADDR, (f"{address}/32",)), Jump("KUBE-MARK-MASQ")),
        rule(Compare(PROTO, ("tcp",)), Dnat(address, port)),
    )


def old_layout(no_local: bool = True) -> Ruleset:
    """The LoadBalancer Service default/testsvc of a 1.12 cluster: KUBE-FW, KUBE-XLB, KUBE-MARK-DROP, KUBE-FIREWALL."""
    names = [f"KUBE-SEP-{number}" for number in range(7)]
    last = Jump("KUBE-MARK-DROP") if no_local else Jump("KUBE-SEP-0")
    nat_table = table(
        "nat",
        nat("prerouting", rule(Jump("KUBE-SERVICES"))),
        nat("output", rule(Jump("KUBE-SERVICES"))),
        nat("postrouting", rule(Jump("KUBE-POSTROUTING"))),
        chain(
            "KUBE-SERVICES",
            rule(Compare(SADDR, ("172.31.0.0/16",), negate=True), *tcp("172.30.5.207", 443), Jump("KUBE-MARK-MASQ")),
            rule(*tcp("172.30.5.207", 443), Jump("KUBE-SVC"), comment="default/testsvc: cluster IP"),
            rule(*tcp("172.6.6.6", 443), Jump("KUBE-FW")),
            rule(IsLocal(DADDR), Jump("KUBE-NODEPORTS")),
        ),
        chain(
            "KUBE-NODEPORTS",
            rule(
                Compare(SADDR, ("127.0.0.0/8",)),
                Compare(PROTO, ("tcp",)),
                Compare(DPORT, (30031,)),
                Jump("KUBE-MARK-MASQ"),
            ),
            rule(Compare(PROTO, ("tcp",)), Compare(DPORT, (30031,)), Jump("KUBE-XLB")),
        ),
        chain("KUBE-FW", rule(Jump("KUBE-XLB")), rule(Jump("KUBE-MARK-DROP"))),
        chain("KUBE-XLB", rule(Compare(SADDR, ("172.31.0.0/16",)), Jump("KUBE-SVC")), rule(last)),
        chain("KUBE-SVC", *ladder(names, LADDER)),
        *(endpoint_chain(name, address) for name, address in zip(names, SEVEN, strict=True)),
        chain("KUBE-MARK-MASQ", rule(MarkOr(0x4000))),
        chain("KUBE-MARK-DROP", rule(MarkOr(0x8000))),
        chain("KUBE-POSTROUTING", rule(MarkIs(0x4000, 0x4000), Masquerade(fully_random=False))),
    )
    filter_table = table(
        "filter",
        base("input", rule(Jump("KUBE-FIREWALL"))),
        base("output", rule(Jump("KUBE-FIREWALL"))),
        base("forward", rule(Jump("KUBE-FORWARD"))),
        chain("KUBE-FIREWALL", rule(MarkIs(0x8000, 0x8000), DropPacket())),
        chain("KUBE-FORWARD", rule(CtState(("invalid",)), DropPacket()), rule(MarkIs(0x4000, 0x4000), Accept())),
    )
    return Ruleset((nat_table, filter_table))


@pytest.mark.parametrize(("source", "masquerade"), [("172.31.4.4", False), ("198.51.100.7", True)])
def test_each_endpoint_of_testsvc_gets_one_seventh(source: str, masquerade: bool) -> None:
    found = ends(walk(old_layout(), packet("172.30.5.207", 443, source), HOST))
    assert set(found) == {("delivered", f"{address}:80", masquerade) for address in SEVEN}
    assert sum(found.values()) == 1
    assert all(abs(probability - Fraction(1, 7)) < Fraction(1, 10**4) for probability in found.values())
    assert found["delivered", "172.31.9.52:80", masquerade] == Fraction(LADDER[0])


def test_hairpin_masquerades_only_the_draw_that_comes_back() -> None:
    found = ends(walk(old_layout(), packet("172.30.5.207", 443, "172.31.9.54"), HOST))
    assert {end for end in found if end[2]} == {("delivered", "172.31.9.54:80", True)}
    assert len(found) == 7


def test_old_layout_pod_takes_the_short_way_and_outsiders_are_dropped() -> None:
    lb_here = Host(addresses=("10.20.0.11", "172.6.6.6"))
    assert len(ends(walk(old_layout(), packet("172.6.6.6", 443, "172.31.4.4"), lb_here))) == 7
    outsider = walk(old_layout(), packet("172.6.6.6", 443, "198.51.100.7"), lb_here)
    assert only(outsider) == ("dropped", None, False)
    assert [step.where for step in outsider.outcomes[0].steps][-2:] == [
        "input filter INPUT",
        "input filter KUBE-FIREWALL",
    ]
    node_port = walk(old_layout(), packet("10.20.0.11", 30031, "198.51.100.7"), HOST)
    assert only(node_port) == ("dropped", None, False)


def test_old_layout_mark_drop_does_not_reach_forwarded_packets() -> None:
    # KUBE-FIREWALL hangs in INPUT and OUTPUT only: an address that is not the node's own goes on its way.
    assert only(walk(old_layout(), packet("172.6.6.6", 443, "198.51.100.7"), HOST)) == ("not-ours", None, False)


def test_old_layout_with_a_local_endpoint() -> None:
    trace = walk(old_layout(no_local=False), packet("10.20.0.11", 30031, "198.51.100.7"), HOST)
    assert only(trace) == ("delivered", "172.31.9.52:80", False)


def test_steps_tell_the_way_with_the_chance_of_each() -> None:
    trace = walk(
        old_layout(),
        packet("172.30.5.207", 443, "198.51.100.7"),
        HOST,
        name_of=lambda address: f"pod {address}" if address in SEVEN else "",
    )
    third = next(outcome for outcome in trace.outcomes if outcome.endpoint == ("172.31.9.54", 80))
    assert [(step.where, step.what) for step in third.steps] == [
        ("prerouting nat PREROUTING", "jump KUBE-SERVICES"),
        (
            "prerouting nat KUBE-SERVICES",
            "source not 172.31.0.0/16, destination 172.30.5.207/32, protocol tcp, port 443, jump KUBE-MARK-MASQ",
        ),
        ("prerouting nat KUBE-MARK-MASQ", "set mark bits 0x4000"),
        ("prerouting nat KUBE-SERVICES", "destination 172.30.5.207/32, protocol tcp, port 443, jump KUBE-SVC"),
        ("prerouting nat KUBE-SVC", "with probability 0.20000000019, jump KUBE-SEP-2"),
        ("prerouting nat KUBE-SEP-2", "protocol tcp, dnat to 172.31.9.54:80"),
        ("forward filter FORWARD", "jump KUBE-FORWARD"),
        ("forward filter KUBE-FORWARD", "mark & 0x4000 = 0x4000, accept"),
        ("postrouting nat POSTROUTING", "jump KUBE-POSTROUTING"),
        ("postrouting nat KUBE-POSTROUTING", "mark & 0x4000 = 0x4000, masquerade"),
    ]
    assert third.steps[3].why == "default/testsvc: cluster IP"
    assert third.steps[5].why == "pod 172.31.9.54"
    assert third.steps[4].probability == third.probability
    assert abs(third.steps[4].probability - Fraction(1, 7)) < Fraction(1, 10**4)


def constant(count: int = 3) -> Ruleset:
    slots: dict[ElementKey, ElementData] = {
        ("10.110.0.5", "tcp", 80, number): (f"10.64.1.{10 + number}", 8080) for number in range(count)
    }
    services: dict[ElementKey, ElementData] = {("10.110.0.5", "tcp", 80): Goto("send-c3")}
    empty: dict[ElementKey, ElementData] = {("10.110.0.6", "tcp", 80): Goto("refuse")}
    narthex = table(
        "narthex",
        nat("prerouting", rule(VerdictMap(FRONTEND, "services"))),
        nat("output", rule(VerdictMap(FRONTEND, "services"))),
        nat("postrouting", rule(MarkIs(0, 0x4000), Return()), rule(MarkXor(0x4000)), rule(Masquerade())),
        base("forward", rule(CtState(("new",)), VerdictMap(FRONTEND, "empty"))),
        base("output2", rule(DropPacket())),
        chain("send-c3", rule(Compare(SADDR, ("10.64.0.0/12",)), Goto("pick-3")), rule(MarkOr(0x4000), Goto("pick-3"))),
        chain("pick-3", rule(Counter(), DnatMap((*FRONTEND, Slot(3)), "endpoints"))),
        chain("refuse", rule(RejectPacket())),
        sets=(
            mapping("services", FRONTEND, services, "verdict"),
            mapping("empty", FRONTEND, empty, "verdict"),
            mapping("endpoints", (*FRONTEND, Slot(3)), slots, "endpoint"),
        ),
    )
    return Ruleset((narthex,))


def test_map_spreads_exactly() -> None:
    found = ends(walk(constant(), packet("10.110.0.5"), HOST))
    assert found == {("delivered", f"10.64.1.{10 + number}:8080", False): Fraction(1, 3) for number in range(3)}


def test_map_masquerades_others() -> None:
    found = ends(walk(constant(), packet("10.110.0.5", source="198.51.100.7"), HOST))
    assert found == {("delivered", f"10.64.1.{10 + number}:8080", True): Fraction(1, 3) for number in range(3)}


def test_map_from_the_host_itself() -> None:
    found = ends(walk(constant(), packet("10.110.0.5", source="10.20.0.11", from_host=True), HOST))
    assert found == {("delivered", f"10.64.1.{10 + number}:8080", True): Fraction(1, 3) for number in range(3)}


def test_missing_slot_means_that_the_rule_does_not_match() -> None:
    assert ends(walk(constant(2), packet("10.110.0.5"), HOST)) == {
        ("delivered", "10.64.1.10:8080", False): Fraction(1, 3),
        ("delivered", "10.64.1.11:8080", False): Fraction(1, 3),
        ("not-ours", None, False): Fraction(1, 3),
    }


def test_map_rejects_without_endpoints() -> None:
    assert only(walk(constant(), packet("10.110.0.6"), HOST)) == ("rejected", None, False)


def test_other_ports_and_protocols_miss() -> None:
    assert only(walk(constant(), packet("10.110.0.5", 81), HOST)) == ("not-ours", None, False)
    udp = packet("10.110.0.5", protocol=Protocol.UDP)
    assert only(walk(constant(), udp, HOST)) == ("not-ours", None, False)
    icmp = packet("10.110.0.5", 0, protocol=Protocol.ICMP)
    assert only(walk(constant(), icmp, HOST)) == ("not-ours", None, False)


def test_map_steps_show_the_elements_met() -> None:
    outcome = walk(constant(), packet("10.110.0.5"), HOST).outcomes[0]
    assert [step.what for step in outcome.steps][:3] == [
        "services { 10.110.0.5 . tcp . 80 : goto send-c3 }",
        "source 10.64.0.0/12, goto pick-3",
        "dnat to endpoints { 10.110.0.5 . tcp . 80 . 0 : 10.64.1.10:8080 }",
    ]
    assert outcome.steps[2].probability == Fraction(1, 3)


def test_spread_goes_to_each_chain_alike() -> None:
    rules = Ruleset(
        (
            table(
                "kube-proxy",
                nat("prerouting", rule(Compare(DADDR, ("10.110.0.5",)), RandomGoto(("e0", "e1", "e2", "e3")))),
                *(chain(f"e{number}", rule(Dnat(f"10.64.1.{number}", 8080))) for number in range(4)),
            ),
        )
    )
    found = ends(walk(rules, packet("10.110.0.5"), HOST))
    assert found == {("delivered", f"10.64.1.{number}:8080", False): Fraction(1, 4) for number in range(4)}
