"""Node-local DNS, on the kernel: its addresses, untracked questions, and the DNS Service when it is gone."""

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tests.proxy.kernel.small_cluster import CALLERS, HERE, POD, SERVERS, SmallCluster, service, slices

from narthex.dns.program.node_local import TABLE, NodeLocalLink, NodeLocalLinkError
from narthex.linux.addresses import own_addresses
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run
from narthex.model.links import NODE_LOCAL_DNS_LINK
from narthex.testing.load import until

pytestmark = pytest.mark.kernel

LIMIT = 120.0
SOURCE = Path(__file__).parents[3] / "src"
ADDRESSES = ["169.254.20.10", "10.96.0.10", "fd6e::a"]
HOLDER = f"""
import sys, time
from narthex.dns.program.node_local import NodeLocalLink
held = NodeLocalLink({ADDRESSES!r})
held.attract()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def node():
    name = f"nxt-{os.getpid()}-ownlink"
    create_namespace(name)
    run(["ip", "link", "set", "lo", "up"], namespace=name)
    yield name
    delete_namespace(name)


def there(node):
    """What is left of it."""
    links = run(["ip", "-br", "address"], namespace=node)
    return NODE_LOCAL_DNS_LINK in links, TABLE in run(["nft", "list", "tables"], namespace=node)


def rules(node, chain):
    return run(["nft", "list", "chain", "ip", TABLE, chain], namespace=node)


def test_it_goes_with_its_process(node):
    with in_namespace(node):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SOURCE)}
        )
    try:
        assert holder.stdout.readline() == b"ready\n"
        assert there(node) == (True, True)
        for address in ADDRESSES:
            assert run(["ip", "route", "get", address], namespace=node).startswith("local ")
        refused = run(["sh", "-c", f"nft delete table ip {TABLE} 2>&1 || true"], namespace=node)
        assert "not permitted" in refused
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    until(lambda: there(node) == (False, False), "the end of link and tables")


def test_one_at_a_time_and_again(node):
    with in_namespace(node):
        held = NodeLocalLink(ADDRESSES)
        try:
            own = {each.address for each in own_addresses()}
            assert not own & set(ADDRESSES)
            with pytest.raises(NodeLocalLinkError, match="another process answers on this node"):
                NodeLocalLink(ADDRESSES)
        finally:
            held.close()
            held.close()
        again = NodeLocalLink(ADDRESSES[:1])
        again.attract()
        again.release()
        assert "notrack" not in "".join(rules(node, chain) for chain in ("prerouting", "output"))
        assert "notrack" in rules(node, "replies")
        again.close()
    assert there(node) == (False, False)


def test_what_cannot_be_leaves_nothing(node):
    with in_namespace(node), pytest.raises(NodeLocalLinkError):
        # Nobody may have all of them: the kernel refuses the second one.
        NodeLocalLink(["127.0.0.1", "ff02::1"])
    assert there(node) == (False, False)


DNS_IP = "10.110.0.10"
CONFIGURATION = [
    {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clusterCIDR": "10.64.0.0/12,fd64::/48",
        "conntrack": {"maxPerCore": 0},
    },
    {
        "apiVersion": "narthex/v1alpha1",
        "kind": "NarthexConfiguration",
        "parts": {"proxy": True, "dns": True},
        "dns": {"addresses": ["169.254.20.10", DNS_IP], "upstreams": []},
    },
]


class DnsNode(SmallCluster):
    """A node that answers for names itself, with a DNS Service whose endpoint is a pod."""

    def start(self, *flags, dns=True):
        config = self.manifests.parent / "config.yaml"
        own = {**CONFIGURATION[1], "parts": {"proxy": True, "dns": dns}}
        config.write_text(yaml.safe_dump_all([{**CONFIGURATION[0], "mode": self.mode}, own]))
        argv = [sys.executable, "-m", "narthex", "node", "--manifests", str(self.manifests), "--config", str(config)]
        with self.log_path.open("wb") as log, in_namespace(self.world.node):
            self.process = subprocess.Popen(
                [*argv, "--hostname-override", "worker-a", "-v4", *flags],
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(SOURCE)},
            )
        return self

    def terminate(self):
        """End the process as a kubelet does."""
        self.process.terminate()
        self.process.wait(LIMIT)

    def asked(self, address, name="web.shop.svc.cluster.local", kind=1, patience=2.0):
        """The response to a pod's question, None when none comes within `patience` seconds."""
        labels = b"".join(bytes((len(label),)) + label.encode() for label in name.split(".")) + b"\0"
        with in_namespace(self.world.namespace(CALLERS)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((POD[4], 0))
            sock.settimeout(patience)
            sock.connect((address, 53))
            try:
                sock.send(struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + struct.pack(">HH", kind, 1))
                return sock.recv(4096)
            except OSError:
                return None

    def tracked(self):
        """Flows of DNS that the node's connection tracking knows."""
        return [
            line for line in run(["conntrack", "-L"], namespace=self.world.node).splitlines() if "dport=53 " in line
        ]


class Refuser:
    """The DNS pod: it refuses everything, and so can be told from the node."""

    def __init__(self, cluster):
        with in_namespace(cluster.world.namespace(SERVERS)):
            self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind((HERE[4][0], 5353))
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self):
        while True:
            packet, client = self._sock.recvfrom(512)
            if packet == b"end":
                return
            self._sock.sendto(packet[:2] + b"\x81\x85" + packet[4:], client)

    def close(self, cluster):
        with in_namespace(cluster.world.namespace(SERVERS)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"end", (HERE[4][0], 5353))
        self._thread.join()
        self._sock.close()


