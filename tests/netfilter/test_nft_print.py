"""Typed rules to nft's text: the exact words, and nothing that a stranger could have written."""

import pytest

from narthex.model.net import IPFamily
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
    Field,
    Goto,
    Hook,
    InSet,
    IsLocal,
    Jump,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    PortRange,
    RandomGoto,
    RandomMatch,
    RecentCheck,
    RejectPacket,
    Return,
    Rule,
    Set,
    Slot,
    Table,
    TcpReset,
    Unknown,
    Unprintable,
    UpdateSet,
    VerdictMap,
)
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.netfilter.nft.print import duration_text, nft_script, priority_text, rule_text

FRONTEND = (Field.DADDR, Field.L4PROTO, Field.DPORT)

WORDS = [
    (Compare(Field.SADDR, ("10.0.0.0/8",)), "ip saddr 10.0.0.0/8"),
    (Compare(Field.DADDR, ("127.0.0.0/8",), negate=True), "ip daddr != 127.0.0.0/8"),
    (Compare(Field.L4PROTO, ("tcp", "udp")), "meta l4proto { tcp, udp }"),
    (Compare(Field.DPORT, (80,)), "th dport 80"),
    (Compare(Field.IIFNAME, ("veth*",)), 'iifname "veth*"'),
    (Compare(Field.IIFNAME, ("e0.1",)), 'iifname "e0.1"'),
    (PortRange(Field.DPORT, 80, 90), "th dport 80-90"),
    (IsLocal(Field.SADDR), "fib saddr type local"),
    (IsLocal(Field.DADDR, negate=True), "fib daddr type != local"),
    (CtState(("new",)), "ct state new"),
    (TcpReset(), "tcp flags rst"),
    (CtStatus(("dnat",), negate=True), "ct status ! dnat"),
    (MarkIs(0x4000, 0x4000), "meta mark & 0x00004000 == 0x00004000"),
    (MarkIs(7, negate=True), "meta mark != 0x00000007"),
    (InSet((Field.SADDR,), "pod-cidrs"), "ip saddr @pod-cidrs"),
    (InSet((*FRONTEND, Field.SADDR), "x", True), "ip daddr . meta l4proto . th dport . ip saddr != @x"),
    (VerdictMap(FRONTEND, "services"), "ip daddr . meta l4proto . th dport vmap @services"),
    (DnatMap((Field.DADDR, Slot(3)), "endpoints"), "dnat ip to ip daddr . numgen random mod 3 map @endpoints"),
    (Dnat("10.64.1.10", 80), "dnat to 10.64.1.10:80"),
    (Dnat("10.64.1.10"), "dnat to 10.64.1.10"),
    (Dnat("fd64::1", 80), "dnat to [fd64::1]:80"),
    (Masquerade(), "masquerade fully-random"),
    (Masquerade(False), "masquerade"),
    (MarkOr(0x4000), "meta mark set meta mark | 0x00004000"),
    (MarkXor(0x4000), "meta mark set meta mark ^ 0x00004000"),
    (RandomGoto(("a", "b")), "numgen random mod 2 vmap { 0 : goto a, 1 : goto b }"),
    (UpdateSet((Field.SADDR,), "affinity-x"), "update @affinity-x { ip saddr }"),
    (RejectPacket(), "reject"),
    (RejectPacket("host-unreachable"), "reject with icmp host-unreachable"),
    (RejectPacket("tcp reset"), "reject with tcp reset"),
    (Jump("a"), "jump a"),
    (Goto("a"), "goto a"),
    (Return(), "return"),
    (Accept(), "accept"),
    (DropPacket(), "drop"),
    (Counter(), "counter"),
]


@pytest.mark.parametrize(("expression", "text"), WORDS, ids=[text for _, text in WORDS])
def test_expression_prints_and_parses_back(expression, text):
    rule = Rule((expression,))
    assert rule_text(rule, IPFamily.IPV4) == text
    chain = Chain(name="c", rules=(rule,))
    table = Table(family=IPFamily.IPV4, name="t", chains={"c": chain})
    assert parse_ruleset(nft_script(table)).tables == (table,)


