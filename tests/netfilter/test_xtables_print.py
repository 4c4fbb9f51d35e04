"""Printing: the form of iptables-save, and nothing that could be read as more than one word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import IPFamily
from narthex.netfilter.ast import (
    Accept,
    Chain,
    Compare,
    CtState,
    CtStatus,
    Dnat,
    DnatMap,
    DropPacket,
    Field,
    Goto,
    Hook,
    IsLocal,
    Jump,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    PortRange,
    RandomMatch,
    RecentCheck,
    RecentSet,
    RejectPacket,
    Return,
    Rule,
    Ruleset,
    Set,
    Table,
    Unknown,
    Unprintable,
)
from narthex.netfilter.xtables.parse import parse_save_text
from narthex.netfilter.xtables.print import quoted, rule_text, save_text
from narthex.netfilter.xtables.values import hook_of

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
TCP = Compare(Field.L4PROTO, ("tcp",))


def table_of(*rules: Rule, family: IPFamily = V4, chain: str = "KUBE-SERVICES") -> Ruleset:
    return Ruleset((Table(family=family, name="nat", chains={chain: Chain(name=chain, rules=rules)}),))


@pytest.mark.parametrize(
    ("rule", "family", "text"),
    [
        (
            Rule(
                (
                    Compare(Field.SADDR, ("10.244.0.0/16",), True),
                    Compare(Field.DADDR, ("10.96.0.10",)),
                    Compare(Field.L4PROTO, ("udp",)),
                    Compare(Field.DPORT, (53,)),
                    Jump("KUBE-MARK-MASQ"),
                ),
                "kube-system/kube-dns:dns cluster IP",
            ),
            V4,
            '! -s 10.244.0.0/16 -d 10.96.0.10/32 -p udp -m comment --comment "kube-system/kube-dns:dns cluster IP"'
            " -m udp --dport 53 -j KUBE-MARK-MASQ",
        ),
        (Rule((Compare(Field.DADDR, ("fd6e::1",)), Accept())), V6, "-d fd6e::1/128 -j ACCEPT"),
        (Rule((Compare(Field.IIFNAME, ("veth*",), True), Return())), V4, "! -i veth+ -j RETURN"),
        (Rule((Compare(Field.OIFNAME, ("eth0.5",)), Goto("X"))), V4, "-o eth0.5 -g X"),
        (
            Rule((TCP, Compare(Field.SPORT, (1, 2)), PortRange(Field.DPORT, 30000, 32767, True), DropPacket())),
            V4,
            "-p tcp -m multiport --sports 1,2 -m tcp ! --dport 30000:32767 -j DROP",
        ),
        (Rule((IsLocal(Field.DADDR), Jump("KUBE-NODEPORTS"))), V4, "-m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"),
        (Rule((IsLocal(Field.SADDR, True), Accept())), V4, "-m addrtype ! --src-type LOCAL -j ACCEPT"),
        (
            Rule((CtState(("related", "established"), True), CtStatus(("dnat",), True), DropPacket())),
            V4,
            "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
        ),
        (
            Rule((CtState(("new",)), CtStatus(("dnat",)), Return())),
            V4,
            "-m conntrack --ctstate NEW -m conntrack --ctstate DNAT -j RETURN",
        ),
        (Rule((MarkIs(0x4000, 0x4000, True), Return())), V4, "-m mark ! --mark 0x4000/0x4000 -j RETURN"),
        (Rule((MarkIs(7), Accept())), V4, "-m mark --mark 0x7 -j ACCEPT"),
        (Rule((MarkOr(0x4000),)), V4, "-j MARK --set-xmark 0x4000/0x4000"),
        (Rule((MarkXor(0x4000),)), V4, "-j MARK --set-xmark 0x4000/0x0"),
        (Rule((Masquerade(),)), V4, "-j MASQUERADE --random-fully"),
        (Rule((Masquerade(fully_random=False),)), V4, "-j MASQUERADE"),
        (
            Rule((TCP, RecentSet("KUBE-SEP-A"), Dnat("10.0.0.1", 80))),
            V4,
            "-p tcp -m recent --set --name KUBE-SEP-A --mask 255.255.255.255 --rsource"
            " -m tcp -j DNAT --to-destination 10.0.0.1:80",
        ),
        (Rule((TCP, Dnat("fd64::1", 80))), V6, "-p tcp -m tcp -j DNAT --to-destination [fd64::1]:80"),
        (Rule((Dnat("10.0.0.1"),)), V4, "-j DNAT --to-destination 10.0.0.1"),
        (
            Rule((RecentCheck("KUBE-SEP-A", 600), Jump("KUBE-SEP-A"))),
            V6,
            "-m recent --rcheck --seconds 600 --reap --name KUBE-SEP-A"
            " --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -j KUBE-SEP-A",
        ),
        (
            Rule((RandomMatch("0.33333333349"), Jump("A"))),
            V4,
            "-m statistic --mode random --probability 0.33333333349 -j A",
        ),
        (Rule((RejectPacket(),)), V4, "-j REJECT --reject-with icmp-port-unreachable"),
        (Rule((RejectPacket(),)), V6, "-j REJECT --reject-with icmp6-port-unreachable"),
        (Rule((), "words only"), V4, '-m comment --comment "words only"'),
        (Rule((Unknown('-m string --string "a b"'), Accept())), V4, '-m string --string "a b" -j ACCEPT'),
    ],
)
def test_a_rule_is_printed_as_iptables_save_prints_it(rule, family, text):
    assert rule_text(rule, family) == " " + text
    assert parse_save_text(save_text(table_of(rule, family=family)), family).tables[0].chains[
        "KUBE-SERVICES"
    ].rules == (rule,)


def test_a_table_is_printed_with_its_policies():
    rules = Ruleset(
        (
            Table(
                family=V4,
                name="filter",
                chains={
                    "FORWARD": Chain(name="FORWARD", hook=hook_of("filter", "FORWARD", "DROP")),
                    "MINE": Chain(name="MINE", rules=(Rule((Accept(),)),)),
                },
            ),
        )
    )
    assert save_text(rules) == "*filter\n:FORWARD DROP [0:0]\n:MINE - [0:0]\n-A MINE -j ACCEPT\nCOMMIT\n"
    assert parse_save_text(save_text(rules), V4) == rules


HOSTILE = [
    'x" -j ACCEPT',
    "x' -j ACCEPT",
    "x\\",
    '\\" -j ACCEPT',
    "-j",
    "--comment",
    "$(reboot)",
    "`reboot`",
    "; flush ruleset",
    "# nothing",
    "",
    "é 漢字",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_comment_stays_a_comment(text):
    rules = table_of(Rule((DropPacket(),), text))
    printed = save_text(rules)
    assert len(printed.splitlines()) == 4
    assert parse_save_text(printed, V4) == rules


@pytest.mark.parametrize(
    "text", ["a\nCOMMIT", "a\r-A X", "a\x00", "a\x1b[2J", "a\u2028b", "\ud800", "x" * 256, "é" * 128]
)
def test_a_comment_that_cannot_be_kept_is_refused(text):
    with pytest.raises(Unprintable):
        save_text(table_of(Rule((), text)))


@given(st.text(max_size=80))
def test_any_comment_is_kept_or_refused(text):
    rules = table_of(Rule((Accept(),), text))
    try:
        printed = save_text(rules)
    except Unprintable:
        assert not text.isprintable() or len(text.encode()) > 255
    else:
        assert parse_save_text(printed, V4) == rules


BAD_WORDS = ["", " ", "a b", "-j", "!", "a\nb", 'a"b', "a'b", "a;b", "a$(b)", "a/../b", "x" * 300]


@pytest.mark.parametrize("word", BAD_WORDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda word: Jump(word),
        lambda word: Goto(word),
        lambda word: Compare(Field.IIFNAME, (word,)),
        lambda word: Compare(Field.OIFNAME, (word + "*",)),
        lambda word: Compare(Field.SADDR, (word,)),
        lambda word: Compare(Field.DADDR, (word,)),
        lambda word: Compare(Field.L4PROTO, (word,)),
        lambda word: RecentSet(word),
        lambda word: RecentCheck(word, 5),
        lambda word: RandomMatch(word),
        lambda word: Dnat(word, None),
        lambda word: RejectPacket(word),
    ],
)
def test_a_word_that_is_no_word_is_refused(make, word):
    with pytest.raises(Unprintable):
        rule_text(Rule((make(word),)), V4)


@pytest.mark.parametrize(
    "rule",
    [
        Rule((Compare(Field.SADDR, ("10.0.0.1", "10.0.0.2")),)),
        Rule((Compare(Field.DPORT, (80,)),)),
        Rule((Compare(Field.L4PROTO, ("icmp",)), Compare(Field.DPORT, (80,)))),
        Rule((TCP, Compare(Field.DPORT, (70000,)))),
        Rule((TCP, Compare(Field.DPORT, ("80 -j ACCEPT",)))),
        Rule((Dnat("10.0.0.1", 80),)),
        Rule((TCP, Dnat("10.0.0.0/8", 80))),
        Rule((DnatMap((Field.DADDR,), "endpoints"),)),
        Rule((IsLocal(Field.DADDR), Compare(Field.SADDR, ("10.0.0.1",)))),
        Rule((RejectPacket("no-route"),)),
        Rule((CtState(("strange",)),)),
        Rule((Unknown("-j X\nCOMMIT"),)),
    ],
)
def test_what_iptables_has_no_form_for_is_refused(rule):
    with pytest.raises(Unprintable):
        rule_text(rule, V4)


@pytest.mark.parametrize(
    "table",
    [
        Table(family=V4, name="narthex"),
        Table(family=None, name="nat"),
        Table(family=V4, name="nat", sets={"a": Set(name="a", key=(Field.DADDR,))}),
        Table(family=V4, name="nat", chains={"X": Chain(name="X", hook=Hook(type="nat", hook="input", priority=1))}),
        Table(family=V4, name="nat", chains={"OUTPUT": Chain(name="OUTPUT")}),
        Table(family=V4, name="nat", chains={"a b": Chain(name="a b")}),
    ],
)
def test_tables_of_nftables_are_refused(table):
    with pytest.raises(Unprintable):
        save_text(Ruleset((table,)))


def test_only_odd_words_get_quotes():
    assert quoted("KUBE_a-1") == "KUBE_a-1"
    assert quoted("a/b:c") == '"a/b:c"'
    assert quoted("it's") == '"it\\\'s"'
