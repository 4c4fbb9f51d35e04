"""Parsing: dumps of any age and owner; what is not understood is kept, never left out."""

import pytest

from narthex.model.net import IPFamily
from narthex.netfilter.ast import (
    Accept,
    AddressType,
    AnyOf,
    Compare,
    Counter,
    CtState,
    CtStatus,
    Dnat,
    DnatRange,
    DropPacket,
    EveryNth,
    Field,
    Goto,
    IgnoredStatement,
    IpvsMatch,
    IsLocal,
    Jump,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    MatchSet,
    NoTrack,
    PortRange,
    RandomMatch,
    RecentCheck,
    RecentSet,
    RejectPacket,
    Return,
    Rule,
    SetMark,
    TcpFlags,
    UndecidableMatch,
    Unknown,
)
from narthex.netfilter.xtables.lexer import SaveTextError
from narthex.netfilter.xtables.parse import parse_rules, parse_save_text
from narthex.netfilter.xtables.print import save_text
from narthex.netfilter.xtables.values import equal_share, kernel_probability, plain_network

V4, V6 = IPFamily.IPV4, IPFamily.IPV6


def rule_of(text: str, family: IPFamily = V4) -> Rule:
    (rule,) = parse_rules(f"-A X {text}", family)["X"]
    return rule


