"""Mode userspace on a real node: a relay in company with its rules, under load, when things come and go."""

import hashlib
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.proxy.kernel.small_cluster import HERE, NODE_IP, PORT, THERE, SmallCluster, service, slices

from narthex.linux.namespaces import in_namespace
from narthex.linux.processes import processes_inside
from narthex.linux.run import run
from narthex.model.net import IPFamily, Protocol
from narthex.proxy.backends.userspace.backend import FIRST, LAST
from narthex.proxy.kernel.userspace import shown
from narthex.testing.load import Load, OpenConnection, until

pytestmark = pytest.mark.kernel

ENDPOINTS = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
DEAD = [HERE[4][5], HERE[6][5]]
"""Addresses of this node's pods where nobody listens."""


@pytest.fixture
def cluster(tmp_path):
    with SmallCluster(tmp_path, "userspace") as made:
        made.serve(*ENDPOINTS)
        made.put("web", service(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
        yield made


@pytest.fixture
def load(cluster):
    made = Load([cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_node(6)])
    yield made
    made.close()


def relays(cluster):
    """The relay processes of the node, by number."""
    found = processes_inside([cluster.world.node])
    return [each.pid for each in found if "proxy.relay.process" in command_of(each.pid)]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def listeners(cluster, family=IPFamily.IPV4):
    return shown(family, cluster.world.node)


@pytest.mark.row("25.1", "25.2", "25.3")
def test_chains_of_the_old_mode_lead_to_listeners(cluster, load):
    cluster.start().ready()
    with load.streaming():
        cluster.wait(lambda: len(load.endpoints) == 4, "an answer of each endpoint")
    assert load.failures == []
    rules = cluster.rules()
    for chain in (
        "KUBE-PORTALS-CONTAINER",
        "KUBE-PORTALS-HOST",
        "KUBE-NODEPORT-CONTAINER",
        "KUBE-NODEPORT-HOST",
        "KUBE-NODEPORT-NON-LOCAL",
    ):
        assert f":{chain} -" in rules
    ((protocol, port),) = listeners(cluster)
    assert protocol is Protocol.TCP and FIRST <= port <= LAST
    assert rules.count(f"--to-ports {port}") == 8, "cluster IP and node port, for what comes in and what is sent"


@pytest.mark.row("25.4", "29.1")
def test_a_dead_endpoint_costs_a_retry_never_an_error(cluster, load):
    cluster.start().ready()
    cluster.put("web", service(), *slices(dict.fromkeys([*ENDPOINTS, *DEAD], "ready")))
    cluster.wait(lambda: any(DEAD[0] in map(first, one.endpoints) for one in listeners(cluster).values()), "the dead")
    with load.streaming():
        made = load.made
        cluster.wait(lambda: load.made >= made + 100, "new connections")
    assert load.failures == []
    assert len(load.endpoints) == 4


def first(place):
    return place[0]


@pytest.mark.row("25.7")
@pytest.mark.parametrize("version", [4, 6])
def test_datagrams_of_60_kilobytes_pass_whole(cluster, version):
    """Through rules, fragments and relay, and back from the address that was asked."""
    server = HERE[version][0]
    port = {"name": "dns", "port": 53, "targetPort": 5353, "nodePort": 30053, "protocol": "UDP"}
    made = slices({server: "ready"}, "dns")
    for each in made:
        each["ports"] = [{"name": "dns", "port": 5353, "protocol": "UDP"}]
    cluster.put("dns", service("dns", 9, ports=[port]), *made)
    cluster.start().ready()
    kind = socket.AF_INET6 if version == 6 else socket.AF_INET
    with ExitStack() as stack:
        where = cluster.world.namespace(cluster.world.layout.homes[server])
        with in_namespace(where):
            echo = stack.enter_context(socket.socket(kind, socket.SOCK_DGRAM))
        echo.bind((server, 5353))
        for way, to in (
            (cluster.from_outside(version), (NODE_IP[version], 30053)),
            (cluster.from_pod(version), ("fd6e::9" if version == 6 else "10.110.0.9", 53)),
            (cluster.from_node(version), (NODE_IP[version], 30053)),
        ):
            with in_namespace(way.namespace):
                client = stack.enter_context(socket.socket(kind, socket.SOCK_DGRAM))
            client.bind((way.source, 0))
            client.connect(to)
            for sock in (client, echo):
                sock.settimeout(20)
            data = os.urandom(60_000)
            client.send(data)
            got, peer = echo.recvfrom(1 << 16)
            assert got == data
            echo.sendto(got[::-1], peer)
            assert client.recv(1 << 16) == data[::-1], way.label


@pytest.mark.row("25.12")
def test_bulk_and_half_close_through_the_rules(cluster):
    """The client ends its side first and then gets the sum of all that it has sent."""
    server, size = HERE[4][4], 64 << 20
    where = cluster.world.namespace(cluster.world.layout.homes[server])
    with in_namespace(where):
        listening = socket.create_server((server, PORT))
    cluster.put("web", service(), *slices({server: "ready"}))
    cluster.start().ready()
    way, block = cluster.from_outside(), os.urandom(1 << 20)

    def sums_up():
        taken, _ = listening.accept()
        with taken:
            digest = hashlib.sha256()
            while data := taken.recv(1 << 20):
                digest.update(data)
            taken.sendall(digest.digest())

    with listening, ThreadPoolExecutor(1) as pool, in_namespace(way.namespace):
        summing = pool.submit(sums_up)
        with socket.create_connection((way.destination, way.port), 20, (way.source, 0)) as client:
            for _ in range(size // len(block)):
                client.sendall(block)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == hashlib.sha256(block * (size // len(block))).digest()
            assert client.recv(100) == b""
        summing.result()


@pytest.mark.row("25.14", "3.11")
def test_connections_live_through_changes(cluster, load):
    """Also those to an endpoint that leaves: only its own end ends them."""
    cluster.start().ready()
    load.hold(40)
    with load.streaming():
        for turn in range(6):
            gone = ENDPOINTS[turn % 2 :: 2]
            cluster.put("web", service(), *slices(dict.fromkeys(gone, "ready")))
            cluster.put(f"more-{turn}", service(f"more-{turn}", 2 + turn, 30100 + turn))
            cluster.synced(f"shop/more-{turn}")
        cluster.put("web", service(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
        cluster.wait(lambda: all(len(one.endpoints) == 2 for one in listeners(cluster).values()), "all endpoints")
    load.exchange()
    assert load.failures == []
    assert len(load.held) == 40


@pytest.mark.row("25.14")
def test_a_new_process_takes_the_same_ports_and_writes_no_rule(cluster, load):
    cluster.start().ready()
    before, had = cluster.rules(), set(listeners(cluster))
    cluster.kill()
    until(lambda: not relays(cluster), "the end of the relays")
    assert cluster.rules() == before
    with pytest.raises(ConnectionRefusedError):
        OpenConnection(cluster.from_pod(4)).close()
    cluster.start().ready()
    assert (cluster.rules(), set(listeners(cluster))) == (before, had)
    with load.streaming():
        cluster.wait(lambda: load.made >= 20, "new connections")
    assert load.failures == []
    assert all("chain" not in line for line in cluster.wrote()), cluster.wrote()


def test_a_relay_that_dies_is_started_again(cluster, load):
    cluster.start().ready()
    had = [set(listeners(cluster, family)) for family in IPFamily]
    before = relays(cluster)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    cluster.wait(lambda: len(set(relays(cluster)) - set(before)) == len(before), "other relays")
    cluster.wait(lambda: [set(listeners(cluster, family)) for family in IPFamily] == had, "the same ports")
    with load.streaming():
        cluster.wait(lambda: load.made >= 20, "new connections")
    assert load.failures == []
    for family in IPFamily:
        said = [line for line in cluster.log.splitlines() if f"the {family.label} relay " in line]
        for what in ("has died: signal 9 (Killed)", "is started again"):
            # A sync that was about to use it tells of it, too.
            assert any(what in line for line in said), said


@pytest.mark.row("25.9")
def test_a_port_that_somebody_has_is_left_to_them(cluster, load):
    cluster.start().ready()
    ((_, port),) = listeners(cluster)
    cluster.kill()
    until(lambda: not relays(cluster), "the end of the relays")
    with in_namespace(cluster.world.node):
        taken = socket.create_server(("0.0.0.0", port))
    with taken:
        cluster.start().ready()
        ((_, other),) = listeners(cluster)
        assert other != port
        with load.streaming():
            cluster.wait(lambda: load.made >= 20, "new connections")
        assert load.failures == []
        # Nothing of ours leads there or guards it any more.
        ipv4 = run(["iptables-save"], namespace=cluster.world.node)
        assert f" {port} " not in ipv4 and f"--to-ports {port}" not in ipv4


@pytest.mark.row("25.1")
def test_nobody_comes_to_the_relay_but_by_a_service(cluster):
    cluster.start("--proxy-port-range", "61500-61500").ready()
    assert set(listeners(cluster)) == {(Protocol.TCP, 61500)}
    for way in (cluster.from_outside(port=61500), cluster.from_pod(address=NODE_IP[4], port=61500)):
        with pytest.raises(ConnectionRefusedError):
            OpenConnection(way).close()
    OpenConnection(cluster.from_outside()).close()


def test_more_services_than_ports_are_refused_not_mixed_up(cluster):
    """Ports are given by name, so it is known who gets none."""
    cluster.put("api", service("api", 2, 30081), *slices({ENDPOINTS[1]: "ready", ENDPOINTS[3]: "ready"}, "api"))
    cluster.start("--proxy-port-range", "61500-61500").ready()
    OpenConnection(cluster.from_outside(port=30081)).close()
    with pytest.raises(ConnectionRefusedError):
        OpenConnection(cluster.from_outside()).close()


@pytest.mark.row("26.1", "29.15")
@pytest.mark.parametrize("other", ["nftables", "iptables"])
def test_to_another_mode_and_back(cluster, load, other):
    cluster.start().ready()
    cluster.kill()
    until(lambda: not relays(cluster), "the end of the relays")
    for mode in (other, "userspace"):
        cluster.mode = mode
        cluster.start().ready()
        cluster.wait(lambda: "removed what another mode" in cluster.log, "the end of what was left")
        made = load.made
        with load.streaming():
            cluster.wait(lambda made=made: load.made >= made + 20, "new connections")
        assert load.failures == []
        everything = run(["iptables-save"], namespace=cluster.world.node)
        assert ("KUBE-PORTALS-CONTAINER" in everything) is (mode == "userspace")
        assert "KUBE-SVC-" not in everything or mode == "iptables"
        if mode == "userspace":
            assert "table ip narthex" not in run(["nft", "list", "ruleset"], namespace=cluster.world.node)
        cluster.kill()
        until(lambda: not relays(cluster), "the end of the relays")