@pytest.mark.parametrize(
    "expression",
    [
        Compare(Field.SADDR, ("10.0.0.1; flush ruleset",)),
        Compare(Field.SADDR, ("{ 10.0.0.1 }",)),
        Compare(Field.SADDR, ()),
        Compare(Field.L4PROTO, ("tcp }",)),
        Compare(Field.IIFNAME, ('a" drop comment "',)),
        Compare(Field.IIFNAME, ("a b",)),
        Compare(Field.IIFNAME, ("a*b",)),
        InSet((Field.SADDR,), "x } "),
        Jump("a\nflush ruleset"),
        Jump("1a"),
        Jump("a" * 128),
        Jump(""),
        Goto("../é"),
        Dnat("10.0.0.1:80 accept", 80),
        CtState(("new accept",)),
        RejectPacket("port-unreachable accept"),
        IsLocal(Field.DPORT),
        RandomMatch("0.5"),
        RecentCheck("x", 5),
        Unknown("accept"),
    ],
    ids=repr,
)
def test_what_is_no_word_of_nft_is_refused(expression):
    with pytest.raises(Unprintable):
        rule_text(Rule((expression,)), IPFamily.IPV4)


@pytest.mark.parametrize("comment", ['a" accept', "a\nb", "x" * 129, "é"])
def test_comment_cannot_leave_its_quotes(comment):
    with pytest.raises(Unprintable):
        rule_text(Rule((Accept(),), comment), IPFamily.IPV4)


@pytest.mark.parametrize(
    ("priority", "hook", "text"),
    [
        (-110, "prerouting", "dstnat - 10"),
        (-100, "prerouting", "dstnat"),
        (-100, "output", "-100"),
        (-110, "output", "-110"),
        (0, "input", "filter"),
        (5, "input", "filter + 5"),
        (100, "postrouting", "srcnat"),
        (100, "output", "100"),
        (-150, "output", "mangle"),
        (-400, "output", "-400"),
    ],
)
def test_priority_has_its_name_where_the_hook_has_it(priority, hook, text):
    assert priority_text(priority, hook) == text
    chain = Chain(name="c", hook=Hook(type="filter", hook=hook, priority=priority))
    table = Table(family=IPFamily.IPV4, name="t", chains={"c": chain})
    assert parse_ruleset(nft_script(table)).tables[0].chains["c"] == chain


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (10800, "3h"), (90061, "1d1h1m1s"), (86400, "1d")])
def test_duration(seconds, text):
    assert duration_text(seconds) == text


SETS = [
    Set(name="cluster-ips", key=(Field.DADDR,), elements={("10.96.0.1",): None}),
    Set(name="cidrs", key=(Field.SADDR,), interval=True, elements={("10.0.0.0/8",): None, ("11.0.0.1",): None}),
    Set(name="clients", key=(Field.SADDR,), dynamic=True, timeout=10800, size=65535),
    Set(
        name="services",
        key=FRONTEND,
        data="verdict",
        counter=True,
        elements={
            ("10.96.0.1", "tcp", 80): Goto("c"),
            ("10.96.0.1", "udp", 80): Return(),
            ("1.2.3.4", "sctp", 9): DropPacket(),
        },
    ),
    Set(
        name="endpoints",
        key=(*FRONTEND, Slot(4294967295)),
        data="endpoint",
        elements={("10.96.0.1", "tcp", 80, 0): ("10.64.1.10", 8080)},
    ),
]


@pytest.mark.parametrize("one", SETS, ids=lambda one: one.name)
def test_set_prints_and_parses_back(one):
    table = Table(family=IPFamily.IPV4, name="t", sets={one.name: one})
    assert parse_ruleset(nft_script(table)).tables == (table,)


def test_table_text():
    chain = Chain(
        name="base",
        hook=Hook(type="filter", hook="prerouting", priority=-110),
        rules=(Rule((CtState(("new",)), Jump("c")), "why"),),
    )
    table = Table(family=IPFamily.IPV6, name="t", chains={"base": chain}, sets={"s": SETS[2]})
    assert nft_script(table) == (
        "table ip6 t {\n"
        "\tset clients {\n"
        "\t\ttypeof ip6 saddr\n"
        "\t\tsize 65535\n"
        "\t\tflags dynamic,timeout\n"
        "\t\ttimeout 3h\n"
        "\t}\n"
        "\tchain base {\n"
        "\t\ttype filter hook prerouting priority dstnat - 10; policy accept;\n"
        '\t\tct state new jump c comment "why"\n'
        "\t}\n"
        "}\n"
    )