TCP = Compare(Field.L4PROTO, ("tcp",))


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("-s 10.0.0.1 -j ACCEPT", (Compare(Field.SADDR, ("10.0.0.1",)), Accept())),
        ("-s 10.0.0.1/32 -j ACCEPT", (Compare(Field.SADDR, ("10.0.0.1",)), Accept())),
        ("-d 10.1.2.3/255.255.0.0 -j DROP", (Compare(Field.DADDR, ("10.1.0.0/16",)), DropPacket())),
        ("-s ! 10.0.0.0/8 -j DROP", (Compare(Field.SADDR, ("10.0.0.0/8",), True), DropPacket())),
        ("! --source 10.0.0.0/8 --jump DROP", (Compare(Field.SADDR, ("10.0.0.0/8",), True), DropPacket())),
        ("-s 10.0.0.0/255.0.255.0 -j DROP", (Unknown("-s 10.0.0.0/255.0.255.0"), DropPacket())),
        ("-i eth+ ! -o lo -j X", (Compare(Field.IIFNAME, ("eth*",)), Compare(Field.OIFNAME, ("lo",), True), Jump("X"))),
        ("-p tcp -m tcp --dport 80 -g Y", (TCP, Compare(Field.DPORT, (80,)), Goto("Y"))),
        ("-m tcp -p tcp -d 10.0.0.1 --dport 80 -j Y", (Compare(Field.DADDR, ("10.0.0.1",)), TCP, Compare(Field.DPORT, (80,)), Jump("Y"))),
        ("-p tcp -m tcp --sport 1:5 ! --dport :9 -j Y", (TCP, PortRange(Field.SPORT, 1, 5), PortRange(Field.DPORT, 0, 9, True), Jump("Y"))),
        ("-p tcp -m multiport --dports 80,443 -j Y", (TCP, Compare(Field.DPORT, (80, 443)), Jump("Y"))),
        ("-p tcp -m multiport --dports 80:90,443 -j Y", (TCP, AnyOf(((PortRange(Field.DPORT, 80, 90),), (Compare(Field.DPORT, (443,)),))), Jump("Y"))),
        (
            "-p tcp -m tcp --dport 80 --tcp-flags FIN,SYN,RST,ACK SYN -j Y",
            (TCP, Compare(Field.DPORT, (80,)), TcpFlags(0x17, 0x02), Jump("Y")),
        ),
        ("-m addrtype --dst-type LOCAL -j Y", (IsLocal(Field.DADDR), Jump("Y"))),
        ("-m addrtype ! --src-type LOCAL -j Y", (IsLocal(Field.SADDR, True), Jump("Y"))),
        ("-m addrtype --dst-type MULTICAST -j Y", (AddressType(Field.DADDR, ("multicast",)), Jump("Y"))),
        (
            "-m addrtype --dst-type LOCAL --limit-iface-in -j Y",
            (IsLocal(Field.DADDR), UndecidableMatch("the interface of the address", "-m addrtype --limit-iface-in"), Jump("Y")),
        ),
        ("-m conntrack --ctstate NEW -j Y", (CtState(("new",)), Jump("Y"))),
        ("-m state --state RELATED,ESTABLISHED -j ACCEPT", (CtState(("related", "established")), Accept())),
        ("-m conntrack --ctstate DNAT -j RETURN", (CtStatus(("dnat",)), Return())),
        (
            "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
            (CtState(("related", "established"), True), CtStatus(("dnat",), True), DropPacket()),
        ),
        (
            "-m conntrack --ctstate NEW,DNAT -j DROP",
            (AnyOf(((CtState(("new",)),), (CtStatus(("dnat",)),))), DropPacket()),
        ),
        ("-m conntrack --ctorigdst 10.0.0.1 -j Y", (Compare(Field.ORIG_DADDR, ("10.0.0.1",)), Jump("Y"))),
        ("-m mark ! --mark 0x4000/0x4000 -j RETURN", (MarkIs(0x4000, 0x4000, True), Return())),
        ("-m mark --mark 7 -j RETURN", (MarkIs(7), Return())),
        ("-j MARK --set-xmark 0x8000/0x8000", (MarkOr(0x8000),)),
        ("-j MARK --or-mark 0x4000", (MarkOr(0x4000),)),
        ("-j MARK --xor-mark 0x4000", (MarkXor(0x4000),)),
        ("-j MARK --set-xmark 0x4000/0x0", (MarkXor(0x4000),)),
        ("-j MARK --set-xmark 0x1/0xffffffff", (SetMark(1),)),
        ("-j MASQUERADE", (Masquerade(fully_random=False),)),
        ("-j MASQUERADE --random-fully", (Masquerade(),)),
        ("-p tcp -j MASQUERADE --to-ports 1024-65535", (TCP, Masquerade(fully_random=False))),
        ("-p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80", (TCP, Dnat("10.0.0.1", 80))),
        ("-j DNAT --to-destination 10.0.0.1", (Dnat("10.0.0.1"),)),
        ("-p tcp -j DNAT --to-destination 10.0.0.1-10.0.0.5:80", (TCP, DnatRange("10.0.0.1", "10.0.0.5", 80, 80))),
        ("-j DNAT --to-destination 10.0.0.1 --persistent", (DnatRange("10.0.0.1", "10.0.0.1"),)),
        ("-j REJECT --reject-with icmp-port-unreachable", (RejectPacket(),)),
        ("-j REJECT", (RejectPacket(),)),
        ("-p tcp -j REJECT --reject-with tcp-reset", (TCP, RejectPacket("tcp reset"))),
        ("-j REJECT --reject-with icmp-strange", (Unknown("-j REJECT --reject-with icmp-strange"),)),
        ("-m statistic --mode random --probability 0.50000000000 -j Y", (RandomMatch("0.50000000000"), Jump("Y"))),
        (
            "-m statistic --mode nth --every 3 --packet 0 -j Y",
            (EveryNth(3), Jump("Y")),
        ),
        (
            "-m recent --rcheck --seconds 10800 --reap --name S --mask 255.255.255.255 --rsource -j S",
            (RecentCheck("S", 10800), Jump("S")),
        ),
        ("-m recent --set --name S --rsource -j Y", (RecentSet("S"), Jump("Y"))),
        ("-m recent --update --seconds 60 --name S -j Y", (RecentCheck("S", 60), Jump("Y"))),
        ("-m recent ! --rcheck --seconds 60 --reap --name S -j Y", (Unknown("-m recent ! --rcheck --seconds 60 --reap --name S"), Jump("Y"))),
        ("-m nfacct --nfacct-name localhost_nps_accepted_pkts -j Y", (Counter(), Jump("Y"))),
        ("-m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT", (MatchSet("KUBE-CLUSTER-IP", ("dst", "dst")), Accept())),
        ("-m set ! --match-set A src -j ACCEPT", (MatchSet("A", ("src",), negate=True), Accept())),
        ("-m set --match-set A dst,else -j ACCEPT", (Unknown('-m set --match-set A "dst,else"'), Accept())),
        ("-m set --match-set A dst --packets-gt 5 -j ACCEPT", (Unknown("-m set --match-set A dst --packets-gt 5"), Accept())),
        ("-m ipvs ! --ipvs -j RETURN", (IpvsMatch(negate=True), Return())),
        ("-m ipvs --vaddr 10.0.0.1 --vproto 6 --vport 80 -j DROP", (IpvsMatch("10.0.0.1", "6", 80), DropPacket())),
        ("-m ipvs ! --vaddr 10.0.0.1 -j DROP", (Unknown('-m ipvs ! --vaddr "10.0.0.1"'), DropPacket())),
        ("-m limit --limit 5/sec -j LOG --log-prefix \"-j Y \" --log-level 4", (UndecidableMatch("the number of earlier packets", '-m limit --limit "5/sec"'), IgnoredStatement('-j LOG --log-prefix "-j Y " --log-level 4'))),
        ("-f -j DROP", (Unknown("-f"), DropPacket())),
        ("-c 5 300 -j DROP", (DropPacket(),)),
        ("-j NOTRACK", (NoTrack(),)),
        ("-j CT --notrack", (NoTrack(),)),
        ("-j cali-FORWARD", (Jump("cali-FORWARD"),)),
    ],
)  # fmt: skip
def test_each_match_becomes_a_node_or_stays_as_text(text, expressions):
    assert rule_of(text).expressions == expressions


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("-d fd6e::1/128 -j ACCEPT", (Compare(Field.DADDR, ("fd6e::1",)), Accept())),
        ("-j DNAT --to-destination [fd64::1]:80", (Dnat("fd64::1", 80),)),
        ("-j DNAT --to-destination fd64::1", (Dnat("fd64::1"),)),
        ("-j REJECT --reject-with icmp6-adm-prohibited", (RejectPacket("admin-prohibited"),)),
    ],
)
def test_the_other_family(text, expressions):
    assert rule_of(text, V6).expressions == expressions


