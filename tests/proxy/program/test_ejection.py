"""Passive ejection in the loop: what is reduced, watched, and reported, with an observer of the test."""

from types import SimpleNamespace

import pytest

from narthex.model import IPFamily
from narthex.proxy.backends.sockets.layout import WatchFlag
from narthex.proxy.kernel.connect_observer import ConnectObservations, ObserverUnavailableError
from narthex.proxy.plan.ejection import ConnectEvent, ConnectObservation, EjectionPolicy
from narthex.proxy.program import ejection as program
from narthex.proxy.program.ejection import EjectionReporter, PassiveEjection
from narthex.runtime.metrics import exposition
from narthex.testing.build import endpoint, endpoint_slice, plan, service, snapshot

V4 = IPFamily.IPV4
BAD, GOOD = ("10.64.1.1", 8080), ("10.64.1.2", 8080)
STARTED, CONNECTED, FAILED = ConnectEvent.STARTED, ConnectEvent.CONNECTED, ConnectEvent.FAILED
SHOP = service("shop/web", "10.110.0.5", uid="1234")


def planned(*addresses):
    return plan(SHOP, endpoint_slice("shop/web", *map(endpoint, addresses), port=8080))


class Watcher:
    """An observer whose observations the test writes."""

    def __init__(self, target):
        self.target = target
        self.seen, self.complete, self.closed = [], True, False
        self.watched = {}

    def fileno(self):
        return 99

    def read(self):
        seen, self.seen = self.seen, []
        return ConnectObservations(seen, self.complete)

    def watch(self, _, endpoint, flags):
        self.watched[endpoint] = flags

    def forget(self, _, endpoint):
        self.watched.pop(endpoint, None)

    def close(self):
        self.closed = True


