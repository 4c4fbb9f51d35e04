"""Passive ejection: laws, and simulations of lossy networks and black holes in simulated time."""

import heapq
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.model import IPFamily, Protocol
from narthex.model.store import Store
from narthex.proxy.backends.sockets.document import socket_document
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSockets
from narthex.proxy.plan.ejection import (
    ConnectEvent,
    ConnectObservation,
    EjectionFilter,
    EjectionPolicy,
    EndpointEjector,
    EndpointState,
    without_ejected,
)
from narthex.proxy.plan.ir import Endpoint, Pool, ServicePlan
from narthex.proxy.plan.planner import Planner
from narthex.testing import build
from narthex.testing import strategies as some
from narthex.testing.build import port_name

POLICY = EjectionPolicy()
STARTED, CONNECTED, FAILED = ConnectEvent.STARTED, ConnectEvent.CONNECTED, ConnectEvent.FAILED
TEN = tuple((f"10.64.0.{number}", 8080) for number in range(10))
BAD = TEN[3]


def service(endpoints, local=()):
    return ServicePlan(
        name=port_name("shop/web"),
        frontends=(),
        cluster=Pool(endpoints=tuple(Endpoint(*each) for each in endpoints), reason="ready"),
        local=Pool(endpoints=tuple(Endpoint(*each) for each in local), reason="ready") if local else None,
    )


def fail(ejector, times=5, start=0.0, clients=2, endpoint=BAD):
    return [
        ejector.observe(ConnectObservation(start + number * 0.01, endpoint, f"c{number % clients}", FAILED))
        for number in range(times)
    ]


def test_failures_in_a_row_of_several_clients_eject():
    ejector = EndpointEjector(POLICY)
    assert fail(ejector) == [False] * 4 + [True]
    assert ejector.ejected == (BAD,) and ejector.due() == pytest.approx(10.04)


def test_one_client_ejects_nobody():
    ejector = EndpointEjector(POLICY)
    assert not any(fail(ejector, times=1000, clients=1))
    assert ejector.ejected == ()


def test_a_connection_that_is_made_resets_the_count():
    ejector = EndpointEjector(POLICY)
    for round_ in range(20):
        fail(ejector, times=4, start=round_)
        ejector.observe(ConnectObservation(round_ + 0.5, BAD, "c0", CONNECTED))
    assert ejector.ejected == ()


def test_old_failures_do_not_count():
    ejector = EndpointEjector(POLICY)
    for number in range(20):
        assert fail(ejector, times=2, start=number * 11.0) == [False, False]


def test_the_trial_is_one_connection():
    ejector = EndpointEjector(POLICY)
    fail(ejector)
    assert not ejector.advance(10.0) and ejector.advance(10.1)
    assert ejector.state(BAD) is EndpointState.TRIAL and ejector.ejected == ()
    assert ejector.observe(ConnectObservation(10.2, BAD, "c1", STARTED))
    assert ejector.state(BAD) is EndpointState.AWAITED and ejector.ejected == (BAD,)
    assert ejector.observe(ConnectObservation(11.2, BAD, "c1", FAILED))
    assert ejector.state(BAD) is EndpointState.EJECTED
    assert ejector.due() == pytest.approx(31.2), "the second ejection lasts twice as long"
    ejector.advance(31.3)
    ejector.observe(ConnectObservation(31.4, BAD, "c1", STARTED))
    assert ejector.observe(ConnectObservation(31.5, BAD, "c1", CONNECTED))
    assert ejector.state(BAD) is EndpointState.IN_USE and ejector.due() is None


def test_a_trial_without_an_outcome_ends():
    ejector = EndpointEjector(POLICY)
    fail(ejector)
    ejector.advance(11.0)
    ejector.observe(ConnectObservation(11.0, BAD, "c1", STARTED))
    assert ejector.advance(16.0) and ejector.state(BAD) is EndpointState.EJECTED
    assert ejector.due() == 26.0


def test_endpoints_that_leave_are_forgotten():
    ejector = EndpointEjector(POLICY)
    fail(ejector)
    ejector.keep_only(TEN[:2])
    assert ejector.ejected == () and ejector.state(BAD) is EndpointState.IN_USE


def test_failures_that_are_too_old_are_forgotten():
    ejector = EndpointEjector(POLICY)
    fail(ejector, times=4)
    ejector.advance(9.0)
    assert ejector.suspects == (BAD,)
    ejector.advance(10.1)
    assert ejector.suspects == () and ejector.ejections == 0


def test_a_trial_to_which_nobody_connects_ends():
    """The endpoint may have left the plan meanwhile."""
    ejector = EndpointEjector(POLICY)
    fail(ejector)
    assert ejector.advance(10.1) and ejector.state(BAD) is EndpointState.TRIAL
    assert not ejector.advance(300.0) and ejector.suspects == (BAD,)
    assert ejector.advance(320.0) and ejector.suspects == ()


