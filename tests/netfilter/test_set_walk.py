"""The walk of sets: what a rule does before its matches, it does to packets that do not match, too."""

import pytest

from narthex.model import Disposition, Host, IPFamily
from narthex.netfilter.dump.read import read_dump
from narthex.netfilter.sets.walk import SetWalk, space_of

HOST = Host(addresses=("192.0.2.1",))


@pytest.mark.parametrize("others", [2, 40])
def test_a_statement_before_a_match_concerns_all_packets(others):
    """Also in a chain of many rules with an address each, which is split by the addresses at once."""
    rules = [f"ip daddr 10.1.0.{number} accept" for number in range(1, others)]
    text = "\n".join(
        (
            "table ip firewall {",
            " chain forward {",
            "  type filter hook forward priority filter; policy accept;",
            "  meta mark set 0x00000001 ip daddr 10.0.0.1 accept",
            *(f"  {rule}" for rule in rules),
            "  meta mark 0x00000001 drop",
            " }",
            "}",
        )
    )
    ruleset = read_dump(text).for_family(IPFamily.IPV4).ruleset
    space = space_of(ruleset, IPFamily.IPV4, HOST)
    other = space.address("10.9.9.9")
    ends = {
        each.end.disposition for each in SetWalk(ruleset, space).ends() if other in each.box[0] and each.box[4].first
    }
    assert ends == {Disposition.DROPPED}


def test_shares_of_the_probability_that_do_the_same_add_up():
    """A rule that draws a number, and then does nothing, in a hook that is looked up."""
    text = "\n".join(
        ("*filter", ":FORWARD ACCEPT [0:0]", "-A FORWARD -p udp -m statistic --mode random --probability 0.5", "COMMIT")
    )
    ruleset = read_dump(text).for_family(IPFamily.IPV4).ruleset
    space = space_of(ruleset, IPFamily.IPV4, HOST)
    other = space.address("10.9.9.9")
    found = [
        each
        for each in SetWalk(ruleset, space).ends()
        if other in each.box[0] and 17 in each.box[1] and each.box[4].first
    ]
    assert sum(each.probability for each in found) == 1
