"""Sets of ipset: text, families, and what is in them."""

import pytest

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Field, Unprintable
from narthex.netfilter.ipset import IpSet, IpsetTextError, entry_line, ipset_save_text, parse_ipsets
from narthex.netfilter.walk.lookup import ipset_fields, ipset_index

V4, V6 = IPFamily
BOTH = ("dst", "dst")


def test_what_is_printed_is_read_back():
    sets = [
        IpSet("KUBE-CLUSTER-IP", "hash:ip,port", V4, frozenset({"10.110.0.5,tcp:80", "10.110.0.5,sctp:80"})),
        IpSet("KUBE-6-LOAD-BALANCER-SOURCE-CID", "hash:ip,port,net", V6, frozenset({"fd6e::1,udp:53,fd00::/8"})),
        IpSet("KUBE-NODE-PORT-TCP", "bitmap:port", V4, frozenset({"31005", "31006"})),
    ]
    assert parse_ipsets(ipset_save_text(sets)) == {held.name: held for held in sets}


def test_what_kernels_of_all_ages_print():
    held = parse_ipsets(
        "create A hash:ip,port family inet hashsize 1024 maxelem 65536 bucketsize 12 initval 0xc0ffee\n"
        "add A 10.0.0.1,tcp:80\n"
        "create B hash:net family inet6 hashsize 64 maxelem 9 counters comment\n"
        'add B fd00:0::/8 packets 5 bytes 300 comment "one two"\n'
        "create C hash:ip,port,ip family inet hashsize 1024 maxelem 65536 timeout 0\n"
        "add C 010.1.2.3,tcp:80,10.1.2.3 timeout 0\n"
        "COMMIT\n"
    )
    assert held["A"] == IpSet("A", "hash:ip,port", V4, frozenset({"10.0.0.1,tcp:80"}))
    assert held["B"] == IpSet("B", "hash:net", V6, frozenset({"fd00::/8"}))
    assert held["C"].entries == {"10.1.2.3,tcp:80,10.1.2.3"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("add A 10.0.0.1", "line 1: 'add A 10.0.0.1': the set A was not created before"),
        ("create A hash:ip\nflush A", "line 2: 'flush A' is not a line of `ipset save`"),
        ("create A", "line 1: 'create A' is not a line"),
    ],
)
def test_errors_name_the_line(text, line):
    with pytest.raises(IpsetTextError) as caught:
        parse_ipsets(text)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("create A list:set size 8\nadd A B", "list:set"),
        ("create A hash:ip,mark family inet", "hash:ip,mark"),
        ("create A hash:ip family inet netmask 24", "netmask"),
        ("create A hash:net family inet\nadd A 10.0.0.0/8 nomatch", "nomatch"),
    ],
)
def test_what_is_not_understood_is_kept_and_says_so(text, why):
    with pytest.raises(ValueError, match="is not understood") as caught:
        ipset_fields(parse_ipsets(text)["A"], BOTH)
    assert why in str(caught.value)


@pytest.mark.parametrize("entry", ["10.0.0.1,tcp:80 nomatch", "10.0.0.1\nflush", "", "a" * 200])
def test_no_entry_becomes_syntax(entry):
    with pytest.raises(Unprintable):
        entry_line("add", "A", entry)


@pytest.mark.parametrize("name", ["A B", "-X", "a" * 32, "A\nflush"])
def test_no_name_becomes_syntax(name):
    with pytest.raises(Unprintable):
        ipset_save_text([IpSet(name, "hash:ip", V4)])


@pytest.mark.parametrize(
    ("kind", "entries", "key", "found"),
    [
        ("hash:ip,port", ["10.0.0.1,tcp:80"], ("10.0.0.1", "tcp", 80), True),
        ("hash:ip,port", ["10.0.0.1,tcp:80"], ("10.0.0.1", "udp", 80), False),
        ("hash:ip,port", ["10.0.0.1,80"], ("10.0.0.1", "tcp", 80), True),
        ("hash:ip,port,net", ["10.0.0.1,tcp:80,10.64.0.0/12"], ("10.0.0.1", "tcp", 80, "10.65.1.1"), True),
        ("hash:ip,port,net", ["10.0.0.1,tcp:80,10.64.0.0/12"], ("10.0.0.1", "tcp", 80, "10.80.1.1"), False),
        ("hash:ip,port,net", ["10.0.0.1,tcp:80,10.64.0.1"], ("10.0.0.1", "tcp", 80, "10.64.0.1"), True),
        ("bitmap:port", ["31005"], ("udp", 31005), True),
        ("bitmap:port", ["31005"], ("icmp", 31005), False),
        ("bitmap:port", ["31000-31010"], ("tcp", 31005), True),
        ("hash:net", ["0.0.0.0/1"], ("10.0.0.1",), True),
    ],
)
def test_looking_up(kind, entries, key, found):
    assert (ipset_index(IpSet("A", kind, V4, frozenset(entries))).find(key) is not None) is found


def test_what_of_a_packet_is_looked_up():
    assert ipset_fields(IpSet("A", "hash:ip,port,ip", V4), ("dst", "dst", "src")) == (
        Field.DADDR,
        Field.L4PROTO,
        Field.DPORT,
        Field.SADDR,
    )
    # The kernel does not look at sides that the set has no dimension for.
    assert ipset_fields(IpSet("A", "hash:ip", V4), BOTH) == (Field.DADDR,)
    with pytest.raises(ValueError, match="has 2 dimensions, and the rule names 1"):
        ipset_fields(IpSet("A", "hash:ip,port", V4), ("dst",))
