"""The relay hands bulk connections over to the kernel: every byte, each end, and every reset arrives, and the relay may end."""

import contextlib
import errno
import hashlib
import os
import random
import socket
import threading
import time

import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import CommandError, run
from narthex.model import IPFamily
from narthex.proxy.backends.userspace.backend import UserspaceBackend
from narthex.proxy.kernel import userspace
from narthex.proxy.kernel.dataplanes import UserspaceDataplane
from narthex.proxy.kernel.userspace import UserspaceTarget, missing_plain_tcp
from narthex.testing.build import endpoint, endpoint_slice, plan, service

pytestmark = pytest.mark.kernel

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
NETS = {V4: ("198.51.100.", "10.64.2.", "10.110.0.5", 24), V6: ("2001:db8:1::", "fd00:64:2::", "fd00:10:96::5", 64)}
PORT = 8080
MANY = 24 << 20
"""Bytes: more than any socket buffer."""


class Network:
    """Client, node, and endpoint, and a Service in mode userspace on the node."""

    def __init__(self, family, stack, backend=None):
        self.family = family
        self.near, self.far, self.service, bits = NETS[family]
        names = self.caller, self.node, self.pod = [f"nxho{os.getpid()}{part}" for part in ("c", "n", "p")]
        for name in names:
            create_namespace(name)
            stack.callback(delete_namespace, name)
        for name, link, net in ((self.caller, "in0", self.near), (self.pod, "out0", self.far)):
            run(["ip", "link", "add", link, "netns", self.node, "type", "veth", "peer", "name", "eth0", "netns", name])
            for where, device, address in ((self.node, link, f"{net}1"), (name, "eth0", f"{net}7")):
                nodad = ["nodad"] if family is V6 else []
                run(["ip", "addr", "add", f"{address}/{bits}", "dev", device, *nodad], namespace=where)
                run(["ip", "link", "set", device, "up"], namespace=where)
            run(["ip", "route", "add", "default", "via", f"{net}1"], namespace=name)
        run(["ip", "route", "add", "default", "via", f"{self.far}7"], namespace=self.node)
        self.forward(True)
        self.server = self.listen()
        stack.callback(self.server.close)
        self.stack = stack
        self.target = UserspaceTarget(family, self.node)
        stack.callback(self.target.close)
        self.lead(backend or UserspaceBackend())

    def forward(self, on):
        name = "ipv4.ip_forward" if self.family is V4 else "ipv6.conf.all.forwarding"
        run(["sysctl", "-qw", f"net.{name}={int(on)}"], namespace=self.node)

    def listen(self, namespace=None, address=None):
        kind = socket.AF_INET if self.family is V4 else socket.AF_INET6
        with in_namespace(namespace or self.pod):
            return socket.create_server((address or f"{self.far}7", PORT), family=kind)

    def lead(self, backend, address=None):
        """Rules and relay for a Service with this endpoint."""
        made = plan(
            service("shop/web", self.service, port=80),
            endpoint_slice("shop/web", endpoint(address or f"{self.far}7"), port=PORT),
            family=self.family,
        )
        rules, changes = backend.advance(None, made)
        self.target.apply(changes)
        assert self.target.read() == rules

    def connection(self, namespace=None, server=None):
        """Both ends of a connection through the Service."""
        with in_namespace(namespace or self.caller):
            client = self.stack.enter_context(socket.create_connection((self.service, 80), 60))
        taken, _ = (server or self.server).accept()
        self.stack.enter_context(taken)
        taken.settimeout(60)
        return client, taken

    def wait(self, condition, what):
        deadline = time.monotonic() + 60
        while not condition(self.target.counts):
            assert time.monotonic() < deadline, f"{what}: {self.target.counts}"
            time.sleep(0.01)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(params=[V4, V6], ids=["IPv4", "IPv6"])
def network(request, stack):
    return Network(request.param, stack)


def sent(sock, size, seed):
    """Send random bytes and the end; returns their hash, once it is called."""
    data = random.Random(seed).randbytes(size)

    def send():
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread, hashlib.sha256(data).hexdigest()


def received(sock):
    """Read to the end; the hash of what came."""
    found = hashlib.sha256()
    while part := sock.recv(1 << 18):
        found.update(part)
    return found.hexdigest()


def handed_over(network, client, taken):
    """Send enough through a connection for the relay to hand it over."""
    for source, sink in ((client, taken), (taken, client)):
        thread = threading.Thread(target=source.sendall, args=(bytes(MANY),), daemon=True)
        thread.start()
        left = MANY
        while left:
            left -= len(sink.recv(min(left, 1 << 18)))
        thread.join(60)
    network.wait(lambda counts: counts.handed_over == 1, "handed over")


