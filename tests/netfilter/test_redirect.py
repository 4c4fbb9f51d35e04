"""Redirection to this machine's own ports, as relays and transparent proxies use it."""

import pytest

from narthex.model.net import IPFamily
from narthex.model.packet import Disposition, Host, Packet
from narthex.netfilter.ast import Compare, Field, Redirect, RedirectRange, Rule, Unprintable
from narthex.netfilter.describe import describe
from narthex.netfilter.walk.walk import walk
from narthex.netfilter.xtables.parse import parse_save_text
from narthex.netfilter.xtables.print import rule_text

TCP = Compare(Field.L4PROTO, ("tcp",))
HOST = Host(addresses=("10.20.0.11", "10.20.1.11"))

DUMP = """
*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A PREROUTING -d 10.110.0.5/32 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 61001
-A OUTPUT -d 10.110.0.5/32 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 61002
-A OUTPUT -d 10.110.0.6/32 -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 61000-61009
COMMIT
"""


def test_it_is_printed_and_read() -> None:
    rule = Rule((TCP, Compare(Field.DPORT, (80,)), Redirect(61001)))
    assert rule_text(rule, IPFamily.IPV4) == " -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 61001"
    dump = parse_save_text(DUMP, IPFamily.IPV4).tables[0].chains
    assert dump["PREROUTING"].rules[0].expressions[-1] == Redirect(61001)
    assert describe(Redirect(61001)) == "redirect to this machine's port 61001"


def test_a_protocol_must_be_named_first() -> None:
    with pytest.raises(Unprintable, match="no ports"):
        rule_text(Rule((Redirect(61001),)), IPFamily.IPV4)


def test_a_range_of_ports_is_a_range() -> None:
    chain = parse_save_text(DUMP, IPFamily.IPV4).tables[0].chains["OUTPUT"]
    assert chain.rules[1].expressions[-1] == RedirectRange(61000, 61009)


def test_a_packet_ends_on_the_node_itself() -> None:
    arriving = Packet(source="198.51.100.7", destination="10.110.0.5", port=80, iif="eth0")
    sent = Packet(source="10.20.0.11", destination="10.110.0.5", port=80, from_host=True)
    ends = [next(iter(walk(parse_save_text(DUMP, IPFamily.IPV4), packet, HOST).ends())) for packet in (arriving, sent)]
    assert ends == [
        (Disposition.DELIVERED, ("10.20.0.11", 61001), False),
        (Disposition.DELIVERED, ("127.0.0.1", 61002), False),
    ]
