"""Rules to send by a map, as expressions: those that `nft --debug=netlink` shows for the same rule."""

import struct

import pytest

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Accept, Chain, Compare, DnatMap, Field, HashedFields, InSet, Rule, Slot, Unprintable
from narthex.netfilter.netlink.attributes import attributes
from narthex.netfilter.netlink.rules import chain_payload, needs_bytecode, rule_payload

FRONTEND = (Field.DADDR, Field.L4PROTO, Field.DPORT)


def expressions(payload):
    """(name, {attribute: value}) of each expression of a NEWRULE payload."""
    found = []
    for kind, start, end in attributes(payload):
        if kind != 4:
            continue
        for _, first, behind in attributes(payload, start, end):
            name, values = "", {}
            for part, at, stop in attributes(payload, first, behind):
                if part == 1:
                    name = payload[at:stop].rstrip(b"\0").decode()
                else:
                    values = {number: payload[a:b] for number, a, b in attributes(payload, at, stop)}
            found.append((name, values))
    return found


def numbers(values):
    return {kind: struct.unpack(">I", value)[0] for kind, value in values.items() if len(value) == 4}


def test_ipv4_rule():
    rule = Rule((InSet(FRONTEND, "services-of-3"), DnatMap((*FRONTEND, Slot(3)), "endpoints")))
    found = expressions(rule_payload("narthex", "send-c", rule, IPFamily.IPV4))
    member, (address, protocol, port, draw, look, send) = found[:4], found[4:]
    assert member[:3] == [address, protocol, port]
    assert (member[3][0], member[3][1][1], numbers(member[3][1])) == ("lookup", b"services-of-3\0", {2: 8})
    assert (address[0], numbers(address[1])) == ("payload", {1: 8, 2: 1, 3: 16, 4: 4})
    assert (protocol[0], numbers(protocol[1])) == ("meta", {1: 9, 2: 16})
    assert (port[0], numbers(port[1])) == ("payload", {1: 10, 2: 2, 3: 2, 4: 2})
    assert (draw[0], numbers(draw[1])) == ("numgen", {1: 11, 2: 3, 3: 1})
    assert (look[0], look[1][1], numbers(look[1])) == ("lookup", b"endpoints\0", {2: 8, 3: 8})
    assert (send[0], numbers(send[1])) == ("nat", {1: 1, 2: 2, 3: 8, 5: 9})


@pytest.mark.parametrize("family, length, words", [(IPFamily.IPV4, 4, 1), (IPFamily.IPV6, 16, 4)], ids=str)
def test_hash_of_the_source(family, length, words):
    number = HashedFields((Field.SADDR,), 1021, 0x2A)
    rule = Rule((Compare(Field.L4PROTO, ("udp",)), DnatMap((number,), "m")))
    protocol, compared, source, hashed, look, send = expressions(rule_payload("narthex", "c", rule, family))
    assert (protocol[0], numbers(protocol[1])) == ("meta", {1: 8, 2: 16})
    assert compared[0] == "cmp" and compared[1][3] == b"\5\0\1\0\x11\0\0\0"
    assert source[0] == "payload" and numbers(source[1])[4] == length
    assert (hashed[0], numbers(hashed[1])) == ("hash", {1: 8, 2: 8, 3: length, 4: 1021, 5: 0x2A, 6: 0, 7: 0})
    assert (look[0], numbers(look[1])) == ("lookup", {2: 8, 3: 8})
    assert (send[0], numbers(send[1])[5]) == ("nat", 8 + words)


def test_not_in_a_set():
    rule = Rule((InSet(FRONTEND, "s", negate=True), DnatMap((*FRONTEND, Slot(3)), "endpoints")))
    look = expressions(rule_payload("narthex", "c", rule, IPFamily.IPV4))[3]
    assert (look[0], numbers(look[1])) == ("lookup", {2: 8, 5: 1})


def test_ipv6_rule_has_wider_registers():
    rule = Rule((DnatMap((*FRONTEND, Slot(3)), "endpoints"),))
    address, protocol, port, draw, _, send = expressions(rule_payload("narthex", "c", rule, IPFamily.IPV6))
    assert numbers(address[1]) == {1: 8, 2: 1, 3: 24, 4: 16}
    assert [numbers(one[1])[1] for one in (protocol, port, draw)] == [12, 13, 14]
    assert numbers(send[1]) == {1: 1, 2: 10, 3: 8, 5: 12}


def test_table_and_chain_come_first():
    rule = Rule((DnatMap((Field.SADDR, Field.SPORT, Slot(1)), "m"),))
    payload = rule_payload("narthex", "send-c", rule, IPFamily.IPV4)
    assert payload.startswith(chain_payload("narthex", "send-c"))
    (_, first, last), (_, second, end) = attributes(chain_payload("narthex", "send-c"))
    whole = chain_payload("narthex", "send-c")
    assert (whole[first:last], whole[second:end]) == (b"narthex\0", b"send-c\0")


@pytest.mark.parametrize("rule", [Rule((Accept(),)), Rule((DnatMap((Field.IIFNAME,), "m"),))], ids=str)
def test_other_rules_are_refused(rule):
    with pytest.raises(Unprintable):
        rule_payload("narthex", "c", rule, IPFamily.IPV4)


def test_which_chains_need_it():
    assert needs_bytecode(Chain(name="c", rules=(Rule((DnatMap(FRONTEND, "m"),)),)))
    assert not needs_bytecode(Chain(name="c", rules=(Rule((Accept(),)),)))