@pytest.fixture(params=["nftables", "iptables"])
def cluster(tmp_path, request):
    with DnsNode(tmp_path, request.param) as made:
        port = {"name": "dns", "port": 53, "targetPort": 5353, "protocol": "UDP"}
        spec = {"type": "ClusterIP", "clusterIPs": [DNS_IP], "ipFamilies": ["IPv4"], "ports": [port]}
        (dns_slice, _) = slices({HERE[4][0]: "ready"}, name="kube-dns")
        dns_slice["ports"] = [{"name": "dns", "port": 5353, "protocol": "UDP"}]
        made.put("dns", service("kube-dns", 10, **spec), dns_slice)
        made.put("web", service(), *slices({HERE[4][1]: "ready"}))
        refuser = Refuser(made)
        try:
            yield made
        finally:
            made.kill()
            refuser.close(made)


class Queries:
    """Steady queries of a pod while the block runs, each second one from the same socket."""

    def __init__(self, cluster, per_second=400):
        self._namespace = cluster.world.namespace(CALLERS)
        self._rest = 1 / per_second
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent = 0
        self.failed = []
        """Errors, and the numbers of queries without an answer."""
        self.answers = Counter()
        """Answers by RCODE: the node's 0, the endpoint's 5."""

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()

    def _run(self):
        waiting, poll = {}, select.poll()
        with contextlib.ExitStack() as stack, in_namespace(self._namespace):
            same = self._socket(stack, poll)
            due = time.monotonic()
            while not self._stopping.is_set():
                sock = same if self.sent % 2 else self._socket(stack, poll)
                waiting[self.sent & 0xFFFF] = sock
                head = struct.pack(">HHHHHH", self.sent & 0xFFFF, 0x0100, 1, 0, 0, 0)
                self._try(sock.send, head + b"\3web\4shop\3svc\7cluster\5local\0\0\1\0\1")
                self.sent += 1
                due = max(due + self._rest, time.monotonic() - 0.5)
                self._receive(waiting, poll, same, due)
            end = time.monotonic() + LIMIT / 4
            while waiting and time.monotonic() < end:
                self._receive(waiting, poll, same, time.monotonic() + 0.1)
        self.failed += sorted(waiting)

    def _socket(self, stack, poll):
        sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sock.setblocking(False)
        sock.bind((POD[4], 0))
        sock.connect((DNS_IP, 53))
        poll.register(sock, select.POLLIN)
        return sock

    def _try(self, do, *arguments):
        try:
            return do(*arguments)
        except BlockingIOError:
            return None
        except OSError as error:
            self.failed.append(str(error))
            return None

    def _receive(self, waiting, poll, same, until_then):
        while True:
            ready = poll.poll(max(0.0, until_then - time.monotonic()) * 1000)
            for number, _ in ready:
                one = next((sock for sock in (same, *waiting.values()) if sock.fileno() == number), None)
                packet = self._try(one.recv, 4096) if one is not None else None
                if packet is not None:
                    self.answers[packet[3] & 0xF] += 1
                    waiting.pop(struct.unpack_from(">H", packet)[0], None)
                if one is not same:
                    poll.unregister(number)
            if time.monotonic() >= until_then:
                return


@pytest.mark.parametrize("cluster", ["nftables"], indirect=True)
def test_no_query_is_lost_when_the_node_starts_ends_and_is_replaced(cluster):
    cluster.start(dns=False)
    cluster.wait(lambda: (cluster.asked(DNS_IP) or b"\0" * 12)[3] & 0xF == 5, "an answer of the endpoint")
    cluster.terminate()
    with Queries(cluster) as queries:
        for _ in range(2):
            before = queries.answers[0]
            cluster.start()
            cluster.wait(lambda: queries.answers[0] > before + 200, "answers of the node")  # noqa: B023
            cluster.terminate()
    assert queries.failed == []
    assert queries.answers[0] >= 400 and queries.answers[5] > 0
    print(f"{queries.sent} queries, {queries.answers}")


@pytest.mark.row("S21")
def test_a_pod_asks_its_node_and_then_the_service(cluster):
    cluster.start()
    expected = socket.inet_aton("10.110.0.1")
    for address in ("169.254.20.10", DNS_IP):
        cluster.wait(
            lambda address=address: (cluster.asked(address) or b"").endswith(expected), f"an answer at {address}"
        )
    cluster.ready()
    # Of the questions before there was anybody to answer them.
    run(["conntrack", "-F"], namespace=cluster.world.node)
    for _ in range(20):
        for kind in (1, 28):
            assert cluster.asked(DNS_IP, kind=kind, patience=30)[3] & 0xF == 0
    assert cluster.tracked() == []
    cluster.kill()
    refused = lambda: (cluster.asked(DNS_IP) or b"\0" * 12)[3] & 0xF == 5  # noqa: E731
    until(refused, "an answer from the DNS Service's endpoint")
    assert cluster.tracked()
    cluster.start()
    cluster.wait(lambda: (cluster.asked(DNS_IP) or b"").endswith(expected), "an answer of the node again")
