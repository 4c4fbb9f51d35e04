"""The loop with fakes on all sides: when it syncs, what it writes, and what it does when something breaks."""

import logging
import math
from itertools import pairwise

import pytest

from narthex.linux.monitor import RulePoller
from narthex.model.net import FAMILIES, IPFamily
from narthex.model.objects import Node
from narthex.model.problem import Problem
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.dataplane import AnnouncedTarget
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import FamilySync
from narthex.testing.build import CONFIG, NODE, endpoint, endpoint_slice, plan, service
from narthex.testing.fakes import FakeBackend, FakeChanges, FakeClock, FakeInbox, FakeRules, FakeTarget

WEB = service("shop/web", "10.110.0.1", "fd6e::1")
WEB_SLICE = endpoint_slice("shop/web", endpoint("10.64.1.5"))
WEB_LINE = ("10.110.0.1:80/TCP", "shop/web:http -> 10.64.1.5:80")
CART = service("shop/cart", "10.110.0.2")
CART_SLICE = endpoint_slice("shop/cart", endpoint("10.64.1.6"))
THE_NODE = Node(name=NODE, internal_ips=("10.20.0.11",))


class Bench:
    """A proxy with everything around it faked."""

    def __init__(self, *objects, families=FAMILIES, minimum=0.0, rules=None, watched=False):
        self.clock = FakeClock()
        self.others = 0
        self.inbox = FakeInbox(THE_NODE, *objects)
        backend = FakeBackend()
        self.targets = {family: FakeTarget(backend, FakeRules(), rules) for family in families}
        syncs = [
            FamilySync(family, Planner(CONFIG, family), backend, self.targets[family], self.clock)
            for family in families
        ]
        self.foreign = RulePoller(self.generation, families) if watched else None
        if self.foreign:
            for sync in syncs:
                sync._target = AnnouncedTarget(sync._target, self.foreign, lambda _: 1)
        self.proxy = Proxy(
            self.inbox,
            syncs,
            self.clock,
            SyncPeriods(minimum, watched=watched),
            node_name=NODE,
            foreign=self.foreign,
            follow=self.follow,
        )
        self.followed, self.again = [], math.inf

    def generation(self):
        """As the kernel counts: one for each transaction of anybody."""
        return self.others + sum(len(target.applied) for target in self.targets.values())

    def follow(self, plan):
        self.followed.append((plan, bool(self.targets[plan.family].applied)))
        return self.again

    @property
    def kernel(self):
        return dict(self.targets[IPFamily.IPV4].rules.lines)

    @property
    def writes(self):
        return len(self.targets[IPFamily.IPV4].applied)

    def change(self, *objects):
        """Objects change and the watch says so."""
        self.inbox.put(*objects)
        self.proxy.notice()

    def run_for(self, seconds):
        """Let the loop turn until this much time has passed."""
        end = self.clock.now() + seconds
        while True:
            wait = self.proxy.turn()
            if self.clock.now() + wait > end:
                self.clock.advance(end - self.clock.now())
                return
            self.clock.sleep(wait)


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.DEBUG, "narthex")
    return caplog


def said(log, text, level=None):
    return [
        record.getMessage()
        for record in log.records
        if text in record.getMessage() and (level is None or record.levelname == level)
    ]


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


def test_ready_is_said_once_when_all_families_are(log):
    bench = Bench(WEB)
    bench.run_for(100)
    bench.change(CART)
    bench.run_for(100)
    assert said(log, "ready:") == ["ready: the first sync is done (IPv4 and IPv6)"]


def test_a_sync_says_what_changed_and_how_long_it_took(log):
    bench = Bench(WEB, WEB_SLICE, families=[IPFamily.IPV4])
    bench.proxy.turn()
    log.clear()
    bench.change(CART, CART_SLICE)
    bench.proxy.turn()
    (line,) = said(log, "synced IPv4", "INFO")
    assert "1 Service port changed (shop/cart:http) of 2 Service ports" in line
    assert "apply 0 ms" in line
    (record,) = log.records
    assert record.narthex["changed"] == 1


def test_conflicts_are_said_when_they_come_and_when_they_go(log):
    one = service("a/one", "10.110.0.3", external_ips=("203.0.113.5",))
    two = service("b/two", "10.110.0.4", external_ips=("203.0.113.5",))
    bench = Bench(two, families=[IPFamily.IPV4])
    bench.proxy.turn()
    bench.change(one)
    bench.run_for(100)
    (line,) = said(log, "cannot have", "WARNING")
    assert line.startswith("Service port b/two:http cannot have external IP 203.0.113.5:80/TCP: a/one:http has it")
    bench.inbox.remove(one)
    bench.proxy.notice()
    bench.run_for(1)
    assert said(log, "settled: b/two:http", "INFO")


