"""A proxy whose rules another program changes again and again."""

from tests.proxy.program.loop.bench import CART, CART_SLICE, WEB, WEB_LINE, WEB_SLICE, Bench

from narthex.model.net import IPFamily
from narthex.netfilter.ast import TouchedPart
from narthex.testing.fakes import FakeChanges, FakeRules, FakeTarget


class PartTarget(FakeTarget):
    """A kernel whose single lines can be looked at and written."""

    def lacking(self, rules, touched):  # noqa: ARG002
        return {part for part in touched if part.chain not in dict(self.rules.lines)}

    def damage(self, rules, touched):
        lines = dict(rules.lines)
        return FakeChanges(put=tuple((part.chain, lines[part.chain]) for part in touched)) if touched else None


def in_contest(*objects):
    """A proxy in a contest: another program has replaced the line of Service web again and again, and that waits."""
    bench = Bench(*objects, families=[IPFamily.IPV4], watched=True, target=PartTarget)
    target = bench.targets[IPFamily.IPV4]
    bench.run_for(1)
    bench.foreign.parts = frozenset((TouchedPart("fake", WEB_LINE[0]),))
    for _ in range(300):
        if WEB_LINE in target.rules.lines:
            target.rules = FakeRules(tuple({**bench.kernel, WEB_LINE[0]: "another program's"}.items()))
            bench.others += 1
        bench.run_for(0.1)
    assert WEB_LINE not in target.rules.lines
    return bench, target


def test_in_a_contest_touched_rules_that_are_missing_return_without_a_reading(log):
    bench, target = in_contest(WEB, WEB_SLICE)
    assert "another program changes our IPv4 rules again and again" in log.text
    reads = target.reads
    for _ in range(20):
        target.rules = FakeRules()
        bench.others += 1
        bench.run_for(2)
        assert bench.kernel == dict([WEB_LINE])
    assert target.reads == reads


def test_in_a_contest_a_reading_follows_if_touched_rules_are_merely_others():
    """What is missing returns at once; what another program wrote in its place waits, and is known to be wrong."""
    bench, target = in_contest(WEB, WEB_SLICE, CART, CART_SLICE)
    cart = "10.110.0.2:80/TCP"
    reads = target.reads
    bench.foreign.parts |= {TouchedPart("fake", cart)}
    target.rules = FakeRules(((WEB_LINE[0], "yet another"),))
    bench.others += 1
    bench.run_for(2)
    assert bench.kernel == {WEB_LINE[0]: "yet another", cart: "shop/cart:http -> 10.64.1.6:80"}
    bench.run_for(4)
    assert target.reads == reads + 1
    assert not bench.proxy.health.healthy
    bench.run_for(100)
    assert WEB_LINE in target.rules.lines
    assert bench.proxy.health.healthy