@pytest.mark.parametrize(
    ("text", "comment"),
    [
        ('-m comment --comment "ns/name: cluster IP" -j X', "ns/name: cluster IP"),
        ("-m comment --comment plain -j X", "plain"),
        ("-m comment --comment -j -j X", "-j"),
        ('-m comment --comment "-m tcp ! -s" -j X', "-m tcp ! -s"),
        (r'-m comment --comment "a \"b\" \\ \'c\'" -j X', "a \"b\" \\ 'c'"),
        ('-m comment --comment "" -j X', ""),
    ],
)
def test_comments_are_taken_as_they_are(text, comment):
    assert rule_of(text) == Rule((Jump("X"),), comment)


DUMP = """# Generated by iptables-save v1.8.7 on Mon Jan  1 00:00:00 2024
*filter
:INPUT ACCEPT [12:3456]
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
[7:420] -A FORWARD -j DOCKER-USER
[1:60] -A DOCKER-USER -j RETURN
COMMIT
# Completed on Mon Jan  1 00:00:00 2024
*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A POSTROUTING -s 10.244.0.0/16 -d 10.244.0.0/16 -j RETURN
COMMIT
"""


def test_a_whole_dump():
    ruleset = parse_save_text(DUMP, V4)
    assert [table.name for table in ruleset.tables] == ["filter", "nat"]
    forward = ruleset.tables[0].chains["FORWARD"]
    assert (forward.hook.hook, forward.hook.priority, forward.hook.policy) == ("forward", 0, "drop")
    assert forward.rules == (Rule((Jump("DOCKER-USER"),)),)
    assert ruleset.tables[0].chains["DOCKER-USER"].hook is None
    assert ruleset.tables[1].chains["PREROUTING"].hook.priority == -100
    assert ruleset.tables[1].chains["POSTROUTING"].hook.type == "nat"
    assert parse_save_text(save_text(ruleset), V4) == ruleset


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-A INPUT -j ACCEPT\n", "line 1"),
        ("*nat\n:PREROUTING ACCEPT [0:0]\n", "cut off"),
        ("*nat\nhello\nCOMMIT\n", "line 2"),
        ('*nat\n-A X -m comment --comment "open\nCOMMIT\n', "quote"),
        ("*nat\n-A\nCOMMIT\n", "line 2"),
    ],
)
def test_what_is_no_dump_says_where(text, words):
    with pytest.raises(SaveTextError, match=words):
        parse_save_text(text, V4)


def test_a_fragment_may_stand_in_prose():
    fragment = """
The rules are:

[root@node ~]$ iptables-save | grep 30001
-A KUBE-NODEPORTS -p tcp -m comment --comment "default/web:" -m tcp --dport 30001 -j KUBE-SVC-5MRENC7Q6ZQR6GKR
:KUBE-SERVICES - [0:0]
-N EMPTY
# a comment
[note] nothing
"""
    rules = parse_rules(fragment, V4)
    assert list(rules) == ["KUBE-SERVICES", "EMPTY", "KUBE-NODEPORTS"]
    assert rules["KUBE-SERVICES"] == ()
    (rule,) = rules["KUBE-NODEPORTS"]
    assert rule == Rule((TCP, Compare(Field.DPORT, (30001,)), Jump("KUBE-SVC-5MRENC7Q6ZQR6GKR")), "default/web:")


def test_rules_without_a_declared_chain_are_kept():
    table = parse_save_text("*nat\n-A PREROUTING -j A\n-A A -j RETURN\nCOMMIT\n", V4).tables[0]
    assert table.chains["PREROUTING"].hook is not None
    assert table.chains["A"].rules == (Rule((Return(),)),)


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("0.14286", "0.14286000002"),
        ("0.16667", "0.16667000018"),
        ("0.20000", "0.20000000019"),
        ("0.25000", "0.25000000000"),
        ("0.33333", "0.33332999982"),
        ("0.50000", "0.50000000000"),
        ("0.3333333333", "0.33333333349"),
        ("0.1428571429", "0.14285714272"),
        ("1", "1.00000000000"),
        ("0", "0.00000000000"),
    ],
)
def test_probabilities_are_what_the_kernel_gives_back(given, printed):
    assert kernel_probability(given) == printed
    assert kernel_probability(printed) == printed, "printing again is lossless"


def test_an_equal_share_is_ten_decimals_first():
    assert [equal_share(n) for n in (2, 3, 7)] == ["0.50000000000", "0.33333333349", "0.14285714272"]


@pytest.mark.parametrize("text", ["1.1", "-0.1", "x"])
def test_no_probability(text):
    with pytest.raises(ValueError):
        kernel_probability(text)


def test_a_netmask_is_a_prefix_length():
    assert plain_network("10.0.0.0/255.240.0.0") == "10.0.0.0/12"
    assert plain_network("10.0.0.5/255.255.255.255") == "10.0.0.5"
    with pytest.raises(ValueError, match="netmask"):
        plain_network("10.0.0.5/255.0.255.0")
