"""When the loop writes and reads, and how it repairs what others changed."""

import logging

import pytest
from tests.proxy.program.loop.bench import CART, CART_SLICE, WEB, WEB_LINE, WEB_SLICE, Bench, said

from narthex.linux.monitor import RulePoller
from narthex.model.net import FAMILIES, IPFamily
from narthex.testing.fakes import FakeChanges, FakeRules


@pytest.mark.row("21.2")
def test_changes_within_the_minimum_period_are_one_sync():
    """Row 21.2: the pause is from the end of one sync to the start of the next."""
    bench = Bench(WEB, WEB_SLICE, minimum=1.0)
    bench.proxy.turn()
    bench.change(CART)
    assert bench.proxy.turn() == pytest.approx(1.0)
    bench.clock.advance(0.4)
    bench.change(CART_SLICE)
    assert bench.proxy.turn() == pytest.approx(0.6)
    assert bench.writes == 1
    bench.clock.advance(0.6)
    bench.proxy.turn()
    assert bench.writes == 2
    assert bench.kernel["10.110.0.2:80/TCP"] == "shop/cart:http -> 10.64.1.6:80"


@pytest.mark.row("21.3")
def test_an_idle_proxy_sleeps_until_the_next_read_back():
    bench = Bench(WEB)
    assert bench.proxy.turn() == pytest.approx(30.0)


def test_drift_is_healed_at_the_sync_period(log):
    bench = Bench(WEB, WEB_SLICE)
    bench.proxy.turn()
    target = bench.targets[IPFamily.IPV4]
    target.rules = FakeRules((("10.110.0.1:80/TCP", "somebody else's"),))
    bench.run_for(29)
    assert bench.writes == 1
    bench.run_for(2)
    assert target.applied[1:] == [FakeChanges(put=(WEB_LINE,))]
    assert len(said(log, "another program changed our IPv4 rules", "WARNING")) == 1


def test_a_flushed_kernel_is_filled_again(log):
    bench = Bench(WEB, WEB_SLICE)
    bench.proxy.turn()
    bench.targets[IPFamily.IPV4].rules = None
    bench.run_for(31)
    assert bench.kernel == dict([WEB_LINE])
    assert said(log, "another program changed our IPv4 rules", "WARNING")


def test_a_read_back_that_finds_all_well_writes_and_says_nothing(log):
    bench = Bench(WEB, WEB_SLICE)
    bench.proxy.turn()
    log.clear()
    bench.run_for(100)
    assert bench.targets[IPFamily.IPV4].reads == 4
    assert bench.writes == 1
    assert not [record for record in log.records if record.levelno >= logging.INFO]


def test_slow_reading_is_done_less_often():
    bench = Bench(WEB, families=[IPFamily.IPV4])
    target, read = bench.targets[IPFamily.IPV4], bench.targets[IPFamily.IPV4].read
    target.read = lambda: (bench.clock.advance(10), read())[1]
    bench.run_for(1000)
    assert target.reads <= 6


def test_where_the_kernel_tells_of_changes_drift_is_healed_at_once():
    """Row 29.9."""
    bench = Bench(WEB, WEB_SLICE, watched=True)
    bench.run_for(10)
    bench.targets[IPFamily.IPV4].rules = None
    bench.others += 1
    bench.run_for(1.5)
    assert bench.kernel == dict([WEB_LINE])


def test_where_the_kernel_tells_of_changes_it_is_read_seldom():
    bench = Bench(WEB, WEB_SLICE, watched=True)
    bench.run_for(200)
    bench.change(CART)
    bench.run_for(90)
    assert bench.targets[IPFamily.IPV4].reads == 1
    bench.run_for(300)
    assert bench.targets[IPFamily.IPV4].reads == 2


def test_changes_by_others_that_concern_no_rule_take_at_most_half_of_the_time():
    bench = Bench(WEB, families=[IPFamily.IPV4], watched=True)
    target, read = bench.targets[IPFamily.IPV4], bench.targets[IPFamily.IPV4].read
    target.read = lambda: (bench.clock.advance(1), read())[1]
    for _ in range(200):
        bench.others += 1
        bench.run_for(1)
    assert 60 <= target.reads <= 110


def test_a_few_changes_by_others_are_all_mended_at_once():
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4], watched=True)
    target, read = bench.targets[IPFamily.IPV4], bench.targets[IPFamily.IPV4].read
    target.read = lambda: (bench.clock.advance(0.05), read())[1]
    bench.run_for(1)
    for _ in range(5):
        target.rules = None
        bench.others += 1
        bench.run_for(1.1)
        assert bench.kernel == dict([WEB_LINE])


def test_a_second_proxy_is_named_and_both_settle(log):
    """Another program writes its own rules after each repair of ours, for a minute, and stops."""
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4], watched=True)
    target = bench.targets[IPFamily.IPV4]
    bench.run_for(1)
    before = bench.writes
    for _ in range(600):
        if bench.kernel == dict([WEB_LINE]):
            target.rules = FakeRules((("10.96.0.9:80/TCP", "another program's"),))
            bench.others += 1
        bench.run_for(0.1)
    repairs = bench.writes - before
    # Five at once, then after 1, 2, 4, 8, and 16 s, more or less.
    assert 6 <= repairs <= 12
    assert "another program changes our IPv4 rules again and again" in log.text
    assert not bench.proxy.health.healthy
    bench.run_for(60)
    assert bench.kernel == dict([WEB_LINE])
    assert bench.proxy.health.healthy


def test_rules_that_others_remove_again_and_again_return_within_two_seconds(log):
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4], watched=True)
    target = bench.targets[IPFamily.IPV4]
    bench.run_for(1)
    for _ in range(30):
        target.rules = FakeRules()
        bench.others += 1
        bench.run_for(2)
        assert bench.kernel == dict([WEB_LINE])
    assert "another program changes our IPv4 rules again and again" in log.text


def test_a_repair_that_waits_is_made_if_rules_are_missing_later():
    """A second proxy writes its rules, and while ours waits, somebody flushes them."""
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4], watched=True)
    target = bench.targets[IPFamily.IPV4]
    others = FakeRules((("10.96.0.9:80/TCP", "another program's"),))
    bench.run_for(1)
    for _ in range(300):
        if bench.kernel == dict([WEB_LINE]):
            target.rules = others
            bench.others += 1
        bench.run_for(0.1)
    assert target.rules == others
    target.rules = None
    bench.others += 1
    bench.run_for(2)
    assert bench.kernel == dict([WEB_LINE])


def test_changes_by_others_are_counted():
    bench = Bench(WEB, WEB_SLICE, watched=True)
    bench.run_for(3)
    bench.others += 1
    bench.run_for(3)
    bench.targets[IPFamily.IPV6].rules = None
    bench.others += 1
    bench.run_for(3)
    text = bench.proxy.metrics.exposition().decode()
    assert 'narthex_foreign_changes_total{ip_family="IPv4"} 2.0' in text
    assert 'narthex_drift_healed_total{ip_family="IPv4"} 0.0' in text
    assert 'narthex_drift_healed_total{ip_family="IPv6"} 1.0' in text


def test_a_kernel_that_does_not_tell_is_read_all_the_same():
    bench = Bench(WEB, WEB_SLICE)
    bench.proxy._foreign = RulePoller(lambda: exec("raise OSError"), FAMILIES)
    bench.run_for(100)
    assert bench.targets[IPFamily.IPV4].reads == 4
