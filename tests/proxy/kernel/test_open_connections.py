"""Least connections of two choices with real sockets: what is counted while they are open, and nothing once they have ended."""

import errno
import socket
import struct
import threading
import time
from contextlib import contextmanager

import pytest
from tests.cgroup_client import cgroup_client
from tests.proxy.kernel.test_sockets import PODS, SERVICE, socket_world

from narthex.linux.namespaces import in_namespace
from narthex.model import EndpointPort, IPFamily, Protocol, ServicePort
from narthex.proxy.backends.sockets.document import socket_document
from narthex.proxy.kernel.sockets import pinned_sockets
from narthex.proxy.plan.balancing import LOAD_BALANCING
from narthex.testing.build import endpoint, endpoint_slice, plan, service

pytestmark = pytest.mark.kernel

LEAST = ((LOAD_BALANCING, "least-connections"),)
PORTS = (ServicePort(name="http", port=80), ServicePort(name="dns", port=53, protocol=Protocol.UDP))
each_family = pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)


def plan_of(family, addresses, port=8080):
    ends = (EndpointPort(name="http", port=port), EndpointPort(name="dns", port=8053, protocol=Protocol.UDP))
    slices = endpoint_slice("shop/web", *map(endpoint, addresses), ports=ends)
    return plan(service("shop/web", SERVICE[family], ports=PORTS, annotations=LEAST), slices, family=family)


@pytest.fixture
def world(tmp_path):
    with socket_world(tmp_path) as made:
        yield made


def follow(world, accelerator, made):
    with in_namespace(world.node):
        accelerator.follow(made)
    assert accelerator.reason == ""


def opened(world, family, port=80, protocol="TCP"):
    with in_namespace(world.node):
        front = socket_document(pinned_sockets(world.pins)).frontend(SERVICE[family], port, protocol)
    assert front.least_connections
    return front.cluster_open


def wait_until_none(world, family):
    """Sockets of a process that was killed end a moment later."""
    limit = time.monotonic() + 60
    while sum(opened(world, family)) + sum(opened(world, family, 53, "UDP")):
        assert time.monotonic() < limit, opened(world, family)
        time.sleep(0.02)


@contextmanager
def resetting(address, port):
    """A server that answers every connection with a reset."""
    server = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)

    def loop():
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


@each_family
def test_open_connections_are_even(world, family):
    follow(world, world.accelerator(), plan_of(family, PODS[family]))
    with cgroup_client(world.cgroup, world.pod) as client:
        for _ in range(90):
            assert "data" in client.ask("tcp", SERVICE[family], 80, held=True)
        found = opened(world, family)
        assert sum(found) == 90 and max(found) - min(found) <= 5, "at random, they differ by 8 on average"
        assert client.ask("alive") == {"alive": 90}
    wait_until_none(world, family)


@each_family
def test_counts_return_to_zero_after_ends_of_all_kinds(world, family):
    accelerator = world.accelerator()
    follow(world, accelerator, plan_of(family, PODS[family]))
    with cgroup_client(world.cgroup, world.pod) as client, cgroup_client(world.cgroup, world.pod) as killed:
        for _ in range(5):
            assert "data" in client.ask("tcp", SERVICE[family], 80)
            assert "data" in client.ask("udp", SERVICE[family], 53)
            assert "data" in client.ask("sendto", SERVICE[family], 53)
            assert "data" in killed.ask("tcp", SERVICE[family], 80, held=True)
            assert "data" in killed.ask("udp", SERVICE[family], 53, held=True)
        assert sum(opened(world, family)) == sum(opened(world, family, 53, "UDP")) == 5
        # No process counts, or takes anything back.
        accelerator.close()
        killed.process.kill()
        wait_until_none(world, family)

        again = world.accelerator()
        follow(world, again, plan_of(family, PODS[family], port=9))
        assert client.ask("tcp", SERVICE[family], 80) == {"errno": errno.ECONNREFUSED}
        unreachable = "192.0.2.1" if family is IPFamily.IPV4 else "2001:db8::1"
        follow(world, again, plan_of(family, [unreachable]))
        assert client.ask("tcp", SERVICE[family], 80) == {"errno": errno.ENETUNREACH}
        with in_namespace(world.pod), resetting(PODS[family][0], 8181):
            follow(world, again, plan_of(family, PODS[family][:1], port=8181))
            assert client.ask("tcp", SERVICE[family], 80) == {"errno": errno.ECONNRESET}
        wait_until_none(world, family)


def test_an_ipv4_mapped_socket_is_counted_until_its_end(world):
    follow(world, world.accelerator(), plan_of(IPFamily.IPV4, PODS[IPFamily.IPV4]))
    with cgroup_client(world.cgroup, world.pod) as client:
        assert "data" in client.ask("tcp", SERVICE[IPFamily.IPV4], 80, held=True, mapped=True)
        assert sum(opened(world, IPFamily.IPV4)) == 1
    wait_until_none(world, IPFamily.IPV4)


def test_ends_are_observed_only_where_a_service_port_asks_for_it(world):
    accelerator = world.accelerator()
    family = IPFamily.IPV4
    slices = endpoint_slice("shop/web", *map(endpoint, PODS[family]), port=8080)
    follow(world, accelerator, plan(service("shop/web", SERVICE[family]), slices))
    assert not any(name.startswith("nx_release") for name in world.pinned())
    follow(world, accelerator, plan_of(family, PODS[family]))
    assert sorted(name for name in world.pinned() if name.startswith("nx_release"))[-1] == "nx_release4-link"
    assert "nx_release6-link" not in world.pinned()
