"""Ends of packets in the words of a scenario file."""

from fractions import Fraction

from narthex.model.packet import Disposition, Outcome, Packet, Trace
from narthex.testing.findings import DROP, NONE, REJECT, delivered, possible_ends, print_said, say, say_trace

HERE, THERE = ("10.64.1.10", 80), ("fd64::a", 80)
PACKET = Packet(source="10.64.1.200", destination="10.110.0.5", port=80)


def test_words_and_targets():
    assert [say(ends) for ends in (REJECT, DROP, NONE)] == ["reject", "drop", "none"]
    assert say(delivered([THERE, HERE], masq=True)) == {"dnat": ["10.64.1.10:80", "[fd64::a]:80"], "masq": True}
    said = say(delivered([THERE, HERE], masq=False, masq_for=[HERE]))
    assert said == {"dnat": ["10.64.1.10:80", "[fd64::a]:80"], "masq": False, "masq_for": ["10.64.1.10:80"]}
    assert print_said(said) == "10.64.1.10:80 | [fd64::a]:80, source kept, masq_for 10.64.1.10:80"


def test_what_no_expectation_can_say_is_said_too():
    mixed = delivered([HERE], masq=False) | DROP
    assert say(mixed) == {"dnat": ["10.64.1.10:80"], "masq": False, "also": ["drop"]}
    varying = delivered([HERE], masq=False) | delivered([HERE], masq=True)
    assert say(varying)["masq_varies"] == ["10.64.1.10:80"]
    assert say(frozenset({(Disposition.NOT_OURS, None, True)})) == "none with another source"
    assert say(DROP | REJECT) == {"also": ["drop", "reject"]}
    assert say(frozenset()) == {"error": "nothing was seen"}


def test_impossible_ends_do_not_count():
    never = Outcome(disposition=Disposition.DROPPED, probability=Fraction(0))
    always = Outcome(disposition=Disposition.DELIVERED, endpoint=HERE)
    assert possible_ends(Trace(packet=PACKET, outcomes=(never, always))) == delivered([HERE], masq=False)


def test_an_unsupported_way_says_why():
    trace = Trace(packet=PACKET, outcomes=(Outcome(disposition=Disposition.UNSUPPORTED, note="match u32"),))
    assert say_trace(trace) == {"unsupported": "match u32"}
