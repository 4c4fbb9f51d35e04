"""How long the loop runs, and how it ends."""

import math

import pytest
from tests.proxy.program.loop.bench import CART, WEB, WEB_LINE, WEB_SLICE, Bench


def test_a_lost_notice_is_made_up_for_by_the_sync_period():
    bench = Bench(WEB)
    bench.proxy.turn()
    bench.inbox.put(CART)
    bench.run_for(31)
    assert "10.110.0.2:80/TCP" in bench.kernel


def test_it_runs_until_something_holds_and_on_from_there():
    bench = Bench(WEB, WEB_SLICE)
    synced, begun = bench.inbox._waiting.pop(), bench.clock.now()
    bench.clock.at(5.0, lambda: (bench.inbox._waiting.append(synced), bench.proxy.notice()))
    bench.proxy.run(until=lambda: bench.proxy.health.ready)
    assert bench.clock.now() - begun == 5.0
    assert bench.writes == 1
    bench.inbox.put(CART)
    bench.proxy.run(until=lambda: True)
    assert bench.writes == 2


@pytest.mark.row("21.20")
def test_stop_ends_the_loop_and_leaves_the_rules():
    bench = Bench(WEB, WEB_SLICE)
    bench.clock.at(100, bench.proxy.stop)
    bench.proxy.run()
    assert bench.clock.now() == pytest.approx(1100)
    assert bench.kernel == dict([WEB_LINE])


def test_a_proxy_without_families_sleeps_until_the_next_scan():
    bench = Bench(families=[])
    assert 0 < bench.proxy.turn() < math.inf
