"""Sets and lists that remember clients."""

from __future__ import annotations

from fractions import Fraction

from tests.netfilter.walk.rulesets import HOST, SADDR, chain, ends, ladder, nat, only, packet, rule, table

from narthex.model.packet import Memory, Trace
from narthex.netfilter.ast import Dnat, Goto, InSet, Jump, RandomGoto, RecentCheck, RecentSet, Ruleset, Set, UpdateSet
from narthex.netfilter.walk.walk import walk

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