class Bench:
    """An ejection with its observer, at a time that the test sets."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(program, "ConnectObserver", self.observe)
        self.events, self.files = [], []
        reporter = EjectionReporter(self.events.append, lambda: snapshot(SHOP))
        self.ejection = PassiveEjection(reporter, lambda files: self.files.append(tuple(files)), EjectionPolicy())
        self.plan = planned(BAD[0], GOOD[0], "10.64.1.3")
        self.ejection.reduced(self.plan)
        self.ejection.start(SimpleNamespace())

    def observe(self, target):
        self.observer = Watcher(target)
        return self.observer

    def see(self, now, *events, endpoint=BAD):
        self.observer.seen += [
            (V4, ConnectObservation(now, endpoint, f"c{number % 2}", event)) for number, event in enumerate(events)
        ]
        return self.take_in(now)

    def take_in(self, now):
        delay = self.ejection.take_in(now)
        (held,) = self.ejection.reduced(self.plan).services.values()
        return {(each.address, each.port) for each in held.cluster.endpoints}, delay

    @property
    def reasons(self):
        return [each.reason for each in self.events]


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


@pytest.mark.row("29.20")
def test_an_endpoint_leaves_returns_on_trial_and_is_back_after_a_connection(bench, caplog):
    left, delay = bench.see(1.0, *[FAILED] * 5)
    assert BAD not in left and GOOD in left and delay == pytest.approx(0.02)
    assert bench.observer.watched == {BAD: WatchFlag.EJECTED} and bench.reasons == ["EndpointEjected"]
    assert bench.events[0].object.name == "web" and bench.events[0].uid == "1234"
    assert "endpoint 10.64.1.1:8080 of port shop/web:http gets no new connections" in caplog.text
    left, delay = bench.take_in(2.0)
    assert BAD not in left and delay == pytest.approx(9.0)

    left, _ = bench.take_in(11.0)
    assert BAD in left and bench.observer.watched == {BAD: WatchFlag.ON_TRIAL}
    left, _ = bench.see(12.0, STARTED)
    assert BAD not in left and bench.observer.watched == {BAD: WatchFlag.EJECTED}
    left, _ = bench.see(13.0, CONNECTED)
    assert BAD in left and bench.observer.watched == {}
    assert bench.reasons == ["EndpointEjected", "EndpointReturned"] and not bench.events[1].warning


def test_a_trial_that_fails_is_not_reported_again(bench):
    bench.see(1.0, *[FAILED] * 5)
    bench.take_in(11.0)
    bench.see(12.0, STARTED, FAILED)
    bench.take_in(40.0)
    assert bench.reasons == ["EndpointEjected"]
    text = exposition(bench.ejection).decode()
    assert 'narthex_endpoint_ejections_total{ip_family="IPv4"} 2.0' in text


def test_each_service_port_with_the_endpoint_has_its_event(bench):
    other = service("shop/other", "10.110.0.6")
    ends = [endpoint_slice(name, *map(endpoint, (BAD[0], GOOD[0])), port=8080) for name in ("shop/web", "shop/other")]
    bench.plan = plan(SHOP, other, *ends)
    bench.ejection.reduced(bench.plan)
    bench.observer.seen = [(V4, ConnectObservation(1.0, BAD, f"c{number % 2}", FAILED)) for number in range(5)]
    bench.ejection.take_in(1.0)
    bench.ejection.reduced(bench.plan)
    assert sorted((each.object.name, each.uid) for each in bench.events) == [("other", ""), ("web", "1234")]
    bench.observer.seen = [(V4, ConnectObservation(2.0, BAD, "c0", CONNECTED))]
    bench.ejection.take_in(2.0)
    bench.ejection.reduced(bench.plan)
    assert [each.reason for each in bench.events[2:]] == ["EndpointReturned"] * 2


def test_failures_are_watched_and_a_connection_ends_that(bench):
    bench.see(1.0, FAILED)
    assert bench.observer.watched == {BAD: WatchFlag(0)}
    bench.see(2.0, CONNECTED)
    assert bench.observer.watched == {} and bench.reasons == []


def test_failures_that_grew_old_are_no_longer_watched(bench):
    bench.see(1.0, FAILED)
    bench.take_in(11.5)
    assert bench.observer.watched == {}


def test_reports_that_were_lost_may_have_been_connections(bench):
    """What was lost is later than what was read, so that failures before it are no longer in a row with those after it."""
    bench.observer.complete = False
    bench.see(1.0, *[FAILED] * 4)
    bench.observer.complete = True
    left, _ = bench.see(2.0, *[FAILED] * 4)
    assert BAD in left
    left, _ = bench.see(3.0, FAILED)
    assert BAD not in left


def test_an_address_that_returns_to_the_service_is_another_pod(bench):
    bench.see(1.0, *[FAILED] * 5)
    bench.plan = planned(GOOD[0], "10.64.1.3")
    bench.take_in(2.0)
    assert bench.reasons == ["EndpointEjected", "EndpointReturned"] and bench.observer.watched == {}
    bench.plan = planned(BAD[0], GOOD[0], "10.64.1.3")
    left, _ = bench.take_in(3.0)
    assert BAD in left


def test_reading_pauses_after_observations_and_the_file_is_watched_otherwise(bench):
    bench.take_in(1.0)
    assert bench.files[-1] == (99,)
    bench.see(2.0, FAILED)
    assert bench.files[-1] == ()
    bench.observer.seen = [(V4, ConnectObservation(2.0, BAD, "c", FAILED))]
    bench.take_in(2.01)
    assert bench.observer.seen, "the pause is not over"
    bench.take_in(2.03)
    assert not bench.observer.seen


def test_a_kernel_that_cannot_observe_ejects_nobody_and_says_why(monkeypatch, caplog):
    def refuse(_):
        raise ObserverUnavailableError("the kernel does not load programs of type cgroup_sock_ops: Invalid argument")

    bench = Bench(monkeypatch)
    monkeypatch.setattr(program, "ConnectObserver", refuse)
    again = PassiveEjection(EjectionReporter(print, lambda: snapshot(SHOP)), lambda _: None, EjectionPolicy())
    for _ in range(3):
        again.start(SimpleNamespace())
    assert again.reason.startswith("the kernel does not load") and again.status["active"] is False
    assert caplog.text.count("passive ejection of endpoints stays off") == 1
    assert again.reduced(bench.plan) is bench.plan
    assert 'narthex_endpoint_ejection{reason="the kernel' in exposition(again).decode()


def test_status_and_metrics_name_what_is_out(bench):
    bench.see(1.0, *[FAILED] * 5)
    assert bench.ejection.status == {"active": True, "reason": "", "ejected": {"shop/web:http": ["10.64.1.1:8080"]}}
    text = exposition(bench.ejection).decode()
    assert 'narthex_ejected_endpoints{namespace="shop",port="http",service="web"} 1.0' in text
    assert 'narthex_endpoint_ejection{reason=""} 1.0' in text
    bench.ejection.close()
    assert bench.observer.closed and bench.files[-1] == ()
