"""Connected UDP sockets: listed, selected by the kernel, and closed for their programs. Sockets themselves are the witness."""

import errno
import os
import socket
import threading
from contextlib import ExitStack

import pytest

from narthex.linux import socket_diag
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace, namespace_path
from narthex.linux.socket_diag import UdpSockets, missing_destroy
from narthex.model import IPFamily

pytestmark = pytest.mark.kernel

NAME = f"nxdiag{os.getpid()}"
V4, V6 = IPFamily.IPV4, IPFamily.IPV6
SO_COOKIE = 57


class Namespace:
    """A namespace of its own with sockets inside."""

    def __init__(self, name, stack):
        self.name = name
        self.stack = stack
        create_namespace(name)
        stack.callback(delete_namespace, name)
        descriptor = os.open(namespace_path(name), os.O_RDONLY)
        stack.callback(os.close, descriptor)
        self.sockets = UdpSockets(descriptor)
        stack.callback(self.sockets.close)

    def connected(self, address, port=53, family=None):
        kind = family or (socket.AF_INET6 if ":" in address else socket.AF_INET)
        with in_namespace(self.name):
            made = self.stack.enter_context(socket.socket(kind, socket.SOCK_DGRAM))
        made.settimeout(30)
        made.connect((address, port))
        return made


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pod(stack):
    return Namespace(NAME, stack)


def cookie(sock):
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), "little")


def error_of(sock):
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def test_connected_sockets_have_peer_and_cookie(pod):
    plain, wide = pod.connected("127.0.0.1", 53), pod.connected("::1", 54)
    with in_namespace(pod.name):
        unconnected = pod.stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        unconnected.bind(("127.0.0.1", 0))
    (found,) = pod.sockets.connected(V4)
    assert (found.local, found.peer, found.cookie) == (plain.getsockname(), ("127.0.0.1", 53), cookie(plain))
    (found,) = pod.sockets.connected(V6)
    assert (found.local, found.peer, found.cookie) == (wide.getsockname()[:2], ("::1", 54), cookie(wide))


def test_an_ipv6_socket_that_uses_ipv4_counts_as_ipv4(pod):
    mapped = pod.connected("::ffff:127.0.0.1", 53)
    for peers in (None, {("127.0.0.1", 53)}):
        (found,) = pod.sockets.connected(V4, peers)
        assert (found.peer, found.cookie) == (("127.0.0.1", 53), cookie(mapped))
    assert pod.sockets.connected(V6) == []
    assert pod.sockets.destroy([found]) == [True]
    assert error_of(mapped) == errno.ECONNABORTED


@pytest.mark.parametrize("family", [V4, V6])
@pytest.mark.parametrize("count", [1, 2, 5, socket_diag.MOST_IN_KERNEL, socket_diag.MOST_IN_KERNEL + 1])
def test_peers_select_exactly_these_sockets(pod, family, count):
    address = "127.0.0.1" if family is V4 else "::1"
    made = {port: pod.connected(address, port) for port in range(1000, 1008)}
    # Every second one, and others without a socket.
    wanted = {(address, 1000 + 2 * step) for step in range(min(count, 4))}
    wanted |= {(address, 20000 + step) for step in range(count - len(wanted))}
    found = {each.cookie for each in pod.sockets.connected(family, wanted)}
    assert found == {cookie(sock) for port, sock in made.items() if (address, port) in wanted}
    assert pod.sockets.connected(family, set()) == []


@pytest.mark.parametrize(("family", "count"), [(V4, 3), (V6, 3)])
def test_the_kernel_does_the_selection(pod, family, count):
    """Without the selection in this process, the kernel's answer is the same."""
    address = "127.0.0.1" if family is V4 else "::1"
    made = [pod.connected(address, port) for port in range(1000, 1000 + 2 * count)]

    class Anything(set):
        def __contains__(self, item):
            return True

    wanted = Anything((address, 1000 + step) for step in range(count))
    assert {each.cookie for each in pod.sockets.connected(family, wanted)} == set(map(cookie, made[:count]))


def test_a_destroyed_socket_wakes_its_program_and_can_connect_again(pod):
    client, other = pod.connected("127.0.0.1", 53), pod.connected("127.0.0.1", 54)
    errors = []

    def receive():
        try:
            client.recv(10)
        except OSError as error:
            errors.append(error.errno)

    waiting = threading.Thread(target=receive)
    waiting.start()
    assert pod.sockets.destroy(pod.sockets.connected(V4, {("127.0.0.1", 53)})) == [True]
    waiting.join(30)
    assert errors == [errno.ECONNABORTED]
    assert error_of(other) == 0
    client.connect(("127.0.0.1", 54))
    assert {each.cookie for each in pod.sockets.connected(V4)} == {cookie(client), cookie(other)}


def test_a_socket_that_went_elsewhere_meanwhile_stays(pod):
    client, closed = pod.connected("127.0.0.1", 53), pod.connected("127.0.0.1", 53)
    found = pod.sockets.connected(V4, {("127.0.0.1", 53)})
    client.connect(("127.0.0.1", 54))
    closed.close()
    assert pod.sockets.destroy(found) == [False, False]
    assert error_of(client) == 0


def test_other_namespaces_are_not_seen(pod, stack):
    other = Namespace(f"{NAME}b", stack)
    sock = other.connected("127.0.0.1", 53)
    assert pod.sockets.connected(V4) == []
    assert [each.cookie for each in other.sockets.connected(V4)] == [cookie(sock)]


def test_this_kernel_can_destroy():
    assert missing_destroy() == ""


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EOPNOTSUPP, "CONFIG_INET_DIAG_DESTROY"), (errno.EPERM, "Operation not permitted")]
)
def test_a_kernel_that_cannot_destroy_says_so(monkeypatch, number, said):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(UdpSockets, "destroy", refuse)
    assert said in missing_destroy()


def test_a_kernel_without_udp_diagnosis_says_so(monkeypatch):
    monkeypatch.setattr(UdpSockets, "connected", lambda *_: [])
    assert "CONFIG_INET_UDP_DIAG" in missing_destroy()