def test_doubt_forgets_failures_and_no_ejection():
    ejector = EndpointEjector(POLICY)
    fail(ejector)
    fail(ejector, times=4, endpoint=TEN[0])
    ejector.doubt()
    assert ejector.ejected == ejector.suspects == (BAD,) and ejector.ejections == 1
    assert fail(ejector, times=4, endpoint=TEN[0]) == [False] * 4


def test_ejections_do_not_grow_for_ever():
    ejector, now = EndpointEjector(POLICY), 0.0
    fail(ejector)
    for _ in range(10):
        now = ejector.due()
        ejector.advance(now)
        ejector.observe(ConnectObservation(now, BAD, "c1", STARTED))
        ejector.observe(ConnectObservation(now + 1, BAD, "c1", FAILED))
    assert ejector.due() == now + 1 + POLICY.longest_seconds


@given(st.integers(1, 12), st.lists(st.integers(0, 14), max_size=15), st.integers(0, 4))
def test_a_pool_loses_at_most_half_and_never_the_last(count, numbers, local):
    everyone = [(f"10.64.0.{number}", 8080) for number in range(count)]
    ejected = [(f"10.64.0.{number}", 8080) for number in numbers]
    whole = service(everyone, everyone[:local])
    left = without_ejected(whole, ejected)
    for before, after in ((whole.cluster, left.cluster), (whole.local, left.local)):
        if before is None:
            assert after is None
            continue
        out = set(before.endpoints) - set(after.endpoints)
        assert set(after.endpoints) <= set(before.endpoints) and after.endpoints
        assert len(out) <= len(before.endpoints) // 2
        assert {(each.address, each.port) for each in out} <= set(ejected)
        assert (after is before) is (not out)
    assert without_ejected(whole, ()) is whole


def test_ports_of_other_protocols_keep_their_endpoints():
    """Failures are those of TCP connections."""
    udp = msgspec.structs.replace(service(TEN), name=port_name("shop/dns", Protocol.UDP))
    assert without_ejected(udp, (BAD,)) is udp


def planned(*addresses, others=3):
    slices = [build.endpoint_slice("shop/web", *map(build.endpoint, addresses), port=8080)]
    more = [build.service(f"shop/other-{number}", f"10.110.1.{number}") for number in range(others)]
    return build.plan(build.service("shop/web", "10.110.0.5"), *slices, *more)


def test_a_plan_without_ejected_endpoints_is_the_identical_plan():
    ejections, plan = EjectionFilter(), planned("10.64.1.1", "10.64.1.2")
    assert ejections.apply(plan, ()) is plan
    assert ejections.apply(plan, (("10.64.9.9", 8080), ("10.64.1.1", 9))) is plan
    assert ejections.present == frozenset() and ejections.out == {}


def test_other_service_ports_stay_the_identical_objects():
    ejections, plan = EjectionFilter(), planned("10.64.1.1", "10.64.1.2", "10.64.1.3")
    bad = ("10.64.1.2", 8080)
    made = ejections.apply(plan, (bad,))
    assert ejections.apply(plan, (bad,)) is made
    (name,) = [name for name in plan.services if made.services[name] is not plan.services[name]]
    assert ejections.out == {name: {bad}} and ejections.present == {bad}
    assert [each.address for each in made.services[name].cluster.endpoints] == ["10.64.1.1", "10.64.1.3"]
    assert ejections.apply(plan, ()) is plan


def test_what_a_pool_cannot_spare_is_present_and_not_out():
    ejections, plan = EjectionFilter(), planned("10.64.1.1")
    assert ejections.apply(plan, (("10.64.1.1", 8080),)).services == plan.services
    assert ejections.present == {("10.64.1.1", 8080)} and ejections.out == {}


@settings(max_examples=30)
@given(some.configs, st.lists(st.tuples(st.lists(some.events(), max_size=4), st.sets(st.integers(0, 9))), max_size=6))
def test_rows_that_follow_reduced_plans_are_those_of_a_fresh_start(config, turns):
    """Whatever changes between two calls, the plan and the ejections: nothing old stays, and nothing is missing."""
    store, planner, ejections = Store(), Planner(config, IPFamily.IPV4), EjectionFilter()
    rows, sockets = SocketRows(IPFamily.IPV4), SimulatedSockets()
    for events, chosen in turns:
        for event in events:
            store.apply(event)
        plan = planner.plan(store.snapshot, store.take_changed())
        everyone = sorted(
            {
                (each.address, each.port)
                for held in plan.services.values()
                for pool in held.pools.values()
                for each in pool.endpoints
            }
        )
        ejected = tuple(each for number, each in enumerate(everyone) if number in chosen)
        made = ejections.apply(plan, ejected)
        assert dict(made.services) == {name: without_ejected(each, ejected) for name, each in plan.services.items()}
        sockets.apply(IPFamily.IPV4, rows.advance(made))
        fresh = SimulatedSockets()
        fresh.apply(IPFamily.IPV4, SocketRows(IPFamily.IPV4).advance(made))
        assert contents(sockets) == contents(fresh)


