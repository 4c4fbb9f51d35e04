"""Failed writes, followers that wait, and exceptions."""

from itertools import pairwise

import pytest
from tests.proxy.program.loop.bench import CART, CART_SLICE, WEB, WEB_LINE, WEB_SLICE, Bench, said

from narthex.model.net import IPFamily
from narthex.testing.build import service
from narthex.testing.fakes import FakeRules


@pytest.mark.row("21.4")
def test_a_failed_write_is_tried_again_with_growing_delay(log):
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    bench.targets[IPFamily.IPV4].failures = ["Error: out of luck"] * 7
    times, apply = [], bench.targets[IPFamily.IPV4].apply
    bench.targets[IPFamily.IPV4].apply = lambda changes: (times.append(bench.clock.now()), apply(changes))
    bench.run_for(120)
    assert [later - time for time, later in pairwise(times)] == pytest.approx([1, 2, 4, 8, 16, 30, 30])
    assert bench.kernel == dict([WEB_LINE])
    errors = said(log, "the kernel did not take the IPv4 rules: Error: out of luck", "ERROR")
    assert len(errors) == 7
    assert "the next try is in 1 s" in errors[0]
    assert said(log, "the IPv4 sync works again", "INFO")


@pytest.mark.row("21.4")
def test_after_a_failure_the_kernel_is_read_before_it_is_written():
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    target = bench.targets[IPFamily.IPV4]
    bench.proxy.turn()
    target.failures = ["no"]
    bench.change(CART, CART_SLICE)
    bench.proxy.turn()
    # Half of it came through after all.
    target.rules = FakeRules((WEB_LINE, ("10.110.0.2:80/TCP", "half")))
    bench.clock.advance(1)
    bench.proxy.turn()
    assert target.applied[-1].put == (("10.110.0.2:80/TCP", "shop/cart:http -> 10.64.1.6:80"),)


@pytest.mark.row("29.1")
def test_what_cannot_be_mended_makes_it_unhealthy():
    """Nobody changed an object, but the rules are gone."""
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    target = bench.targets[IPFamily.IPV4]
    bench.run_for(10)
    target.rules, target.failures = None, ["no"] * 50
    bench.run_for(90)
    assert target.rules is None
    assert bench.proxy.health.livez()[0] == 503
    target.failures.clear()
    bench.run_for(31)
    assert bench.proxy.health.livez()[0] == 200


@pytest.mark.row("16.8")
def test_a_plan_is_followed_when_the_kernel_holds_it():
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    target = bench.targets[IPFamily.IPV4]
    target.failures = ["no"]
    bench.proxy.turn()
    assert bench.followed == []
    bench.clock.advance(1)
    bench.proxy.turn()
    ((first, written),) = bench.followed
    assert written and len(first.services) == 1
    target.failures = ["no"]
    bench.change(CART, CART_SLICE)
    bench.proxy.turn()
    assert bench.followed[-1][0] is first
    bench.clock.advance(1)
    bench.proxy.turn()
    assert len(bench.followed[-1][0].services) == 2


def test_who_follows_says_when_to_be_told_again():
    bench = Bench(WEB, families=[IPFamily.IPV4])
    assert bench.proxy.turn() > 5
    bench.again = 5.0
    assert bench.proxy.turn() == pytest.approx(5)


def test_a_change_cuts_a_long_wait_short():
    bench = Bench(WEB, families=[IPFamily.IPV4])
    bench.targets[IPFamily.IPV4].failures = ["no"] * 4
    bench.run_for(7)
    assert bench.proxy.turn() == pytest.approx(8)
    bench.change(CART)
    assert bench.proxy.turn() == pytest.approx(1)
    bench.run_for(2)
    assert bench.kernel


def test_one_family_failing_does_not_stop_the_other(log):
    bench = Bench(WEB, WEB_SLICE)
    bench.targets[IPFamily.IPV4].failures = ["no"] * 50
    bench.run_for(5)
    assert bench.targets[IPFamily.IPV6].rules.lines
    status, body = bench.proxy.health.healthz()
    assert status == 503
    assert body["status"]["IPv6"]["healthy"] and not body["status"]["IPv4"]["healthy"]
    bench.change(CART, service("shop/six", "fd6e::6"))
    bench.run_for(5)
    assert ("[fd6e::6]:80/TCP", "shop/six:http -> Reject()") in bench.targets[IPFamily.IPV6].rules.lines
    assert not said(log, "ready:")


@pytest.mark.row("21.5")
def test_an_unexpected_exception_does_not_end_the_loop(log):
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    bench.targets[IPFamily.IPV4].read = lambda: 1 / 0
    bench.proxy.turn()
    assert said(log, "the IPv4 sync broke off: ZeroDivisionError", "ERROR")
    assert [record for record in log.records if record.levelname == "DEBUG" and record.exc_info]
    del bench.targets[IPFamily.IPV4].read
    bench.run_for(2)
    assert bench.kernel == dict([WEB_LINE])


def test_a_planner_that_broke_off_looks_at_everything_again():
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    bench.proxy.turn()
    half = bench.proxy._halves[0].sync
    hints, plan = [], half._planner.plan
    half._planner.plan = lambda _, changed: (hints.append(changed), 1 / 0)
    bench.change(CART)
    bench.proxy.turn()
    half._planner.plan = lambda snapshot, changed: (hints.append(changed), plan(snapshot, changed))[1]
    bench.run_for(2)
    assert hints == [frozenset({CART.key}), None]
    assert "10.110.0.2:80/TCP" in bench.kernel
