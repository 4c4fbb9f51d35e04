"""Stale UDP sockets of the processes in a cgroup, in several network namespaces. The processes' own errors are the witness."""

import errno
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.processes import network_namespaces, processes_in_cgroup
from narthex.linux.setns import namespace_identity, own_namespace_identity
from narthex.model import IPFamily
from narthex.proxy.kernel import connected_sockets
from narthex.proxy.kernel.connected_sockets import ConnectedSockets
from narthex.proxy.plan.stale import StaleReason

pytestmark = pytest.mark.kernel

GONE = StaleReason.ENDPOINT_GONE
OLD, KEPT = ("127.0.0.1", 5301), ("127.0.0.1", 5302)
SERVICE = ("10.110.0.1", 53)
CLIENT = """
import socket, sys
sockets = []
for peer in sys.argv[1:]:
    made = socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM)
    made.connect((peer.rpartition("@")[0], int(peer.rpartition("@")[2])))
    sockets.append(made)
cookies = [int.from_bytes(each.getsockopt(socket.SOL_SOCKET, 57, 8), "little") for each in sockets]
print(*cookies, flush=True)
sys.stdin.readline()
print(*(each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for each in sockets), flush=True)
"""


def unified() -> Path:
    """The mount of the cgroup hierarchy of version 2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, path, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(path)
    raise AssertionError("this machine has no cgroup hierarchy of version 2")


class Pods:
    """Processes in a cgroup, each in a network namespace."""

    def __init__(self, stack):
        self.stack = stack
        self.cgroup = unified() / f"nxsock{os.getpid()}{threading.get_native_id()}"
        self.cgroup.mkdir()
        stack.callback(self.cgroup.rmdir)
        self.namespaces = []

    def namespace(self):
        name = f"nxsock{os.getpid()}n{len(self.namespaces)}"
        create_namespace(name)
        self.stack.callback(delete_namespace, name)
        self.namespaces.append(name)
        return name

    def client(self, namespace, *peers, below="", outside=False):
        """A process with a socket connected to each peer; returns it and the sockets' cookies."""
        with in_namespace(namespace):
            process = subprocess.Popen(
                [sys.executable, "-c", CLIENT, *peers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        self.stack.callback(self._end, process)
        folder = self.cgroup / below
        if below:
            folder.mkdir()
            # Before the cgroup above it, after the process: callbacks run in reverse order.
            self.stack.callback(folder.rmdir)
            self.stack.callback(self._end, process)
        if not outside:
            (folder / "cgroup.procs").write_text(str(process.pid))
        return process, [int(word) for word in process.stdout.readline().split()]

    @staticmethod
    def _end(process):
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def errors_of(process):
    """The pending error of each socket of a client."""
    process.stdin.write("\n")
    process.stdin.flush()
    return [int(word) for word in process.stdout.readline().split()]


@pytest.fixture
def pods():
    with ExitStack() as stack:
        yield Pods(stack)


def closer(pods, known):
    """Closes sockets that `known` says were redirected."""
    return ConnectedSockets(pods.cgroup, lambda _, found: [known.get(each.cookie) for each in found])


def gone(flow):
    return GONE if (flow.reply_source, flow.reply_port) == OLD else None


def test_sockets_are_closed_in_every_namespace_of_the_cgroup_and_nowhere_else(pods):
    first, second = pods.namespace(), pods.namespace()
    one, cookies = pods.client(first, "127.0.0.1@5301", "127.0.0.1@5302", "::ffff:127.0.0.1@5301")
    known = dict.fromkeys(cookies, SERVICE)
    two, cookies = pods.client(second, "127.0.0.1@5301", below="deeper")
    known |= dict.fromkeys(cookies, SERVICE)
    # Nobody redirected this one: its program asked for the endpoint itself.
    direct, _ = pods.client(first, "127.0.0.1@5301")
    outside, cookies = pods.client(pods.namespace(), "127.0.0.1@5301", outside=True)
    known |= dict.fromkeys(cookies, SERVICE)

    assert closer(pods, known).close_stale(IPFamily.IPV4, {OLD, KEPT}, gone) == Counter({GONE: 3})
    assert errors_of(one) == [errno.ECONNABORTED, 0, errno.ECONNABORTED]
    assert errors_of(two) == [errno.ECONNABORTED]
    assert errors_of(direct) == errors_of(outside) == [0]


def test_a_socket_is_described_as_a_connection_of_its_program(pods):
    process, cookies = pods.client(pods.namespace(), "::1@5301")
    seen = []
    made = closer(pods, dict.fromkeys(cookies, ("fd00:10:96::1", 53)))
    assert made.close_stale(IPFamily.IPV6, None, seen.append) == Counter()
    (flow,) = seen
    assert (flow.source, flow.destination, flow.port) == ("::1", "fd00:10:96::1", 53)
    assert (flow.reply_source, flow.reply_port, flow.translated) == ("::1", 5301, True)
    assert errors_of(process) == [0]


def test_one_look_at_each_namespace(pods, monkeypatch):
    """However many processes it has, and however many endpoints left."""
    name = pods.namespace()
    for below in "abc":
        pods.client(name, "127.0.0.1@5301", below=below)
    monkeypatch.setattr(connected_sockets, "missing_destroy", lambda: "")
    dumps = []
    monkeypatch.setattr(
        connected_sockets.UdpSockets, "connected", lambda _self, _family, peers: dumps.append(peers) or []
    )
    assert closer(pods, {}).close_stale(IPFamily.IPV4, {OLD, KEPT}, gone) == Counter()
    assert dumps == [{OLD, KEPT}]


def test_namespaces_of_processes():
    own = own_namespace_identity()
    found = [namespace_identity(each) for each in network_namespaces([os.getpid(), os.getpid(), 2**22 + 1])]
    assert found == [own]


def test_a_cgroup_that_is_gone_has_no_processes(tmp_path):
    assert processes_in_cgroup(tmp_path / "gone") == []


def test_a_kernel_that_closes_no_sockets_is_reported_once(monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.WARNING, "narthex")
    monkeypatch.setattr(connected_sockets, "missing_destroy", lambda: "it cannot")
    made = ConnectedSockets(tmp_path, lambda *_: [])
    for _ in range(2):
        assert made.close_stale(IPFamily.IPV4, None, gone) == Counter()
    assert [text for text in caplog.messages if "it cannot" in text] == [
        "UDP sockets stay connected to endpoints that are gone: it cannot"
    ]


def test_hidden_processes_are_reported_once(monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.WARNING, "narthex")
    monkeypatch.setattr(connected_sockets, "processes_in_cgroup", lambda _: [0, 0])
    made = ConnectedSockets(tmp_path, lambda *_: [])
    for _ in range(2):
        assert made.close_stale(IPFamily.IPV4, None, gone) == Counter()
    assert len([text for text in caplog.messages if "hostPID" in text]) == 1