def contents(sockets):
    """Return the endpoints of each frontend, whatever the numbers of Service ports."""
    found = socket_document(sockets.pinned(IPFamily.IPV4)).frontends
    return [msgspec.structs.replace(each, number=0) for each in found]


observations = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from(TEN[:3]), st.sampled_from("abc"), st.sampled_from(ConnectEvent)),
    max_size=60,
)


@settings(max_examples=200)
@given(observations)
def test_what_is_ejected_follows_from_evidence(drawn):
    """An endpoint in use is ejected only after failures in a row of two clients, and `due` is never in the past."""
    ejector, now = EndpointEjector(POLICY), 0.0
    row = {endpoint: [] for endpoint in TEN}
    for wait, endpoint, client, event in drawn:
        now += wait
        ejector.advance(now)
        before = ejector.state(endpoint)
        ejector.observe(ConnectObservation(now, endpoint, client, event))
        after = ejector.state(endpoint)
        if event is CONNECTED:
            row[endpoint] = []
            assert after is EndpointState.IN_USE
        elif event is FAILED:
            row[endpoint].append(client)
        if (before, after) == (EndpointState.IN_USE, EndpointState.EJECTED):
            assert len(row[endpoint]) >= 5 and len(set(row[endpoint])) >= 2
        assert ejector.due() is None or ejector.due() > now - 1e-9
        assert (after in (EndpointState.EJECTED, EndpointState.AWAITED)) is (endpoint in ejector.ejected)


class Simulation:
    """Clients that connect at random times to random endpoints, with losses, and an ejector that watches them."""

    RETRANSMIT = 1.0
    """TCP sends the first packet again after one second (RFC 6298), and reports the connection as failed until then."""

    def __init__(self, seed, *, rate, seconds, clients=20, loss=0.01, dead=(), endpoints=TEN):
        self.random, self.loss, self.dead = random.Random(seed), loss, dead
        self.rate, self.seconds, self.clients = rate, seconds, clients
        self.service, self.ejector = service(endpoints), EndpointEjector(POLICY)
        self.ever, self.ejected_at, self.slow = set(), {}, []
        self.total = []

    def run(self):
        events, number, draw = [], 0, self.random
        pool, now = self.service.cluster.endpoints, 0.0
        while now < self.seconds:
            now += draw.expovariate(self.rate)
            while events and events[0][0] <= now:
                pool = self.see(ConnectObservation(events[0][0], *heapq.heappop(events)[2:]), pool)
            if self.ejector.due() is not None and self.ejector.advance(now):
                pool = self.pool()
            end = pool[draw.randrange(len(pool))]
            target, client = (end.address, end.port), f"c{draw.randrange(self.clients)}"
            pool = self.see(ConnectObservation(now, target, client, STARTED), pool)
            number += 1
            lost = target in self.dead or draw.random() < self.loss or draw.random() < self.loss
            self.total.append(now)
            if lost:
                self.slow.append(now)
                heapq.heappush(events, (now + self.RETRANSMIT, number, target, client, FAILED))
            if target not in self.dead:
                after = now + self.RETRANSMIT + 0.001 if lost else now + 0.001
                heapq.heappush(events, (after, -number, target, client, CONNECTED))
        return self

    def pool(self):
        return without_ejected(self.service, self.ejector.ejected).cluster.endpoints

    def see(self, seen, pool):
        if not self.ejector.observe(seen):
            return pool
        for endpoint in self.ejector.ejected:
            self.ejected_at.setdefault(endpoint, seen.time)
        return self.pool()

    def slow_share(self, start, end):
        return sum(start <= when < end for when in self.slow) / sum(start <= when < end for when in self.total)


def test_no_healthy_endpoint_is_ejected_in_10000_runs_with_loss():
    for seed in range(10_000):
        draw = random.Random(seed)
        made = Simulation(seed, rate=draw.choice((5, 20, 60)), seconds=3.0, clients=draw.choice((2, 20))).run()
        assert not made.ejected_at, f"seed {seed}"


@pytest.mark.parametrize("seed", range(50))
def test_a_black_hole_among_ten_is_ejected_within_three_seconds(seed):
    made = Simulation(seed, rate=100.0, seconds=40.0, loss=0.0, dead=(BAD,)).run()
    assert set(made.ejected_at) == {BAD}
    assert made.ejected_at[BAD] < 3.0
    assert made.slow_share(0.0, 1.0) > 0
    assert made.slow_share(3.0, 40.0) < 0.005


@pytest.mark.parametrize("seed", range(20))
def test_losses_beside_a_black_hole_eject_only_the_black_hole(seed):
    made = Simulation(seed, rate=100.0, seconds=15.0, dead=(BAD,)).run()
    assert set(made.ejected_at) == {BAD} and made.ejected_at[BAD] < 3.0


def test_when_everything_fails_half_of_the_pool_stays():
    made = Simulation(1, rate=100.0, seconds=10.0, dead=TEN).run()
    assert len(made.pool()) >= 5