@pytest.mark.parametrize("first", ["client", "endpoint"])
def test_bulk_data_of_either_side_arrives_whole_with_its_end(network, first):
    """The handover is in the middle of the data. On a busy machine, the data may end before."""
    client, taken = network.connection()
    source, sink = (client, taken) if first == "client" else (taken, client)
    thread, expected = sent(source, MANY, 1)
    assert received(sink) == expected
    thread.join(60)
    # The other direction is still open.
    thread, expected = sent(sink, 1 << 20, 2)
    assert received(source) == expected
    thread.join(60)
    network.wait(lambda counts: counts.open == 0, "the end")


@pytest.mark.parametrize("before", [True, False], ids=["handed over before", "while they run"])
def test_both_directions_at_once(network, before):
    client, taken = network.connection()
    if before:
        handed_over(network, client, taken)
    up, expected_up = sent(client, MANY, 1)
    down, expected_down = sent(taken, MANY, 2)
    got = []
    reader = threading.Thread(target=lambda: got.append(received(taken)), daemon=True)
    reader.start()
    assert received(client) == expected_down
    reader.join(60)
    assert got == [expected_up]
    for thread in (up, down):
        thread.join(60)


def test_the_connection_outlives_the_relay(network):
    client, taken = network.connection()
    handed_over(network, client, taken)
    network.target.close()
    for source, sink in ((client, taken), (taken, client)):
        source.sendall(b"still here")
        assert sink.recv(100) == b"still here"
    with in_namespace(network.caller), pytest.raises(ConnectionRefusedError):
        socket.create_connection((network.service, 80), 60)


@pytest.mark.parametrize("who", ["client", "endpoint"])
def test_a_reset_arrives(network, who):
    client, taken = network.connection()
    handed_over(network, client, taken)
    resetting, other = (client, taken) if who == "client" else (taken, client)
    resetting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    resetting.close()
    with pytest.raises(OSError) as caught:
        other.recv(10)
    assert caught.value.errno == errno.ECONNRESET


def test_a_reader_that_stops_gets_everything_later(network):
    """Whether the relay still has the connection, or the client's closed window is already the endpoint's concern."""
    client, taken = network.connection()
    thread, expected = sent(taken, MANY, 3)
    time.sleep(1.5)
    assert received(client) == expected
    thread.join(60)


def test_small_messages_stay_with_the_relay(network):
    client, taken = network.connection()
    for _ in range(50):
        client.sendall(b"question")
        assert taken.recv(100) == b"question"
    counts = network.target.counts
    assert (counts.open, counts.handed_over, counts.kept) == (1, 0, {})


def kept(network, client, taken, reason):
    thread, expected = sent(taken, MANY, 4)
    assert received(client) == expected
    thread.join(60)
    network.wait(lambda counts: counts.kept, "kept")
    ((text, count),) = network.target.counts.kept.items()
    assert reason in text
    assert (count, network.target.counts.handed_over) == (1, 0)


def test_a_connection_with_timestamps_is_copied(stack):
    network = Network(V4, stack, UserspaceBackend(plain_tcp=False))
    kept(network, *network.connection(), "TCP timestamps")


def test_a_client_on_the_node_is_copied(network):
    kept(network, *network.connection(network.node), "on this node itself")


def test_an_endpoint_on_the_node_is_copied(network):
    server = network.listen(network.node, f"{network.far}1")
    network.stack.callback(server.close)
    network.lead(UserspaceBackend(), f"{network.far}1")
    kept(network, *network.connection(server=server), "on this node itself")


def test_a_node_that_does_not_forward_copies(network):
    network.forward(False)
    kept(network, *network.connection(), "does not forward")


def test_a_firewall_that_forwards_nothing_lets_it_through(network):
    tool = "iptables" if network.family is V4 else "ip6tables"
    run([tool, "-P", "FORWARD", "DROP"], namespace=network.node)
    client, taken = network.connection()
    handed_over(network, client, taken)


def test_whether_the_kernel_removes_timestamps_is_tried_without_a_trace(network):
    before = network.target.read()
    assert missing_plain_tcp(network.family, network.node) == ""
    assert network.target.read() == before


def test_a_kernel_that_removes_no_timestamps_says_so(monkeypatch):
    def refuse(argv, **_):
        raise CommandError(argv, 2, "Extension TCPOPTSTRIP revision 0 not supported")

    monkeypatch.setattr(userspace, "run", refuse)
    said = missing_plain_tcp(V4)
    assert "TCPOPTSTRIP does not work for IPv4" in said
    made = UserspaceDataplane().backend_here((V4, V6))
    assert "mangle" not in {table for table, _ in made.render(plan()).tables.jumps}


def test_sides_that_scale_their_windows_differently_are_copied(stack):
    network = Network(V4, stack)
    run(["sysctl", "-qw", "net.ipv4.tcp_rmem=4096 65536 65536"], namespace=network.pod)
    kept(network, *network.connection(), "scale their windows differently")
