"""Changes of objects, and what the loop writes for them."""

import pytest
from tests.proxy.program.loop.bench import CART, CART_SLICE, WEB, WEB_LINE, WEB_SLICE, Bench, said

from narthex.model.net import IPFamily
from narthex.testing.build import endpoint, endpoint_slice, service
from narthex.testing.fakes import FakeChanges, FakeRules


def test_the_first_turn_writes_all_families():
    bench = Bench(WEB, WEB_SLICE)
    bench.proxy.turn()
    assert dict([WEB_LINE]).items() <= bench.kernel.items()
    assert dict(bench.targets[IPFamily.IPV6].rules.lines) == {"[fd6e::1]:80/TCP": "shop/web:http -> Reject()"}


def test_nothing_is_written_before_the_inbox_has_told_all():
    bench = Bench(WEB, WEB_SLICE)
    synced = bench.inbox._waiting.pop()
    bench.proxy.turn()
    assert bench.targets[IPFamily.IPV4].reads == bench.writes == 0
    assert bench.proxy.health.healthz()[0] == 503
    bench.inbox._waiting.append(synced)
    bench.proxy.notice()
    bench.proxy.turn()
    assert bench.writes == 1


@pytest.mark.row("21.19")
def test_a_change_writes_only_the_difference():
    bench = Bench(WEB, WEB_SLICE)
    bench.proxy.turn()
    bench.change(CART, CART_SLICE)
    bench.proxy.turn()
    assert bench.targets[IPFamily.IPV4].applied[1:] == [
        FakeChanges(put=(("10.110.0.2:80/TCP", "shop/cart:http -> 10.64.1.6:80"),))
    ]


@pytest.mark.row("21.1")
def test_a_change_and_back_writes_nothing(log):
    bench = Bench(WEB, WEB_SLICE)
    bench.proxy.turn()
    log.clear()
    bench.change(endpoint_slice("shop/web", endpoint("10.64.1.9")), WEB_SLICE)
    bench.proxy.turn()
    assert bench.writes == 1
    assert said(log, "synced IPv4", "INFO") == []


@pytest.mark.row("21.1", "21.18")
def test_a_change_without_effect_writes_nothing():
    bench = Bench(WEB, WEB_SLICE)
    bench.proxy.turn()
    bench.change(service("shop/web", "10.110.0.1", "fd6e::1", annotations=(("a", "b"),)))
    bench.proxy.turn()
    assert bench.writes == 1


def test_a_service_that_goes_is_removed():
    bench = Bench(WEB, WEB_SLICE, CART)
    bench.proxy.turn()
    bench.inbox.remove(CART)
    bench.proxy.notice()
    bench.proxy.turn()
    assert bench.targets[IPFamily.IPV4].applied[-1] == FakeChanges(remove=("10.110.0.2:80/TCP",))


def test_a_restart_reads_the_kernel_and_writes_nothing():
    first = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    first.proxy.turn()
    second = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4], rules=first.targets[IPFamily.IPV4].rules)
    second.proxy.turn()
    assert second.writes == 0
    assert second.proxy.health.healthz()[0] == 200


def test_a_restart_writes_the_difference_to_what_it_finds():
    stale = FakeRules((("10.110.9.9:80/TCP", "old/gone:http -> 10.64.9.9:80"), WEB_LINE))
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4], rules=stale)
    bench.proxy.turn()
    assert bench.targets[IPFamily.IPV4].applied == [FakeChanges(remove=("10.110.9.9:80/TCP",))]
