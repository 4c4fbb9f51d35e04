"""Large loads go in pieces, in an order in which nothing leads to a chain that is not there."""

import pytest

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Goto, Jump
from narthex.proxy.backends.iptables.backend import IptablesBackend
from narthex.proxy.backends.iptables.rules import MOST_CHAINS, pieces
from narthex.proxy.backends.iptables.script import KernelChains, restore_blocks
from narthex.testing.build import endpoint, endpoint_slice, plan, service

BACKEND = IptablesBackend()
MANY = 60


def changes(count):
    objects = []
    for number in range(count):
        name = f"shop/s{number}"
        extra = {"node_port": 30000 + number, "balancers": ("203.0.113.10",), "source_ranges": ("198.51.100.0/24",)}
        objects.append(service(name, f"10.110.0.{number + 1}", port=1000 + number, **extra))
        objects.append(endpoint_slice(name, *(endpoint(f"10.64.{number}.{last}") for last in range(1, 5))))
    return BACKEND.diff(None, BACKEND.render(plan(*objects)))


def sections(*given, in_pieces):
    """Parts of the input that the tool commits one by one."""
    return "".join(restore_blocks(*given, in_pieces=in_pieces)).split("COMMIT\n")[:-1]


def nothing(own=()):
    tables = {"nat": dict.fromkeys(own, ()), "filter": {}, "mangle": {}}
    return KernelChains(family=IPFamily.IPV4, own=tables, jumps={}, lines={})


def test_few_chains_go_at_once():
    few = changes(2)
    assert pieces(few.written["nat"]) == []
    assert [text.split("\n")[0] for text in sections(few, nothing(), in_pieces=True)] == ["*nat", "*filter", "*mangle"]


def test_a_piece_jumps_only_to_what_it_has_or_an_earlier_one_had():
    written = changes(MANY).written["nat"]
    cut = pieces(written)
    there = set()
    for piece in cut:
        assert len(piece) <= MOST_CHAINS
        there |= piece.keys()
        for rules in piece.values():
            targets = {each.chain for rule in rules for each in rule.expressions if isinstance(each, Jump | Goto)}
            assert targets <= there
    assert {
        chain for chain in written if chain.startswith(("KUBE-SEP-", "KUBE-SVC-", "KUBE-EXT-", "KUBE-FW-"))
    } <= there
    assert "KUBE-SERVICES" not in there


@pytest.mark.parametrize("in_pieces", [True, False])
def test_every_chain_is_written_once_and_strangers_of_ours_go(in_pieces):
    many = changes(MANY)
    old = "KUBE-SVC-AAAAAAAAAAAAAAAA"
    kept = next(chain for chain in many.written["nat"] if chain.startswith("KUBE-SEP-"))
    texts = sections(many, nothing([old, kept]), in_pieces=in_pieces)
    assert (len(texts) > 3) is in_pieces
    nat = [line for text in texts for line in text.partition("*nat\n")[2].splitlines()]
    declared = [line.split()[0][1:] for line in nat if line.startswith(":")]
    assert sorted(declared) == sorted([*many.written["nat"], old])
    assert [line for text in texts for line in text.splitlines() if line.startswith("-X")] == [f"-X {old}"]


def test_each_piece_counts_as_a_transaction():
    many = changes(MANY)
    assert many.transactions == len(sections(many, nothing(), in_pieces=True)) == 3 + len(pieces(many.written["nat"]))
