"""The text of `nft list ruleset`, ours and others'."""

import pytest

from narthex.model.net import IPFamily
from narthex.netfilter.ast import (
    Accept,
    AnyOf,
    Compare,
    Counter,
    CtState,
    CtStatus,
    Dnat,
    DnatMap,
    DnatRange,
    DropPacket,
    Field,
    Goto,
    HashedFields,
    Hook,
    IgnoredStatement,
    InSet,
    IsLocal,
    Jump,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    RandomGoto,
    RandomMap,
    RejectPacket,
    Return,
    Rule,
    SetMark,
    Slot,
    TcpFlags,
    TcpReset,
    UndecidableMatch,
    Unknown,
    UpdateSet,
    VerdictMap,
)
from narthex.netfilter.nft.parse import parse_ruleset

FRONTEND = (Field.DADDR, Field.L4PROTO, Field.DPORT)


def rule(text, family="ip"):
    parsed = parse_ruleset(f"table {family} t {{\n\tchain c {{\n\t\t{text}\n\t}}\n}}\n")
    (one,) = parsed.tables[0].chains["c"].rules
    return one


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("counter packets 12 bytes 720 drop", (Counter(), DropPacket())),
        ("tcp dport 80 accept", (Compare(Field.L4PROTO, ("tcp",)), Compare(Field.DPORT, (80,)), Accept())),
        ("ip protocol tcp accept", (Compare(Field.L4PROTO, ("tcp",)), Accept())),
        ('meta iifname != "lo" accept', (Compare(Field.IIFNAME, ("lo",), True), Accept())),
        ('iifname { "a", "b" } accept', (Compare(Field.IIFNAME, ("a", "b")), Accept())),
        ("ct state established,related accept", (CtState(("established", "related")), Accept())),
        ("ct state { established, related } accept", (CtState(("established", "related")), Accept())),
        ("ct state != new accept", (CtState(("new",), True), Accept())),
        ("tcp flags rst drop", (TcpReset(), DropPacket())),
        ("tcp flags & rst == rst drop", (TcpReset(), DropPacket())),
        ("tcp flags rst / rst drop", (TcpReset(), DropPacket())),
        ("tcp flags rst / syn,rst drop", (TcpFlags(6, 4), DropPacket())),
        ("tcp flags & (syn | rst) == syn drop", (TcpFlags(6, 2), DropPacket())),
        ("tcp flags syn drop", (TcpFlags(2, 0, negate=True), DropPacket())),
        ("ct status dnat accept", (CtStatus(("dnat",)), Accept())),
        ("ct status != dnat accept", (Unknown("ct status != dnat"), Accept())),
        ("meta mark & 0x00004000 != 0x00000000 return", (MarkIs(0, 0x4000, True), Return())),
        ("meta mark 0x80000000/1 return", (MarkIs(0x80000000, 0x80000000), Return())),
        ("mark and 0x4000 == 0x4000 return", (MarkIs(0x4000, 0x4000), Return())),
        ("meta mark set mark or 0x4000", (MarkOr(0x4000),)),
        ("meta mark set meta mark ^ 0x00004000", (MarkXor(0x4000),)),
        ("meta mark set 0x00000001", (SetMark(1),)),
        ("reject with icmp port-unreachable", (RejectPacket(),)),
        ("reject with icmp type host-unreachable", (RejectPacket("host-unreachable"),)),
        ("masquerade fully-random,persistent", (Masquerade(),)),
        ("dnat ip to 10.0.0.1:80", (Dnat("10.0.0.1", 80),)),
        ("dnat ip6 to [fd00::1]:80", (Dnat("fd00::1", 80),)),
        ("dnat to fd00::1", (Dnat("fd00::1"),)),
        ("dnat to 10.0.0.1-10.0.0.9", (DnatRange("10.0.0.1", "10.0.0.9"),)),
        ("dnat ip to ip daddr . numgen random mod 3 map @m", (DnatMap((Field.DADDR, Slot(3)), "m"),)),
        ("numgen random mod 2 vmap { 0 : goto a, 1 : goto b }", (RandomGoto(("a", "b")),)),
        ("numgen inc mod 2 vmap { 0 : goto a, 1 : goto b }", (RandomGoto(("a", "b")),)),
        (
            "dnat ip to jhash ip saddr mod 1021 seed 0x2a map @m",
            (DnatMap((HashedFields((Field.SADDR,), 1021, 42),), "m"),),
        ),
        (
            "jhash ip saddr . tcp dport mod 2 vmap { 0 : goto a, 1 : goto b }",
            (RandomMap(2, ((0, 0, Goto("a")), (1, 1, Goto("b"))), HashedFields((Field.SADDR, Field.DPORT), 2)),),
        ),
        (
            "dnat to jhash ip saddr mod 2 seed 0x7 offset 5 map { 5 : 10.0.0.1, 6 : 10.0.0.2 }",
            (
                RandomMap(
                    2, ((0, 0, Dnat("10.0.0.1")), (1, 1, Dnat("10.0.0.2"))), HashedFields((Field.SADDR,), 2, 7, 5)
                ),
            ),
        ),
        ("dnat to symhash mod 9 map @m", (DnatMap((HashedFields((), 9),), "m"),)),
        ("jhash ip saddr mod 4 seed 0x1 vmap @v", (VerdictMap((HashedFields((Field.SADDR,), 4, 1),), "v"),)),
        ("jhash ip saddr mod 2 seed 0x5 1 accept", (Unknown("jhash ip saddr mod 2 seed 0x5 1"), Accept())),
        ("update @s { ip saddr timeout 3h }", (UpdateSet((Field.SADDR,), "s"),)),
        ("ip6 saddr ::ffff:10.0.0.1 accept", (Compare(Field.SADDR, ("::ffff:a00:1",)), Accept())),
        (
            'limit rate 5/second burst 5 packets log prefix "drop accept" drop',
            (
                UndecidableMatch("the number of earlier packets", "limit rate 5/second burst 5 packets"),
                IgnoredStatement('log prefix "drop accept"'),
                DropPacket(),
            ),
        ),
        ("tcp flags & (fin | syn) == fin drop", (TcpFlags(3, 1), DropPacket())),
        (
            "meta l4proto . th dport { tcp . 80 } accept",
            (AnyOf(((Compare(Field.L4PROTO, ("tcp",)), Compare(Field.DPORT, (80,))),)), Accept()),
        ),
        ('xt match "comment" counter jump KUBE-SEP', (Counter(), Jump("KUBE-SEP"))),
    ],
    ids=str,
)
def test_rule(text, expressions):
    assert rule(text) == Rule(expressions)


