"""Single matches, and matches that are not understood."""

from __future__ import annotations

from fractions import Fraction

from tests.netfilter.walk.rulesets import (
    DADDR,
    DPORT,
    HOST,
    PROTO,
    SADDR,
    base,
    drops,
    ends,
    mapping,
    only,
    packet,
    rule,
    table,
)

from narthex.model.net import Protocol
from narthex.model.packet import Disposition
from narthex.netfilter.ast import (
    Compare,
    CtState,
    CtStatus,
    DropPacket,
    Expression,
    Field,
    InSet,
    IsLocal,
    MarkIs,
    MarkOr,
    MarkXor,
    PortRange,
    RandomMatch,
    RejectPacket,
    Ruleset,
    Set,
    Unknown,
)
from narthex.netfilter.walk.walk import walk

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
    # Where others have ports, a packet without them has a checksum, which may be an element.
    pairs = Set(name="pairs", key=(Field.DADDR, DPORT), elements={("10.1.1.1", 80): None})
    rules = drops(base("prerouting", rule(InSet(pairs.key, "pairs"), DropPacket())), sets=(pairs,))
    assert only(walk(rules, packet("10.1.1.1", **icmp), HOST))[0] == "unsupported"
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
