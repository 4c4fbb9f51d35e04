"""Least connections of two choices: what the programs choose and count, as the interpreter runs them."""

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.model import IPFamily, Protocol, ServicePort
from narthex.model.objects import EndpointPort
from narthex.proxy.backends.sockets.document import socket_document
from narthex.proxy.backends.sockets.layout import Capacity
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSocket, SimulatedSockets
from narthex.proxy.plan.balancing import LOAD_BALANCING, shares_of_two
from narthex.testing.build import endpoint, endpoint_slice, plan, service

LEAST = ((LOAD_BALANCING, "least-connections"),)
VIP = {IPFamily.IPV4: "10.110.0.5", IPFamily.IPV6: "fd6e::5"}
PODS = {
    IPFamily.IPV4: [f"10.64.1.{number}" for number in range(10, 15)],
    IPFamily.IPV6: [f"fd64:0:0:1::{number}" for number in range(10, 15)],
}
each_family = pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)


def simulated(family, count=5, annotations=LEAST, capacity=None):
    ports = (ServicePort(name="http", port=80), ServicePort(name="dns", port=53, protocol=Protocol.UDP))
    ends = (EndpointPort(name="http", port=8080), EndpointPort(name="dns", port=53, protocol=Protocol.UDP))
    made = plan(
        service("shop/web", VIP[family], ports=ports, annotations=annotations),
        endpoint_slice("shop/web", *map(endpoint, PODS[family][:count]), ports=ends),
        family=family,
    )
    sockets, rows = SimulatedSockets(capacity), SocketRows(family)
    sockets.apply(family, rows.advance(made))
    assert rows.counts_open is bool(annotations)
    return sockets


def opened(sockets, family):
    return sum(sockets.open_connections(family).values())


@each_family
def test_of_two_endpoints_the_one_with_fewer_connections_is_chosen(family):
    sockets = simulated(family, count=2)
    for cookie in range(20):
        sockets.connect(SimulatedSocket(cookie=cookie), VIP[family], 80, cookie % 2, stays=True)
    assert sorted(sockets.open_connections(family).values()) == [10, 10]


@settings(max_examples=40)
@given(st.sampled_from(IPFamily), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_probabilities_follow_from_open_connections(family, connections):
    """All draws of the programs, beside the formula that `narthex trace` uses."""
    count = len(connections)
    sockets = simulated(family, count=count)
    cookie = 100
    # A pool of one endpoint after the other, so that each gets its connections.
    for wanted, pod in zip(connections, PODS[family], strict=False):
        for _ in range(wanted):
            cookie += 1
            while (
                sockets.connect(SimulatedSocket(cookie=cookie), VIP[family], 80, draws(cookie), stays=True).address
                != pod
            ):
                cookie += 1
    found = Counter()
    for first, second in product(range(count), range(max(1, count - 1))):
        answer = sockets.connect(SimulatedSocket(), VIP[family], 80, (first, second))
        found[answer.address] += Fraction(1, count * max(1, count - 1))
    front = socket_document(sockets.pinned(family)).frontend(VIP[family], 80, "TCP")
    assert front.least_connections and front.pods == front.node == "cluster"
    shares = dict(zip((address for address, _ in front.cluster), shares_of_two(front.cluster_open), strict=True))
    assert sum(shares.values()) == 1 and {pod: share for pod, share in shares.items() if share} == found


def draws(seed):
    """Return numbers that lead to any endpoint, with time."""
    return seed % 5, seed // 5 % 4


@settings(max_examples=40)
@given(
    st.sampled_from(IPFamily), st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 19)), max_size=60)
)
def test_counts_are_those_of_the_open_sockets(family, steps):
    """Sockets connect, connect again after a failure, and end, in any order."""
    sockets, where = simulated(family), {}
    for ends, cookie, draw in steps:
        sock = SimulatedSocket(cookie=cookie)
        if ends:
            sockets.end(sock)
            where.pop(cookie, None)
        else:
            where[cookie] = sockets.connect(sock, VIP[family], 80, (draw % 5, draw // 5), stays=True)
        assert sorted(filter(None, sockets.open_connections(family).values())) == sorted(
            Counter(where.values()).values()
        )
    for cookie in where:
        sockets.end(SimulatedSocket(cookie=cookie))
    assert opened(sockets, family) == 0


def test_ipv4_mapped_sockets_are_counted_with_ipv4():
    sockets = simulated(IPFamily.IPV4)
    sock = SimulatedSocket(mapped=True)
    sockets.connect(sock, VIP[IPFamily.IPV4], 80, stays=True)
    assert opened(sockets, IPFamily.IPV4) == 1
    sockets.end(sock)
    assert opened(sockets, IPFamily.IPV4) == 0


@each_family
def test_sockets_without_room_are_balanced_and_not_counted(family):
    sockets = simulated(family, capacity=Capacity(services=64, frontends=64, slots=64, sockets=4))
    for cookie in range(10):
        answer = sockets.connect(SimulatedSocket(cookie=cookie), VIP[family], 80, cookie, stays=True)
        assert answer.address in PODS[family]
    assert opened(sockets, family) == 4


@each_family
def test_datagrams_of_sockets_that_do_not_connect_go_to_any_endpoint(family):
    sockets = simulated(family)
    sock = SimulatedSocket(protocol=Protocol.UDP)
    found = {
        sockets.send(SimulatedSocket(protocol=Protocol.UDP, cookie=draw), VIP[family], 53, draw) for draw in range(5)
    }
    assert {answer.address for answer in found} == set(PODS[family]) and opened(sockets, family) == 0
    assert sockets.connect(sock, VIP[family], 53, stays=True).port == 53 and opened(sockets, family) == 1


@each_family
def test_other_service_ports_count_nothing(family):
    sockets = simulated(family, annotations=())
    sockets.connect(SimulatedSocket(), VIP[family], 80, stays=True)
    assert opened(sockets, family) == 0