def test_a_conflict_of_both_families_is_said_once(log):
    one = service("a/one", "10.110.0.3", "fd6e::3", type="NodePort", node_port=30001)
    two = service("b/two", "10.110.0.4", "fd6e::4", type="NodePort", node_port=30001)
    bench = Bench(one, two)
    bench.run_for(1)
    assert len(said(log, "cannot have node port 30001/TCP", "WARNING")) == 1
    bench.inbox.remove(one)
    bench.proxy.notice()
    bench.run_for(1)
    assert len(said(log, "settled:")) == 1


def test_problems_are_said_once_and_once_again_when_mended(log):
    bench = Bench(WEB)
    bench.inbox.problems = (
        Problem(origin="web.yaml:3", object="Service shop/web", field="spec.ports[0].port", message="0 is no port"),
    )
    bench.run_for(100)
    assert len(said(log, "0 is no port", "ERROR")) == 1
    bench.inbox.problems = ()
    bench.proxy.notice()
    bench.run_for(1)
    assert len(said(log, "mended: web.yaml:3", "INFO")) == 1


def test_an_unknown_node_is_said_once(log):
    bench = Bench(WEB)
    bench.inbox._waiting.pop(0)
    bench.inbox.put(Node(name="worker-b"))
    bench.run_for(1)
    bench.change(CART)
    bench.run_for(1)
    (line,) = said(log, "no Node object is named 'worker-a'", "WARNING")
    assert "there are: worker-b" in line
    bench.change(THE_NODE)
    bench.run_for(1)
    assert said(log, "the Node object 'worker-a' is there now")


@pytest.mark.row("16.1")
def test_a_balancer_without_a_health_check_port_is_said_once(log):
    local = {"type": "LoadBalancer", "external_policy_local": True}
    bench = Bench(service("shop/web", "10.110.0.1", **local))
    bench.run_for(1)
    bench.change(WEB_SLICE)
    bench.run_for(1)
    (line,) = said(log, "healthCheckNodePort", "WARNING")
    assert line.startswith("Service shop/web has no healthCheckNodePort")
    bench.change(service("shop/web", "10.110.0.1", health_check_node_port=32000, **local))
    bench.run_for(1)
    bench.change(service("shop/web", "10.110.0.1", **local))
    bench.run_for(1)
    assert len(said(log, "healthCheckNodePort", "WARNING")) == 2


def test_external_ips_that_belong_to_the_node_or_an_api_server_are_reported(log):
    """They are served, as kube-proxy does, and as clusters need that have no load balancer."""
    api = endpoint_slice("default/kubernetes", endpoint("10.20.0.5"), port=6443)
    bench = Bench(service("shop/web", "10.110.0.1", external_ips=("10.20.0.11", "203.0.113.1")), WEB_SLICE)
    bench.run_for(1)
    (line,) = said(log, "externalIPs", "WARNING")
    assert "Service shop/web" in line and "10.20.0.11 is an address of this node" in line
    assert "10.20.0.11:80/TCP" in bench.kernel
    bench.change(service("shop/web", "10.110.0.1", external_ips=("203.0.113.1",)))
    bench.change(service("shop/cart", "10.110.0.2", port=6443, external_ips=("10.20.0.5",)))
    bench.run_for(1)
    assert said(log, "mended")
    assert said(log, "externalIPs", "ERROR") == []
    bench.change(api)
    bench.run_for(1)
    (line,) = said(log, "externalIPs", "ERROR")
    assert "10.20.0.5 is the address of an API server" in line and "also those to the API server" in line
    bench.run_for(100)
    assert len(said(log, "spec.externalIPs")) == 3


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


def test_a_first_list_without_services_is_reported_and_healthy(log):
    """The kernel has the rules of an earlier process, which are kept for a while."""
    clock, backend, family, events = FakeClock(), BACKENDS["nftables"], IPFamily.IPV4, []
    names = [f"shop/a{number}" for number in range(4)]
    earlier = [service(name, f"10.110.0.{number}") for number, name in enumerate(names, 10)]
    earlier += [endpoint_slice(name, endpoint("10.64.1.5")) for name in names]
    rules = backend.render(plan(*earlier))
    target = FakeTarget(backend, backend.render(plan()), rules)
    inbox = FakeInbox(THE_NODE)
    sync = FamilySync(family, Planner(CONFIG, family), backend, target, clock, doubt=300.0)
    proxy = Proxy(inbox, [sync], clock, SyncPeriods(), node_name=NODE, record=events.append)
    for _ in range(3):
        clock.sleep(proxy.turn())
    assert not target.applied and proxy.health.healthz()[0] == 200
    assert len(said(log, "the lists of the source have no Services", "ERROR")) == 1
    assert [event.reason for event in events] == ["ObjectsMissingFromList"]
    end = clock.now() + 300.0
    while clock.now() < end:
        clock.sleep(proxy.turn())
    proxy.turn()
    assert backend.served(target.rules) == 0
