"""The programs of socket load balancing, interpreted: what a socket is told about its peer, and for how long."""

import msgspec
import pytest

from narthex.model import EndpointPort, IPFamily, Protocol, ServicePort
from narthex.proxy.backends.sockets.layout import Capacity
from narthex.proxy.backends.sockets.rows import SocketRows
from narthex.proxy.backends.sockets.walk import SimulatedSocket, SimulatedSockets, SocketAnswer
from narthex.testing.build import endpoint, endpoint_slice, plan, service

REMEMBERED = 16
"""Sockets whose frontend the maps of these tests remember."""
SERVICE = {IPFamily.IPV4: "10.96.0.1", IPFamily.IPV6: "fd96::1"}
POD = {IPFamily.IPV4: "10.64.1.1", IPFamily.IPV6: "fd64:0:0:1::1"}
PORT = {Protocol.TCP: 80, Protocol.UDP: 53}
TARGET_PORT = {Protocol.TCP: 8080, Protocol.UDP: 8053}
each_family = pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)
each_protocol = pytest.mark.parametrize("protocol", list(PORT), ids=lambda protocol: protocol.lower)


@pytest.fixture
def sockets():
    made = SimulatedSockets(Capacity(services=8, frontends=8, slots=8, sockets=REMEMBERED))
    for family, address in SERVICE.items():
        ports = [ServicePort(name=each.lower, port=PORT[each], protocol=each) for each in PORT]
        ends = [EndpointPort(name=each.lower, port=TARGET_PORT[each], protocol=each) for each in PORT]
        web = service("shop/web", address, ports=tuple(ports))
        slices = endpoint_slice("shop/web", endpoint(POD[family]), ports=tuple(ends))
        made.apply(family, SocketRows(family).advance(plan(web, slices, family=family)))
    return made


def connected(sockets, family, protocol, cookie, **more):
    """Connect a socket; return it, and the endpoint."""
    sock = SimulatedSocket(protocol=protocol, cookie=cookie, **more)
    answer = sockets.connect(sock, SERVICE[family], PORT[protocol])
    assert answer == SocketAnswer(POD[family], TARGET_PORT[protocol])
    return sock, (answer.address, answer.port)


@each_family
@each_protocol
def test_the_peer_is_the_service(sockets, family, protocol):
    sock, end = connected(sockets, family, protocol, cookie=7)
    frontend = SocketAnswer(SERVICE[family], PORT[protocol])

    assert sockets.peer_name(sock, *end) == frontend
    if protocol is Protocol.UDP:
        assert sockets.receive(sock, *end) == frontend


@each_protocol
def test_the_peer_of_a_mapped_socket_is_the_service(sockets, protocol):
    sock, end = connected(sockets, IPFamily.IPV4, protocol, cookie=7, mapped=True)

    assert sockets.peer_name(sock, *end) == SocketAnswer(SERVICE[IPFamily.IPV4], PORT[protocol])


@each_family
@each_protocol
def test_a_socket_that_no_program_changed_has_its_own_peer(sockets, family, protocol):
    connected(sockets, family, protocol, cookie=7)
    other = SimulatedSocket(protocol=protocol, cookie=8)
    end = POD[family], TARGET_PORT[protocol]

    assert sockets.peer_name(other, *end) == SocketAnswer(*end)


@each_family
def test_a_socket_that_connects_again_elsewhere_has_its_own_peer(sockets, family):
    sock, _ = connected(sockets, family, Protocol.TCP, cookie=7)

    assert sockets.peer_name(sock, POD[family], 9000) == SocketAnswer(POD[family], 9000)


@each_family
def test_a_newer_tcp_socket_takes_the_place_of_an_older_one(sockets, family):
    first, end = connected(sockets, family, Protocol.TCP, cookie=1)
    kept, _ = connected(sockets, family, Protocol.TCP, cookie=2)
    last, _ = connected(sockets, family, Protocol.TCP, cookie=1 + REMEMBERED)
    frontend = SocketAnswer(SERVICE[family], 80)

    assert sockets.peer_name(first, *end) == SocketAnswer(*end)
    assert sockets.peer_name(kept, *end) == sockets.peer_name(last, *end) == frontend


@each_family
def test_a_udp_socket_in_use_is_remembered_whatever_tcp_sockets_and_others_do(sockets, family):
    """A resolver drops answers that seem to come from elsewhere."""
    sock, end = connected(sockets, family, Protocol.UDP, cookie=1)
    for cookie in range(2, 6 * REMEMBERED):
        connected(sockets, family, Protocol.UDP if cookie % 2 else Protocol.TCP, cookie=cookie)
        assert sockets.receive(sock, *end) == SocketAnswer(SERVICE[family], 53)


def test_recvmsg_is_for_datagrams_only(sockets):
    """The kernel runs recvmsg programs for UDP, so that they don't look for TCP sockets."""
    sock, end = connected(sockets, IPFamily.IPV4, Protocol.TCP, cookie=7)
    asked = msgspec.structs.replace(sock, protocol=Protocol.UDP)

    assert sockets.receive(asked, *end) == SocketAnswer(*end)


def test_services_that_share_decisions_and_not_the_balancing():
    """What one Service port means is no answer for another one that selects its endpoints by a hash."""
    maglev = (("narthex.dev/load-balancing", "maglev"),)
    objects = []
    for name, address, annotations in (
        ("one", "10.96.0.1", ()),
        ("two", "10.96.0.2", maglev),
        ("three", "10.96.0.3", ()),
    ):
        objects.append(msgspec.structs.replace(service(f"shop/{name}", address), annotations=annotations))
        objects.append(endpoint_slice(f"shop/{name}", endpoint(POD[IPFamily.IPV4])))
    made, sockets = plan(*objects), SimulatedSockets()
    sockets.apply(IPFamily.IPV4, SocketRows(IPFamily.IPV4).advance(made))
    reached = [sockets.connect(SimulatedSocket(), f"10.96.0.{number}", 80).address for number in (1, 2, 3)]

    assert reached == [POD[IPFamily.IPV4], "10.96.0.2", POD[IPFamily.IPV4]]
