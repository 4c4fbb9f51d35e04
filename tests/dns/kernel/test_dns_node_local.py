"""Node-local DNS, on the kernel: its addresses, untracked questions, and the DNS Service when it is gone."""

import os
import socket
import struct
import subprocess
import sys
import threading
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

SOURCE = Path(__file__).parents[3] / "src"
ADDRESSES = ["169.254.20.10", "10.96.0.10", "fd6e::a"]
HOLDER = f"""
import sys, time
from narthex.dns.program.node_local import NodeLocalLink
held = NodeLocalLink({ADDRESSES!r})
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
        NodeLocalLink(ADDRESSES[:1]).close()
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

    def start(self, *flags):
        config = self.manifests.parent / "config.yaml"
        config.write_text(yaml.safe_dump_all([{**CONFIGURATION[0], "mode": self.mode}, CONFIGURATION[1]]))
        argv = [sys.executable, "-m", "narthex", "node", "--manifests", str(self.manifests), "--config", str(config)]
        with self.log_path.open("wb") as log, in_namespace(self.world.node):
            self.process = subprocess.Popen(
                [*argv, "--hostname-override", "worker-a", "-v4", *flags],
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(SOURCE)},
            )
        return self

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
