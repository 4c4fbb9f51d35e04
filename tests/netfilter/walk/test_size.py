"""Large rulesets: branches that meet again, and the time of a walk."""

from __future__ import annotations

import time
from fractions import Fraction

from tests.netfilter.walk.rulesets import (
    FRONTEND,
    HOST,
    SADDR,
    base,
    chain,
    drops,
    ends,
    ladder,
    mapping,
    nat,
    only,
    packet,
    rule,
    table,
)

from narthex.netfilter.ast import (
    Dnat,
    DropPacket,
    ElementData,
    ElementKey,
    Goto,
    InSet,
    Jump,
    RandomMatch,
    Ruleset,
    VerdictMap,
)
from narthex.netfilter.walk.walk import walk

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
