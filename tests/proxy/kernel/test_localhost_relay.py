"""Node ports on loopback through a relay: which ones, for how long, and what a port of another program means."""

import contextlib
import os
import socket
import threading

import pytest

from narthex.linux.links import ip_batch
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.model import EndpointPort, IPFamily, Protocol, ServicePort
from narthex.proxy.kernel.localhost import LocalhostRelay, localhost_listeners
from narthex.testing.build import NODE, endpoint, endpoint_slice, plan, service

ASKED = {"node_port_addresses": ("primary", "localhost"), "relayed_node_ports": True}
UDP = {
    "service": {"ports": (ServicePort(name="http", port=80, protocol=Protocol.UDP, node_port=30080),)},
    "slice": {"ports": (EndpointPort(name="http", port=8080, protocol=Protocol.UDP),)},
}


def web(*ends, node=NODE, **spec):
    return (
        service("shop/web", "10.110.0.5", node_port=30080, **spec),
        endpoint_slice("shop/web", *(endpoint(end, node) for end in ends), port=8080),
    )


@pytest.mark.row("9.13")
@pytest.mark.parametrize(
    ("words", "four", "six"),
    [
        (("primary", "localhost"), True, True),
        (("localhost", "all"), True, True),
        (("0.0.0.0/0", "127.0.0.1/32"), True, False),
        (("primary", "::1/128"), False, True),
        (("all",), False, False),
        (("0.0.0.0/0", "::/0"), False, False),
        (("primary",), False, False),
        (None, False, False),
    ],
)
def test_loopback_must_be_named(words, four, six):
    for family, expect in ((IPFamily.IPV4, four), (IPFamily.IPV6, six)):
        config = {"family": family, "node_port_addresses": words}
        assert plan(**config, relayed_node_ports=True).node_ports.relayed is expect
        assert not plan(**config).node_ports.relayed, "the gate is off"


@pytest.mark.row("9.13")
def test_listeners_follow_the_policy_for_the_outside():
    assert [one.endpoints for one in localhost_listeners(plan(*web("10.64.1.10"), **ASKED)).values()] == [
        (("10.64.1.10", 8080),)
    ]
    local = {"external_policy_local": True, "type": "NodePort"}
    assert not localhost_listeners(plan(*web("10.64.2.10", node="other", **local), **ASKED))
    assert len(localhost_listeners(plan(*web("10.64.1.10", **local), **ASKED))) == 1
    assert not localhost_listeners(plan(*web(), **ASKED))
    assert not localhost_listeners(plan(*web("10.64.1.10")))


@pytest.fixture
def namespace():
    name = f"nlr{os.getpid()}"
    create_namespace(name)
    ip_batch(name, ["link set lo up", "address add 10.64.1.10/32 dev lo"])
    yield name
    delete_namespace(name)


def answering(namespace, kind, address="10.64.1.10", port=8080):
    """Answer one request with its text."""
    with in_namespace(namespace):
        server = socket.socket(socket.AF_INET, kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    if kind == socket.SOCK_STREAM:
        server.listen()

    def answer():
        with contextlib.suppress(OSError), server:
            if kind == socket.SOCK_STREAM:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(connection.recv(100))
            else:
                data, client = server.recvfrom(100)
                server.sendto(data, client)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


def asked(namespace, kind, text=b"hello"):
    with in_namespace(namespace):
        client = socket.socket(socket.AF_INET, kind)
    with client:
        client.settimeout(30)
        try:
            client.connect(("127.0.0.1", 30080))
            client.send(text)
            return client.recv(100)
        except ConnectionError:
            return b"refused"


@pytest.mark.kernel
@pytest.mark.row("9.13")
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["tcp", "udp"])
def test_a_node_port_on_loopback(namespace, kind):
    if kind == socket.SOCK_STREAM:
        served = plan(*web("10.64.1.10"), **ASKED)
    else:
        slices = endpoint_slice("shop/web", endpoint("10.64.1.10", NODE), **UDP["slice"])
        served = plan(service("shop/web", "10.110.0.5", **UDP["service"]), slices, **ASKED)
    relay = LocalhostRelay(IPFamily.IPV4, namespace)
    try:
        assert relay.tend() is None, "nothing is asked for yet"
        answering(namespace, kind)
        relay.follow(served)
        assert relay.listening == 1 and relay.failures == 0
        assert asked(namespace, kind) == b"hello"
        relay.follow(plan(**ASKED))
        assert relay.listening == 0
        assert asked(namespace, kind) == b"refused"
    finally:
        relay.close()


@pytest.mark.kernel
@pytest.mark.row("9.13")
def test_a_port_of_another_program_is_left_to_it_and_tried_again(namespace, caplog):
    other = answering(namespace, socket.SOCK_STREAM, "127.0.0.1", 30080)
    relay = LocalhostRelay(IPFamily.IPV4, namespace)
    try:
        relay.follow(plan(*web("10.64.1.10"), **ASKED))
        assert (relay.listening, relay.failures) == (0, 1)
        assert relay.tend() is not None
        assert relay.failures == 2 and len(caplog.messages) == 1, "it is said once"
        assert "node port 30080/tcp is not served on 127.0.0.1" in caplog.text
        assert asked(namespace, socket.SOCK_STREAM, b"mine") == b"mine", "the other program goes on"
        other.join(30)
        answering(namespace, socket.SOCK_STREAM)
        relay.tend()
        assert relay.listening == 1
        assert asked(namespace, socket.SOCK_STREAM) == b"hello"
    finally:
        relay.close()
