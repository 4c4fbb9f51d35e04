"""The hooks that a packet passes, their order, and rewriting."""

from __future__ import annotations

from tests.netfilter.walk.rulesets import ALL_HOOKS, DADDR, DPORT, HOST, SADDR, base, nat, only, packet, rule, table

from narthex.model.net import IPFamily
from narthex.model.packet import Trace
from narthex.netfilter.ast import (
    Accept,
    Compare,
    CtStatus,
    Dnat,
    DropPacket,
    MarkIs,
    MarkOr,
    Masquerade,
    RejectPacket,
    Ruleset,
    Table,
)
from narthex.netfilter.walk.walk import walk


def hooks_of(trace: Trace) -> list[str]:
    return [step.where.split()[0] for step in trace.outcomes[0].steps]


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