def test_comment_is_kept_apart():
    assert rule('ip daddr @x reject comment "no } endpoints"') == Rule(
        (InSet((Field.DADDR,), "x"), RejectPacket()), "no } endpoints"
    )


def test_handles_and_remarks_are_passed_over():
    text = """# Warning: table ip t is managed by iptables-nft, do not touch!
table ip t { # handle 1
\tchain c { # handle 2
\t\ttype filter hook input priority filter - 5; policy drop; # handle 9
\t\taccept # handle 3
\t}
}
"""
    (table,) = parse_ruleset(text).tables
    assert table.chains["c"].hook == Hook(type="filter", hook="input", priority=-5, policy="drop")
    assert table.chains["c"].rules == (Rule((Accept(),)),)


def test_other_families_and_objects_are_passed_over():
    text = """table bridge b {
\tchain c {
\t\ttype filter hook input priority 0; policy accept;
\t}
}
table inet f {
\tcomment "ours"
\tflags dormant
\tflowtable ft {
\t\thook ingress priority 0
\t\tdevices = { eth0 }
\t}
\tct helper h {
\t\ttype "ftp" protocol tcp
\t}
\tset unknown-key {
\t\ttype mark
\t\telements = { 0x1 }
\t}
\tmap unknown-data {
\t\ttype ipv4_addr : mark
\t\telements = { 10.0.0.1 : 0x1 }
\t}
\tset ports {
\t\ttype inet_service
\t\tflags interval
\t\telements = { 80-90 }
\t}
\tchain input {
\t\ttype filter hook input priority 0
\t\tpolicy drop
\t\tip saddr 10.0.0.0/8 accept
\t}
}
"""
    (table,) = parse_ruleset(text).tables
    assert table.family is None
    assert [(one.name, set(one.elements)) for one in table.sets.values()] == [("ports", {("80-90",)})]
    assert table.chains["input"].hook == Hook(type="filter", hook="input", priority=0, policy="drop")
    assert table.chains["input"].rules == (Rule((Compare(Field.SADDR, ("10.0.0.0/8",)), Accept())),)


def test_one_line_forms():
    (table,) = parse_ruleset("table ip t { chain c { ip saddr 10.0.0.1 accept; drop; }; }").tables
    assert table.chains["c"].rules == (Rule((Compare(Field.SADDR, ("10.0.0.1",)), Accept())), Rule((DropPacket(),)))


def test_blocks_of_one_table_are_one_table():
    (table,) = parse_ruleset(
        "table ip t {\n chain c {\n accept\n }\n}\ntable ip t {\n chain c {\n drop\n }\n}\n"
    ).tables
    assert table.chains["c"].rules == (Rule((Accept(),)), Rule((DropPacket(),)))


