"""Packets out of window do not end a connection (rows 19.7, 30.9).

What conntrack calls invalid keeps the addresses that it has. So a packet of an endpoint that is out of window reaches
its client from an address that the client never called; the client answers with a reset, to the endpoint, whose
connection ends. Rebuilt here with packets that an endpoint sends beside its socket.
"""

import errno
import re
import socket
import struct

import pytest
from tests.proxy.kernel.small_cluster import (
    CALLERS,
    CLIENTS,
    CLUSTER_IP,
    NODE_IP,
    NODE_PORT,
    OUTSIDE,
    POD,
    PORT,
    THERE,
    SmallCluster,
    service,
    slices,
)

from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run

pytestmark = [pytest.mark.kernel, pytest.mark.row("19.7", "23.8", "30.9")]

MODES = ("nftables", "iptables")
ACK, PSH = 0x10, 0x08
FAR = 1 << 24
"""Further than any window of these connections."""
SEQUENCE_ABOVE, SEQUENCE_BELOW, ACKNOWLEDGED_ABOVE = (FAR, 0), (-FAR, 0), (0, FAR)
SHIFTS = (SEQUENCE_ABOVE, SEQUENCE_BELOW, ACKNOWLEDGED_ABOVE)

_TCP_REPAIR, _TCP_REPAIR_QUEUE, _TCP_QUEUE_SEQ = 19, 20, 21
_RECEIVE_QUEUE, _SEND_QUEUE, _OFF = 1, 2, -1


def numbers(sock):
    """The next sequence number and the next one expected, of a connection."""
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    found = []
    for queue in (_SEND_QUEUE, _RECEIVE_QUEUE):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR_QUEUE, queue)
        found.append(sock.getsockopt(socket.IPPROTO_TCP, _TCP_QUEUE_SEQ) & 0xFFFFFFFF)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _OFF)
    return found


def segment(source, destination, sequence, acknowledged, payload=b"strange"):
    """A TCP segment with its checksum; source and destination are address and port."""
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
    head = struct.pack(
        ">HHIIBBHHH",
        source[1],
        destination[1],
        sequence & 0xFFFFFFFF,
        acknowledged & 0xFFFFFFFF,
        5 << 4,
        ACK | PSH,
        65535,
        0,
        0,
    )
    data = head + payload
    ends = socket.inet_pton(family, source[0]) + socket.inet_pton(family, destination[0])
    covered = ends + struct.pack(">II", len(data), socket.IPPROTO_TCP) + data + bytes(len(data) % 2)
    total = sum(struct.unpack(f">{len(covered) // 2}H", covered))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return data[:16] + struct.pack(">H", ~total & 0xFFFF) + data[18:]


class Conversation:
    """One connection through a Service, seen from both ends."""

    def __init__(self, cluster, site, source, destination, port, endpoint):
        family = socket.AF_INET6 if ":" in source else socket.AF_INET
        beyond = cluster.world.namespace(cluster.world.layout.homes[endpoint])
        caller = cluster.world.node if site is None else cluster.world.namespace(site)
        with in_namespace(beyond):
            listener = socket.socket(family, socket.SOCK_STREAM)
            self.raw = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_TCP)
        with in_namespace(caller):
            self.client = socket.socket(family, socket.SOCK_STREAM)
        with listener:
            listener.bind((endpoint, PORT))
            listener.listen()
            for each in (self.client, listener):
                each.settimeout(30)
            self.client.bind((source, 0))
            self.client.connect((destination, port))
            self.server, _ = listener.accept()
        self.server.settimeout(30)
        self.raw.bind((endpoint, 0))
        assert self.alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (self.client, self.server, self.raw):
            each.close()

    def interfere(self, shift):
        """Send a packet that is out of window from the endpoint to whom it takes for its client."""
        sequence, acknowledged = numbers(self.server)
        here, there = self.server.getsockname()[:2], self.server.getpeername()[:2]
        data = segment(here, there, sequence + shift[0], acknowledged + shift[1])
        self.raw.sendto(data, (there[0], 0))

    def alive(self):
        """Whether both ways work. What was sent before has arrived then: all of it takes the same way."""
        try:
            self.server.sendall(b"question")
            if self.client.recv(100) != b"question":
                return False
            self.client.sendall(b"answer")
            return self.server.recv(100) == b"answer"
        except OSError as error:
            assert error.errno == errno.ECONNRESET, error
            return False


@pytest.fixture(params=MODES)
def cluster(request, tmp_path):
    with SmallCluster(tmp_path, request.param) as made:
        made.put("web", service(), *slices({THERE[4][0]: "ready", THERE[6][0]: "ready"}))
        yield made


def ways(cluster, version):
    """Connections whose ends' packets the node forwards as they are; in nftables mode, also those it is an end of."""
    yield CALLERS, POD[version], CLUSTER_IP[version], 80
    if cluster.mode == "nftables":
        yield CLIENTS, OUTSIDE[version], NODE_IP[version], NODE_PORT
        yield None, NODE_IP[version], CLUSTER_IP[version], 80


@pytest.mark.parametrize("version", [4, 6])
def test_packets_out_of_window_do_not_end_the_connection(cluster, version):
    cluster.start().ready()
    for way in ways(cluster, version):
        for shift in SHIFTS:
            with Conversation(cluster, *way, THERE[version][0]) as talk:
                talk.interfere(shift)
                assert talk.alive(), (way, shift)
                talk.interfere(shift)
                assert talk.alive(), (way, shift)


@pytest.mark.row("19.8", "20.18")
def test_those_that_a_rule_dropped_are_counted(tmp_path):
    name = "kubeproxy_iptables_ct_state_invalid_dropped_packets_total"
    with SmallCluster(tmp_path, "iptables") as cluster:
        cluster.put("web", service(), *slices({THERE[4][0]: "ready"}))
        cluster.start().ready()

        def count():
            text = cluster.get(10249, "/metrics")[1]
            return float(re.search(rf"^{name} (.+)$", text, re.MULTILINE)[1])

        before = count()
        with Conversation(cluster, CALLERS, POD[4], CLUSTER_IP[4], 80, THERE[4][0]) as talk:
            talk.interfere(SHIFTS[0])
            assert talk.alive()
        cluster.wait(lambda: count() > before, "the packet in the metrics")


def test_without_a_rule_they_do(tmp_path):
    """The other tests would prove nothing if the connection lived anyway."""
    with SmallCluster(tmp_path, "nftables") as made:
        node = made.world.node
        bare = f"""
            table ip bare {{
                chain prerouting {{
                    type nat hook prerouting priority dstnat;
                    ip daddr {CLUSTER_IP[4]} tcp dport 80 dnat to {THERE[4][0]}:{PORT}
                }}
            }}"""
        run(["nft", "-f", "-"], stdin=bare, namespace=node)
        ended = []
        for shift in SHIFTS:
            with Conversation(made, CALLERS, POD[4], CLUSTER_IP[4], 80, THERE[4][0]) as talk:
                talk.interfere(shift)
                ended.append(not talk.alive())
        assert ended[0], "a packet from above the window ends it; whether others do depends on the kernel"


def test_where_the_kernel_is_liberal_no_rule_judges(cluster):
    cluster.start("--conntrack-tcp-be-liberal").ready()
    assert "invalid" not in cluster.rules().lower()
    for shift in SHIFTS:
        with Conversation(cluster, CALLERS, POD[4], CLUSTER_IP[4], 80, THERE[4][0]) as talk:
            talk.interfere(shift)
            assert talk.alive(), shift
