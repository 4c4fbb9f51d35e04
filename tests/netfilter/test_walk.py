"""Walks through hand-made rules of both styles, with known answers."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from narthex.model.net import IPFamily, Protocol
from narthex.model.packet import Disposition, Host, Memory, Packet, Trace
from narthex.netfilter.ast import (
    Accept,
    Chain,
    Compare,
    Counter,
    CtState,
    CtStatus,
    Dnat,
    DnatMap,
    DropPacket,
    ElementData,
    ElementKey,
    Expression,
    Field,
    Goto,
    Hook,
    InSet,
    IsLocal,
    Jump,
    Key,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    PortRange,
    RandomGoto,
    RandomMatch,
    RecentCheck,
    RecentSet,
    RejectPacket,
    Return,
    Rule,
    Ruleset,
    Set,
    Slot,
    Table,
    Unknown,
    UpdateSet,
    VerdictMap,
)
from narthex.netfilter.walk.walk import walk

HOST = Host(addresses=("10.20.0.11", "10.64.1.1"))
SADDR, DADDR, PROTO, DPORT = Field.SADDR, Field.DADDR, Field.L4PROTO, Field.DPORT
PRIORITY = {"raw": -300, "mangle": -150, "nat": -100, "filter": 0}


def rule(*expressions: Expression, comment: str = "") -> Rule:
    return Rule(expressions, comment)


def chain(name: str, *rules: Rule) -> Chain:
    return Chain(name=name, rules=rules)


def base(hook: str, *rules: Rule, type: str = "filter", priority: int = 0, policy: str = "accept") -> Chain:
    return Chain(name=hook.upper(), rules=rules, hook=Hook(type=type, hook=hook, priority=priority, policy=policy))


def nat(hook: str, *rules: Rule, priority: int | None = None) -> Chain:
    default = 100 if hook in ("postrouting", "input") else -100
    return base(hook, *rules, type="nat", priority=default if priority is None else priority)


def table(name: str, *chains: Chain, sets: tuple[Set, ...] = (), family: IPFamily | None = IPFamily.IPV4) -> Table:
    return Table(family=family, name=name, chains={c.name: c for c in chains}, sets={s.name: s for s in sets})


def mapping(
    name: str, key: Key, elements: dict[ElementKey, ElementData], data: str = "", interval: bool = False
) -> Set:
    return Set(name=name, key=key, data=data, elements=elements, interval=interval)


def packet(
    destination: str, port: int = 80, source: str = "10.64.1.200", protocol: Protocol = Protocol.TCP, **more: object
) -> Packet:
    return Packet(source=source, destination=destination, port=port, protocol=protocol, **more)  # type: ignore[arg-type]


def ends(trace: Trace) -> dict[tuple[str, str | None, bool], Fraction]:
    return {
        (disposition.value, f"{endpoint[0]}:{endpoint[1]}" if endpoint else None, masquerade): probability
        for (disposition, endpoint, masquerade), probability in trace.ends().items()
    }


def only(trace: Trace) -> tuple[str, str | None, bool]:
    (end,) = ends(trace)
    assert ends(trace)[end] == 1
    return end


def drops(*chains: Chain, sets: tuple[Set, ...] = ()) -> Ruleset:
    return Ruleset((table("filter", *chains, sets=sets),))


# ---- iptables: kube-proxy's chains of today ------------------------------------------------------------------------

LADDER = ("0.14286000002", "0.16667000018", "0.20000000019", "0.25000000000", "0.33332999982", "0.50000000000")
SEVEN = tuple(f"172.31.9.{number}" for number in range(52, 59))


def tcp(address: str, port: int) -> tuple[Expression, ...]:
    return Compare(DADDR, (f"{address}/32",)), Compare(PROTO, ("tcp",)), Compare(DPORT, (port,))


def endpoint_chain(name: str, address: str, port: int = 80) -> Chain:
    return chain(
        name,
        rule(Compare(SADDR, (f"{address}/32",)), Jump("KUBE-MARK-MASQ")),
        rule(Compare(PROTO, ("tcp",)), Dnat(address, port)),
    )


def ladder(chains: list[str], probabilities: tuple[str, ...]) -> list[Rule]:
    chances: list[tuple[Expression, ...]] = [(RandomMatch(text),) for text in probabilities]
    return [rule(*chance, Jump(name)) for name, chance in zip(chains, [*chances, ()], strict=True)]


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


# ---- nftables: rules that stay, maps that hold everything ------------------------------------------------------------

FRONTEND: Key = (DADDR, PROTO, DPORT)


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


# ---- how chains call each other --------------------------------------------------------------------------------------


def test_return_leaves_the_chain_and_the_caller_goes_on() -> None:
    rules = drops(base("forward", rule(Jump("a")), rule(DropPacket())), chain("a", rule(Return()), rule(Accept())))
    assert only(walk(rules, packet("10.1.1.1"), HOST)) == ("dropped", None, False)


def test_goto_comes_back_to_the_caller_of_the_chain_that_did_it() -> None:
    rules = drops(
        base("forward", rule(Jump("a")), rule(DropPacket())),
        chain("a", rule(Goto("b")), rule(Accept())),
        chain("b", rule(MarkOr(1))),
    )
    assert only(walk(rules, packet("10.1.1.1"), HOST)) == ("dropped", None, False)


def test_goto_in_a_base_chain_ends_at_its_policy() -> None:
    rules = drops(base("forward", rule(Goto("a")), rule(RejectPacket()), policy="drop"), chain("a", rule(Return())))
    trace = walk(rules, packet("10.1.1.1"), HOST)
    assert only(trace) == ("dropped", None, False)
    assert trace.outcomes[0].steps[-1].what == "policy drop"


def test_return_in_a_base_chain_ends_at_its_policy() -> None:
    rules = drops(base("forward", rule(Return()), rule(Accept()), policy="drop"))
    assert only(walk(rules, packet("10.1.1.1"), HOST)) == ("dropped", None, False)


def test_accept_in_a_called_chain_ends_the_base_chain_only() -> None:
    accepting = table("one", base("forward", rule(Jump("a")), rule(DropPacket())), chain("a", rule(Accept())))
    dropping = table("two", base("forward", rule(DropPacket()), priority=5))
    assert only(walk(Ruleset((accepting,)), packet("10.1.1.1"), HOST)) == ("not-ours", None, False)
    assert only(walk(Ruleset((accepting, dropping)), packet("10.1.1.1"), HOST)) == ("dropped", None, False)


def test_verdict_map_jump_comes_back_to_the_next_rule() -> None:
    rules = drops(
        base("forward", rule(VerdictMap((DADDR,), "m")), rule(MarkIs(1, 1), DropPacket())),
        chain("a", rule(MarkOr(1))),
        sets=(mapping("m", (DADDR,), {("10.1.1.1",): Jump("a"), ("10.1.1.2",): Accept()}, "verdict"),),
    )
    assert only(walk(rules, packet("10.1.1.1"), HOST)) == ("dropped", None, False)
    assert only(walk(rules, packet("10.1.1.2"), HOST)) == ("not-ours", None, False)
    assert only(walk(rules, packet("10.1.1.3"), HOST)) == ("not-ours", None, False)


def test_chains_that_call_each_other_are_not_followed_forever() -> None:
    rules = drops(base("forward", rule(Jump("a"))), chain("a", rule(Jump("b"))), chain("b", rule(Goto("a"))))
    (outcome,) = walk(rules, packet("10.1.1.1"), HOST).outcomes
    assert outcome.disposition is Disposition.UNSUPPORTED
    assert "call each other" in outcome.note


def test_a_missing_chain_or_map_is_not_guessed() -> None:
    for statement in (Jump("gone"), VerdictMap((DADDR,), "gone"), DnatMap((DADDR,), "gone")):
        (outcome,) = walk(drops(base("forward", rule(statement))), packet("10.1.1.1"), HOST).outcomes
        assert outcome.disposition is Disposition.UNSUPPORTED
        assert "gone" in outcome.note


# ---- hooks ---------------------------------------------------------------------------------------------------------


def marks(hook: str, bits: int, **more: object) -> Chain:
    return base(hook, rule(MarkOr(bits)), **more)  # type: ignore[arg-type]


def hooks_of(trace: Trace) -> list[str]:
    return [step.where.split()[0] for step in trace.outcomes[0].steps]


ALL_HOOKS = drops(*(marks(hook, 1) for hook in ("prerouting", "input", "forward", "output", "postrouting")))


def test_hooks_of_a_forwarded_packet() -> None:
    assert hooks_of(walk(ALL_HOOKS, packet("10.1.1.1"), HOST)) == ["prerouting", "forward", "postrouting"]


def test_hooks_of_a_packet_for_this_host() -> None:
    assert hooks_of(walk(ALL_HOOKS, packet("10.20.0.11"), HOST)) == ["prerouting", "input"]


def test_hooks_of_a_packet_made_here() -> None:
    sent = packet("10.1.1.1", source="10.20.0.11", from_host=True)
    assert hooks_of(walk(ALL_HOOKS, sent, HOST)) == ["output", "postrouting"]


def test_hooks_of_a_packet_from_this_host_to_itself() -> None:
    sent = packet("127.0.0.1", source="127.0.0.1", from_host=True)
    assert hooks_of(walk(ALL_HOOKS, sent, HOST)) == ["output", "postrouting", "prerouting", "input"]


def test_rewriting_decides_the_route() -> None:
    rules = Ruleset(
        (
            table("nat", nat("prerouting", rule(Compare(DPORT, (30001,)), Dnat("10.64.2.9", 8080)))),
            table("filter", base("input", rule(DropPacket())), base("forward", rule(CtStatus(("dnat",)), Accept()))),
        )
    )
    assert only(walk(rules, packet("10.20.0.11", 30001), HOST)) == ("delivered", "10.64.2.9:8080", False)
    assert only(walk(rules, packet("10.20.0.11", 22), HOST)) == ("dropped", None, False)


def test_only_the_first_rewriting_of_a_hook_counts() -> None:
    late = table("late", nat("prerouting", rule(Dnat("10.64.1.2", 2)), priority=-90))
    early = table("early", nat("prerouting", rule(Dnat("10.64.1.1", 1)), priority=-105))
    seen = table("seen", base("prerouting", rule(MarkOr(1)), priority=-50))
    trace = walk(Ruleset((late, seen, early)), packet("10.110.0.5"), HOST)
    assert only(trace) == ("delivered", "10.64.1.1:1", False)
    assert [step.where for step in trace.outcomes[0].steps] == [
        "prerouting early PREROUTING",
        "prerouting seen PREROUTING",
    ]


def test_accept_in_a_nat_chain_lets_the_next_one_rewrite() -> None:
    first = table("first", nat("prerouting", rule(Accept()), priority=-110))
    second = table("second", nat("prerouting", rule(Dnat("10.64.1.2", 2))))
    assert only(walk(Ruleset((first, second)), packet("10.110.0.5"), HOST)) == ("delivered", "10.64.1.2:2", False)


def test_all_nat_chains_run_at_one_priority() -> None:
    # A filter chain at -105 sees the packet before a nat chain that calls itself -110.
    rewriting = table("a", nat("prerouting", rule(Dnat("10.64.1.1", 1)), priority=-110))
    guard = table("b", base("prerouting", rule(Compare(DADDR, ("10.110.0.5",)), DropPacket()), priority=-105))
    assert only(walk(Ruleset((rewriting, guard)), packet("10.110.0.5"), HOST)) == ("dropped", None, False)


def assumed(*tables: Table) -> tuple[str, bool]:
    """How the packet ends, and whether that supposes an order."""
    trace = walk(Ruleset(tables), packet("10.110.0.5"), HOST)
    texts = [text for outcome in trace.outcomes for text in outcome.supposing]
    assert all("priority" in text and "is assumed to run before" in text for text in texts)
    return only(trace)[0], bool(texts)


def test_an_order_at_one_priority_is_supposed_only_where_the_end_depends_on_it() -> None:
    accept, drop, reject = (
        table(word, base("forward", rule(each)))
        for word, each in (("a", Accept()), ("d", DropPacket()), ("r", RejectPacket("icmp-port-unreachable")))
    )
    assert assumed(accept, table("b", base("forward", rule(Accept())))) == ("not-ours", False)
    assert assumed(accept, drop) == assumed(drop, accept) == ("dropped", False)
    assert assumed(table("b", base("forward", rule(DropPacket()))), drop) == ("dropped", False)
    # The youngest, which is the last one of a dump, comes first.
    assert assumed(drop, reject) == ("rejected", True)
    assert assumed(reject, drop) == ("dropped", True)
    assert assumed(reject, accept, drop) == ("dropped", True)
    # At different priorities nothing is open.
    assert assumed(reject, table("e", base("forward", rule(DropPacket()), priority=-1))) == ("dropped", False)


def test_an_order_at_one_priority_matters_also_for_marks_and_rewriting() -> None:
    sets, asks = (
        table(word, base("prerouting", rule(*parts)))
        for word, parts in (("s", (MarkOr(1),)), ("m", (MarkIs(1, 1), DropPacket())))
    )
    assert assumed(sets, asks) == ("not-ours", True)
    assert assumed(asks, sets) == ("dropped", True)
    one, other = (
        table(word, nat("prerouting", rule(Dnat(address, 1))))
        for word, address in (("x", "10.64.1.1"), ("y", "10.64.1.2"))
    )
    assert assumed(one, other) == ("delivered", True)
    assert assumed(one, table("z", nat("prerouting", rule(Dnat("10.64.1.1", 1))))) == ("delivered", False)


def test_tables_of_the_other_family_are_not_met() -> None:
    rules = Ruleset(
        (
            table("six", base("forward", rule(DropPacket())), family=IPFamily.IPV6),
            table(
                "both", base("forward", rule(Compare(SADDR, ("10.0.0.0/8",), negate=True), DropPacket())), family=None
            ),
        )
    )
    assert only(walk(rules, packet("10.1.1.1"), HOST)) == ("not-ours", None, False)
    assert only(walk(rules, packet("fd00::1", source="fd00::2"), HOST)) == ("dropped", None, False)
    only_both = Ruleset(rules.tables[1:])
    assert only(walk(only_both, packet("fd00::1", source="fd00::2"), HOST)) == ("not-ours", None, False)


def test_masquerade_without_rewriting_is_not_ours() -> None:
    rules = Ruleset((table("nat", nat("postrouting", rule(Masquerade()))),))
    trace = walk(rules, packet("10.1.1.1"), HOST)
    assert only(trace) == ("not-ours", None, False)
    assert trace.outcomes[0].steps[-1].what == "masquerade"


# ---- single matches --------------------------------------------------------------------------------------------------


def dropped(*matches: Expression, hook: str = "prerouting", sets: tuple[Set, ...] = (), **more: object) -> bool:
    rules = drops(base(hook, rule(*matches, DropPacket())), sets=sets)
    sent = packet(more.pop("to", "10.1.1.1"), **more)  # type: ignore[arg-type]
    return only(walk(rules, sent, HOST))[0] == "dropped"


def test_interfaces() -> None:
    assert dropped(Compare(Field.IIFNAME, ("veth*",)), iif="vethab12")
    assert not dropped(Compare(Field.IIFNAME, ("veth",)), iif="vethab12")
    assert dropped(Compare(Field.IIFNAME, ("cni0",), negate=True), iif="eth0")
    assert not dropped(Compare(Field.IIFNAME, ("cni0", "veth*")), iif="")
    assert dropped(Compare(Field.IIFNAME, ("cni0",), negate=True), iif="")


def test_an_unknown_outgoing_interface_is_not_guessed() -> None:
    rules = drops(base("forward", rule(Compare(Field.OIFNAME, ("cni0",)), DropPacket())))
    assert only(walk(rules, packet("10.1.1.1"), HOST))[0] == "unsupported"
    lo = drops(base("postrouting", rule(Compare(Field.OIFNAME, ("lo",)), DropPacket())))
    assert only(walk(lo, packet("10.1.1.1"), HOST))[0] == "not-ours"
    assert only(walk(lo, packet("127.0.0.1", source="127.0.0.1", from_host=True), HOST))[0] == "dropped"


def test_the_clients_own_port_is_not_guessed() -> None:
    rules = drops(base("forward", rule(PortRange(Field.SPORT, 1024, 65535), DropPacket())))
    assert only(walk(rules, packet("10.1.1.1"), HOST))[0] == "unsupported"


def test_ports() -> None:
    assert dropped(PortRange(DPORT, 80, 90))
    assert not dropped(PortRange(DPORT, 81, 90))
    assert dropped(PortRange(DPORT, 81, 90, negate=True))
    assert dropped(Compare(DPORT, (443, 80)))
    icmp: dict[str, object] = {"protocol": Protocol.ICMP, "port": 0}
    assert not dropped(PortRange(DPORT, 0, 90), **icmp)
    assert not dropped(Compare(DPORT, (80,), negate=True), **icmp)
    assert dropped(Compare(PROTO, ("icmp",)), **icmp)
    assert dropped(Compare(PROTO, (6,)))
    six = {"to": "fd00::1", "source": "fd00::2"}
    rules = Ruleset((table("f", base("prerouting", rule(Compare(PROTO, ("icmpv6",)), DropPacket())), family=None),))
    assert only(walk(rules, packet("fd00::1", 0, six["source"], Protocol.ICMP), HOST))[0] == "dropped"


def test_own_addresses() -> None:
    assert dropped(IsLocal(DADDR), to="127.8.9.1")
    assert dropped(IsLocal(DADDR), to="10.64.1.1")
    assert dropped(IsLocal(SADDR, negate=True))
    assert not dropped(IsLocal(SADDR))


def test_connection_state() -> None:
    assert dropped(CtState(("new", "untracked")))
    assert not dropped(CtState(("established", "related")))
    assert dropped(CtState(("established",), negate=True))
    assert not dropped(CtStatus(("dnat",)))
    assert dropped(CtStatus(("dnat",), negate=True))


def test_mark() -> None:
    rules = drops(
        base(
            "forward",
            rule(MarkOr(0xC000)),
            rule(MarkXor(0x4000)),
            rule(MarkIs(0x4000, 0x4000), RejectPacket()),
            rule(MarkIs(0x8000, 0x8000, negate=True), RejectPacket()),
            rule(MarkIs(0x8000), DropPacket()),
        )
    )
    assert only(walk(rules, packet("10.1.1.1"), HOST)) == ("dropped", None, False)


def test_sets() -> None:
    plain = mapping("s", (DADDR, DPORT), {("10.1.1.1", 80): None})
    assert dropped(InSet((DADDR, DPORT), "s"), sets=(plain,))
    assert not dropped(InSet((DADDR, DPORT), "s"), sets=(plain,), port=81)
    assert dropped(InSet((DADDR, DPORT), "s", negate=True), sets=(plain,), port=81)
    networks = mapping(
        "n",
        (DADDR, PROTO, SADDR),
        {("10.1.1.1", "tcp", "10.64.0.0/12"): None, ("10.1.1.1", "tcp", "203.0.113.7"): None},
        interval=True,
    )
    key = (DADDR, PROTO, SADDR)
    assert dropped(InSet(key, "n"), sets=(networks,))
    assert dropped(InSet(key, "n"), sets=(networks,), source="203.0.113.7")
    assert not dropped(InSet(key, "n"), sets=(networks,), source="203.0.113.8")
    ranges = mapping("r", (DADDR,), {("10.1.0.9-10.1.1.200",): None}, interval=True)
    assert dropped(InSet((DADDR,), "r"), sets=(ranges,))
    assert not dropped(InSet((DADDR,), "r"), sets=(ranges,), to="10.1.1.201")


# ---- not understood --------------------------------------------------------------------------------------------------


def test_unknown_match_is_irrelevant_when_another_one_fails() -> None:
    assert not dropped(Unknown("-m mystery"), Compare(DPORT, (443,)))
    assert not dropped(Compare(DPORT, (443,)), Unknown("-m mystery"))


def test_unknown_match_in_the_way_is_unsupported() -> None:
    rules = drops(base("forward", rule(Unknown("-m mystery --on"), DropPacket())))
    (outcome,) = walk(rules, packet("10.1.1.1"), HOST).outcomes
    assert outcome.disposition is Disposition.UNSUPPORTED
    assert outcome.note == "forward filter FORWARD: not understood: -m mystery --on"
    assert outcome.steps[-1].what == "-m mystery --on, drop"


def test_only_the_branch_that_meets_it_is_unsupported() -> None:
    rules = drops(base("forward", rule(Unknown("-m mystery"), RandomMatch("0.25000000000"), DropPacket())))
    assert ends(walk(rules, packet("10.1.1.1"), HOST)) == {
        ("unsupported", None, False): Fraction(1, 4),
        ("not-ours", None, False): Fraction(3, 4),
    }


# ---- memory ----------------------------------------------------------------------------------------------------------


def remember(trace: Trace, memory: Memory, now: float) -> None:
    for name, key in trace.outcomes[0].remembers:
        memory.touch(name, key, now)


def test_recent_lists_hold_a_client_to_its_endpoint() -> None:
    names = ["SEP-0", "SEP-1"]
    rules = Ruleset(
        (
            table(
                "nat",
                nat("prerouting", rule(Jump("SVC"))),
                chain(
                    "SVC",
                    *(rule(RecentCheck(name, 10800), Jump(name)) for name in names),
                    *ladder(names, ("0.50000000000",)),
                ),
                *(
                    chain(name, rule(RecentSet(name), Dnat(f"10.64.2.{number}", 80)))
                    for number, name in enumerate(names)
                ),
            ),
        )
    )
    memory = Memory()
    first = walk(rules, packet("10.110.0.5"), HOST, memory, now=0)
    assert set(ends(first).values()) == {Fraction(1, 2)}
    assert first.outcomes[1].remembers == (("SEP-1", ("10.64.1.200",)),)
    memory.touch(*first.outcomes[1].remembers[0], 0)
    assert only(walk(rules, packet("10.110.0.5"), HOST, memory, now=10799)) == ("delivered", "10.64.2.1:80", False)
    assert len(ends(walk(rules, packet("10.110.0.5"), HOST, memory, now=10800))) == 2
    assert len(ends(walk(rules, packet("10.110.0.5", source="10.64.1.201"), HOST, memory, now=1))) == 2


def test_dynamic_sets_remember_with_their_timeout() -> None:
    affinity = Set(name="affinity", key=(SADDR,), dynamic=True, timeout=60)
    rules = Ruleset(
        (
            table(
                "narthex",
                nat("prerouting", rule(InSet((SADDR,), "affinity"), Goto("e0")), rule(RandomGoto(("e0", "e1")))),
                chain("e0", rule(UpdateSet((SADDR,), "affinity"), Dnat("10.64.2.0", 80))),
                chain("e1", rule(Dnat("10.64.2.1", 80))),
                sets=(affinity,),
            ),
        )
    )
    memory = Memory()
    remember(walk(rules, packet("10.110.0.5"), HOST, memory), memory, 100)
    assert only(walk(rules, packet("10.110.0.5"), HOST, memory, now=159)) == ("delivered", "10.64.2.0:80", False)
    assert len(ends(walk(rules, packet("10.110.0.5"), HOST, memory, now=160))) == 2


# ---- size ------------------------------------------------------------------------------------------------------------


def test_branches_that_meet_again_are_one() -> None:
    # Thirty coin throws without consequence would be 2**30 ways.
    rules = drops(base("forward", *(rule(RandomMatch("0.50000000000"), Jump("a")) for _ in range(30))), chain("a"))
    assert only(walk(rules, packet("10.1.1.1"), HOST)) == ("not-ours", None, False)


def test_ladder_of_a_thousand_endpoints() -> None:
    names = [f"SEP-{number}" for number in range(1000)]
    probabilities = tuple(f"{1 / (1000 - number):.11f}" for number in range(999))
    rules = Ruleset(
        (
            table(
                "nat",
                nat("prerouting", rule(Jump("SVC"))),
                chain("SVC", *ladder(names, probabilities)),
                *(
                    chain(name, rule(Dnat(f"10.64.{number // 250}.{number % 250}", 80)))
                    for number, name in enumerate(names)
                ),
            ),
        )
    )
    found = ends(walk(rules, packet("10.110.0.5"), HOST))
    assert len(found) == 1000
    assert sum(found.values()) == 1
    assert all(abs(probability - Fraction(1, 1000)) < Fraction(1, 10**6) for probability in found.values())


def test_other_services_are_not_walked() -> None:
    """200,000 rules, of which a packet meets a handful: it takes about as long as among 4,000."""
    assert _seconds_among(50_000) < 10 * _seconds_among(1000)


def _seconds_among(count: int) -> float:
    """Seconds of one walk through the rules of so many Services, when nothing disturbs it."""
    services: dict[ElementKey, ElementData] = {}
    chains = []
    for number in range(count):
        address = f"10.{100 + number // 65536}.{number // 256 % 256}.{number % 256}"
        services[address, "tcp", 80] = Goto(f"s{number}")
        chains.append(chain(f"s{number}", *([rule(Dnat("10.64.1.1", 80))] * 4)))
    sources = mapping(
        "sources",
        (SADDR,),
        {(f"10.{n // 256 % 256}.{n % 256}.0/24",): None for n in range(16_000, 16_000 + count)},
        interval=True,
    )
    rules = Ruleset(
        (
            table(
                "big",
                nat("prerouting", rule(InSet((SADDR,), "sources"), VerdictMap(FRONTEND, "services"))),
                *chains,
                sets=(mapping("services", FRONTEND, services, "verdict"), sources),
            ),
        )
    )
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        assert only(walk(rules, packet("10.100.1.1"), HOST)) == ("delivered", "10.64.1.1:80", False)
        taken.append(time.perf_counter() - start)
    return min(taken)


def test_steps_name_the_element_of_a_set_that_was_met() -> None:
    pods = mapping("pod-cidrs", (SADDR,), {("10.32.0.0/12",): None, ("10.64.0.0/12",): None}, interval=True)
    rules = drops(base("forward", rule(InSet((SADDR,), "pod-cidrs"), DropPacket())), sets=(pods,))
    (outcome,) = walk(rules, packet("10.1.1.1"), HOST).outcomes
    assert outcome.steps[0].what == "source in pod-cidrs { 10.64.0.0/12 }, drop"