@pytest.mark.parametrize("text", ["", "}", "table", "table ip", "table ip t {", 'table ip t { chain c { "', "\0\x01"])
def test_cut_text_does_not_fail(text):
    parse_ruleset(text)


def test_elements_with_counters_ranges_and_times():
    text = """table ip t {
\tmap services {
\t\ttypeof ip daddr . meta l4proto . th dport : verdict
\t\tcounter
\t\telements = { 1.2.3.4 . sctp . 9 counter packets 1 bytes 60 : drop,
\t\t\t     10.96.0.1 . tcp . 80 counter packets 0 bytes 0 comment "x" : goto send-c2 }
\t}
\tset ranges {
\t\ttype ipv4_addr
\t\tflags interval
\t\telements = { 10.0.0.0/8, 11.0.0.4-11.0.0.9,
\t\t\t     12.0.0.1 }
\t}
\tset clients {
\t\ttypeof ip saddr
\t\tsize 65535
\t\tflags dynamic,timeout
\t\ttimeout 3h
\t\telements = { 10.64.1.1 expires 2h59m59s900ms }
\t}
}
"""
    (table,) = parse_ruleset(text).tables
    assert dict(table.sets["services"].elements) == {
        ("1.2.3.4", "sctp", 9): DropPacket(),
        ("10.96.0.1", "tcp", 80): Goto("send-c2"),
    }
    assert set(table.sets["ranges"].elements) == {("10.0.0.0/8",), ("11.0.0.4/30",), ("11.0.0.8/31",), ("12.0.0.1",)}
    clients = table.sets["clients"]
    assert (clients.dynamic, clients.timeout, clients.size, dict(clients.elements)) == (True, 10800, 65535, {})


KUBE_PROXY = """table ip kube-proxy {
\tcomment "rules for kube-proxy"

\tset cluster-ips {
\t\ttype ipv4_addr
\t\tcomment "Active ClusterIPs"
\t\telements = { 10.96.0.1, 10.96.0.10 }
\t}

\tmap service-ips {
\t\ttype ipv4_addr . inet_proto . inet_service : verdict
\t\tcomment "ClusterIP, ExternalIP and LoadBalancer IP traffic"
\t\telements = { 10.96.0.1 . tcp . 443 : goto service-2QRHZV4L-default/kubernetes/tcp/https }
\t}

\tchain cluster-ips-check {
\t\tip daddr @cluster-ips reject comment "Reject traffic to invalid ports of ClusterIPs"
\t\tip daddr { 10.96.0.0/12 } drop comment "Drop traffic to unallocated ClusterIPs"
\t}

\tchain service-2QRHZV4L-default/kubernetes/tcp/https {
\t\tip daddr 10.96.0.1 tcp dport 443 ip saddr != 10.244.0.0/16 jump mark-for-masquerade
\t\tnumgen random mod 1 vmap { 0 : goto endpoint-PX5T3GHR-default/kubernetes/tcp/https__172.18.0.3/6443 }
\t}

\tchain endpoint-PX5T3GHR-default/kubernetes/tcp/https__172.18.0.3/6443 {
\t\tip saddr 172.18.0.3 jump mark-for-masquerade
\t\tmeta l4proto tcp dnat to 172.18.0.3:6443
\t}

\tchain nat-prerouting {
\t\ttype nat hook prerouting priority dstnat; policy accept;
\t\tjump services
\t}

\tchain services {
\t\tip daddr . meta l4proto . th dport vmap @service-ips
\t\tfib daddr type local ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @service-nodeports
\t}
}
"""


def test_kube_proxy_layout_is_understood():
    (table,) = parse_ruleset(KUBE_PROXY).tables
    assert (table.family, table.name) == (IPFamily.IPV4, "kube-proxy")
    service = "service-2QRHZV4L-default/kubernetes/tcp/https"
    assert dict(table.sets["service-ips"].elements) == {("10.96.0.1", "tcp", 443): Goto(service)}
    assert table.chains["cluster-ips-check"].rules[1].expressions == (
        Compare(Field.DADDR, ("10.96.0.0/12",)),
        DropPacket(),
    )
    assert table.chains["services"].rules == (
        Rule((VerdictMap(FRONTEND, "service-ips"),)),
        Rule(
            (
                IsLocal(Field.DADDR),
                Compare(Field.DADDR, ("127.0.0.0/8",), True),
                VerdictMap((Field.L4PROTO, Field.DPORT), "service-nodeports"),
            )
        ),
    )
    unknown = [
        expression
        for chain in table.chains.values()
        for one in chain.rules
        for expression in one.expressions
        if isinstance(expression, Unknown)
    ]
    assert unknown == []
