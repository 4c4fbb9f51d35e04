"""Jumps, returns, and policies: how chains call each other."""

from __future__ import annotations

from tests.netfilter.walk.rulesets import DADDR, HOST, base, chain, drops, mapping, only, packet, rule, table

from narthex.model.packet import Disposition
from narthex.netfilter.ast import (
    Accept,
    DnatMap,
    DropPacket,
    Goto,
    Jump,
    MarkIs,
    MarkOr,
    RejectPacket,
    Return,
    Ruleset,
    VerdictMap,
)
from narthex.netfilter.walk.walk import walk

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
