"""A law: the walk of sets says of every packet what the walk of that packet says.

Hypothesis draws small rulesets. For each of them, packets of every class that the walk of sets has found are drawn, and packets whose
addresses, ports, and links are those that rules name. `NARTHEX_SET_WALKS` is the number of rulesets in each language.
"""

import os
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.netfilter.laws.rule_texts import (
    DESTINATIONS,
    LISTS,
    OWN,
    PORTS,
    PROTOCOLS,
    SENDERS,
    nft_rulesets,
    save_rulesets,
)

from narthex.model import Disposition, Host, IPFamily, Memory
from narthex.netfilter.dump.read import read_dump
from narthex.netfilter.sets.space import DPORT, LINK, PROTOCOL, SPORT
from narthex.netfilter.sets.walk import SetWalk, space_of
from narthex.netfilter.walk.walk import walk

CASES = int(os.environ.get("NARTHEX_SET_WALKS", "60"))
HOST = Host(addresses=(OWN,))
OF_CLASSES, OF_NAMES = 40, 30
"""Packets of each ruleset: most of its classes, and packets that rules name."""
_NUMBERS = {"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1}
_UNNAMED = 0xFFFF
"""A link that no rule names."""


def rules_of(text):
    dump = read_dump(text)
    assert not dump.problems, dump.problems
    return dump.for_family(IPFamily.IPV4).ruleset


def told(boxes, point, touched):
    """Return what the walk of sets says of a packet of a sender that some lists have."""
    found = Counter()
    for each in boxes:
        if not all(value in part for value, part in zip(point, each.box, strict=True)):
            continue
        if any((name.partition(" ")[0] in touched) is not taken for name, taken in each.choices):
            continue
        end = each.end
        endpoint = None
        if end.disposition is Disposition.DELIVERED:
            endpoint = end.endpoint[0], end.endpoint[1] or point[DPORT]
        key = end.disposition, endpoint, end.masquerade and endpoint is not None
        found[key] += each.probability
    return found


def drawn(rng, part):
    """Draw a value of a set, its ends more often than others."""
    first, last = rng.choice(part.spans)
    return rng.choice((first, last, rng.randint(first, last)))


def points(space, boxes, rng):
    """Yield points to compare: of classes, and with values that rules name."""
    for each in rng.sample(boxes, min(OF_CLASSES, len(boxes))):
        yield _sendable(tuple(drawn(rng, part) for part in each.box))
    links = sorted({_UNNAMED, *(first for each in boxes for first, _ in each.box[LINK].spans)})
    for _ in range(OF_NAMES):
        yield _sendable(
            (
                space.address(rng.choice(DESTINATIONS)),
                _NUMBERS[rng.choice((*PROTOCOLS, "tcp", "icmp"))],
                rng.choice((*PORTS, rng.randint(1, 0xFFFF))),
                rng.randint(1024, 0xFFFF),
                rng.choice(links),
                space.address(rng.choice(SENDERS)),
            )
        )


def _sendable(point):
    """Return a point without ports where the protocol has none."""
    return (*point[:DPORT], 0, 0, *point[SPORT + 1 :]) if point[PROTOCOL] == 1 else point


def compare(text, seed):
    ruleset = rules_of(text)
    space = space_of(ruleset, IPFamily.IPV4, HOST)
    walked = SetWalk(ruleset, space)
    boxes = list(walked.ends())
    rng = random.Random(seed)
    decided = 0
    for point in points(space, boxes, rng):
        packet = space.packet(point)
        if packet is None or (packet.protocol.value != "ICMP" and not (packet.port and packet.source_port)):
            continue
        touched = {name for name in LISTS if rng.random() < 0.3}
        memory = Memory()
        for name in touched:
            memory.touch(name, (packet.source,), 0.0)
        says = told(boxes, point, touched)
        assert sum(says.values()) == 1, f"{packet} by {packet.iif or 'none'}: {says}\n{text}"
        ends = Counter(walk(ruleset, packet, HOST, memory, 0.0).ends())
        unknown = (Disposition.UNSUPPORTED, None, False)
        said = f"{packet} by {packet.iif or 'none'}, lists {sorted(touched)}:\n sets {dict(says)}\n walk {dict(ends)}\n{text}"
        if says[unknown] or ends[unknown]:
            # What one walk can't interpret, the other one may. What both can, leads to the same ends.
            both = says.keys() | ends.keys()
            assert sum(max(says[end], ends[end]) for end in both if end != unknown) <= 1, said
            continue
        decided += 1
        assert +says == +ends, said
    return decided


@pytest.mark.parametrize("rulesets", [nft_rulesets, save_rulesets], ids=["nft", "iptables"])
def test_sets_of_packets_take_the_way_of_each_packet(rulesets):
    seen = Counter()

    @settings(max_examples=CASES, report_multiple_bugs=False)
    @given(rulesets(), st.integers(0, 1 << 32))
    def law(text, seed):
        seen["decided"] += compare(text, seed)
        seen["rulesets"] += 1

    law()
    assert seen["decided"] > 10 * seen["rulesets"], "too few packets are decided"
