"""Rules that select by a hash: certain where the hash is known, and all possibilities where it is not."""

import json
from fractions import Fraction

import pytest

from narthex.model.packet import Host, Packet
from narthex.netfilter.jhash import jhash, scaled
from narthex.netfilter.nft import json as nft_json
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.netfilter.walk.walk import walk

HOST = Host(addresses=("10.20.0.11",))
RULES = """
table ip t {{
	chain nat {{
		type nat hook prerouting priority dstnat; policy accept;
		dnat to {} map {{ 0 : 10.0.0.1, 1 : 10.0.0.2, 2 : 10.0.0.3 }}
	}}
}}
"""
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def outcomes(hashed, **packet):
    rules = parse_ruleset(RULES.format(hashed))
    sent = Packet(source="198.51.100.7", destination="10.20.0.11", port=80, iif="eth0", **packet)
    return walk(rules, sent, HOST).outcomes


def test_a_known_hash_leaves_one_endpoint():
    (only,) = outcomes("jhash ip saddr mod 3 seed 0x2a")
    number = scaled(jhash(bytes((198, 51, 100, 7)), 42), 3)
    assert only.endpoint[0] == ADDRESSES[number] and only.probability == 1
    assert any(step.what == f"hash {number} of 3: dnat to {ADDRESSES[number]}" for step in only.steps)


def test_fields_of_a_concatenation_begin_at_words():
    """The kernel is the witness of this layout: tests/netfilter/kernel draws such rules."""
    (only,) = outcomes("jhash ip saddr . meta l4proto . tcp dport mod 3 seed 0x2a")
    data = bytes((198, 51, 100, 7)) + b"\6\0\0\0" + b"\0\x50\0\0"
    assert only.endpoint[0] == ADDRESSES[scaled(jhash(data, 42), 3)]


@pytest.mark.parametrize(
    "hashed", ["jhash ip saddr mod 3", "symhash mod 3", "jhash ip saddr . tcp sport mod 3 seed 0x2a"]
)
def test_an_unknown_hash_leaves_all(hashed):
    found = outcomes(hashed)
    assert {each.endpoint[0] for each in found} == set(ADDRESSES)
    assert {each.probability for each in found} == {Fraction(1, 3)}


def test_the_port_of_the_client_may_be_known():
    assert len(outcomes("jhash ip saddr . tcp sport mod 3 seed 0x2a", source_port=40000)) == 1


def test_a_number_without_an_arm_continues():
    rules = RULES.replace("1 : 10.0.0.2, 2 : 10.0.0.3", "2 : 10.0.0.3").replace("0 : 10.0.0.1, ", "")
    sent = [Packet(source=f"198.51.100.{n}", destination="10.20.0.11", port=80, iif="eth0") for n in range(60)]
    ruleset = parse_ruleset(rules.format("jhash ip saddr mod 3 seed 0x2a"))
    ends = [walk(ruleset, packet, HOST).outcomes for packet in sent]
    assert all(len(each) == 1 for each in ends)
    reached = [each[0].endpoint for each in ends]
    assert {end and end[0] for end in reached} == {None, "10.0.0.3"}
    assert 5 < sum(end is not None for end in reached) < 40


def test_json_of_nft_has_the_same_rules():
    expression = {"payload": {"protocol": "ip", "field": "saddr"}}
    number = {"jhash": {"mod": 3, "seed": 42, "offset": 0, "expr": expression}}
    choices = {"set": [[0, "10.0.0.1"], [1, "10.0.0.2"], [2, "10.0.0.3"]]}
    rule = {"dnat": {"addr": {"map": {"key": number, "data": choices}}}}
    hook = {"family": "ip", "table": "t", "name": "nat", "type": "nat", "hook": "prerouting", "prio": -100}
    document = [
        {"table": {"family": "ip", "name": "t"}},
        {"chain": {**hook, "policy": "accept"}},
        {"rule": {"family": "ip", "table": "t", "chain": "nat", "expr": [rule]}},
    ]
    ((table, _),), problems = nft_json.read(json.dumps({"nftables": document}))
    (text,) = parse_ruleset(RULES.format("jhash ip saddr mod 3 seed 0x2a")).tables
    assert not problems and table.chains["nat"].rules == text.chains["nat"].rules
