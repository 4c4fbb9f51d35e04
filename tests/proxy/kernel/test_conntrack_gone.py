"""Connections of all protocols to endpoints and Services that are gone, and what happened while nobody looked."""

import errno
import socket

import pytest
from tests.proxy.kernel.conntrack_network import NEW, NODE_PORT, OLD, SCTP, TCP, UDP, Network, objects
from tests.proxy.kernel.small_cluster import CALLERS, CLUSTER_IP, HERE, NODE_IP, POD, THERE, SmallCluster

from narthex.linux.run import run
from narthex.testing.load import until

pytestmark = pytest.mark.kernel

MODES = ("nftables", "iptables")


@pytest.fixture(params=MODES)
def network(request, tmp_path):
    with SmallCluster(tmp_path, request.param) as cluster:
        made = Network(cluster)
        try:
            made.serve(*OLD, *NEW)
            yield made
        finally:
            made.close()


@pytest.mark.row("18.7", "29.3")
def test_the_last_endpoint_goes(network):
    cluster = network.cluster
    cluster.put("udp", *objects(UDP, {OLD[0]: "ready"}))
    cluster.put("tcp", *objects(TCP, {OLD[0]: "ready"}, "tcp", 2, 30080))
    cluster.put("sctp", *objects(SCTP, {OLD[0]: "ready"}, "sctp", 3, 30081))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    assert network.reached(client) == OLD[0]
    talker = network.client(CALLERS, POD[4], "10.110.0.2", 80, socket.SOCK_STREAM)
    network.insert(SCTP, "10.110.0.3", 80, OLD[0], 7003)
    network.insert(SCTP, NODE_IP[4], 30081, OLD[0], 7004)
    assert len(network.flows(4)) == 4

    for protocol, number, node_port in ((UDP, 1, NODE_PORT), (TCP, 2, 30080), (SCTP, 3, 30081)):
        name = protocol.lower() if number > 1 else "web"
        cluster.put(protocol.lower(), *objects(protocol, {}, name, number, node_port))
    network.wait(lambda: not network.flows(4), "the removal")
    client.send(b"anybody?")
    with pytest.raises(ConnectionRefusedError):
        client.recv(1)
    talker.close()


@pytest.mark.row("18.8", "29.3", "3.11")
@pytest.mark.parametrize("protocol", [TCP, SCTP])
def test_of_tcp_and_sctp_only_what_leads_to_vanished_pods(network, protocol):
    cluster = network.cluster
    ends = {HERE[4][n]: n for n in range(5)}
    states = ["ready", "ready", "terminating", "unready", "ready"]
    cluster.put("web", *objects(protocol, dict(zip(ends, states, strict=True))))
    cluster.start().ready()
    for end, number in ends.items():
        network.insert(protocol, CLUSTER_IP[4], 80, end, 7100 + number)
        network.insert(protocol, NODE_IP[4], NODE_PORT, end, 7200 + number)
    network.insert(protocol, THERE[4][5], NODE_PORT, HERE[4][0], 7300)
    network.insert(protocol, CLUSTER_IP[4], 81, HERE[4][0], 7301)
    before = network.flows(4)

    # The first pod vanishes, the second stops being ready, the third is still terminating, and so on.
    states = ["unready", "terminating", "unready", "ready"]
    cluster.put("web", *objects(protocol, dict(zip(list(ends)[1:], states, strict=True))))
    network.wait(lambda: "removed 2 stale connections of IPv4: 2 endpoint-gone" in cluster.log, "the removal")
    assert {flow[3] for flow in before - network.flows(4)} == {"7100", "7200"}


@pytest.mark.row("29.3")
def test_a_client_of_a_vanished_pod_is_told_at_once(network):
    cluster = network.cluster
    cluster.put("web", *objects(TCP, {OLD[0]: "ready"}))
    cluster.start().ready()
    talker = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80, socket.SOCK_STREAM)
    cluster.put("web", *objects(TCP, {NEW[0]: "ready"}))
    network.wait(lambda: not network.flows(4, TCP), "the removal")
    # What is there now knows nothing of this connection and says so; the client need not wait for its timeout.
    with pytest.raises(OSError) as refusal:
        talker.send(b"hello")
        talker.recv(1)
    assert refusal.value.errno == errno.ECONNRESET


@pytest.mark.row("29.3")
def test_what_led_to_a_deleted_service_and_to_an_address_that_moved_on(network):
    cluster = network.cluster
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}, externalIPs=["203.0.113.5"]))
    cluster.put("other", *objects(UDP, {NEW[0]: "ready"}, "other", 2, 30054))
    cluster.start().ready()
    moving = network.client(CALLERS, POD[4], "203.0.113.5", 80)
    gone = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    staying = network.client(CALLERS, POD[4], "10.110.0.2", 80)
    assert [network.reached(client) for client in (moving, gone, staying)] == [OLD[0], OLD[0], NEW[0]]
    # Another's rewriting to another place, from the very node port that goes.
    network.insert(TCP, CLUSTER_IP[4], 80, HERE[4][5], 7001)
    network.insert(UDP, CLUSTER_IP[4], 80, HERE[4][5], 7001)

    cluster.put("other", *objects(UDP, {NEW[0]: "ready"}, "other", 2, 30054, externalIPs=["203.0.113.5"]))
    cluster.remove("web")
    network.wait(lambda: OLD[0] not in network.ends(4, UDP), "the removal")
    assert network.ends(4, UDP) == {NEW[0], HERE[4][5]}
    assert network.ends(4, TCP) == {HERE[4][5]}
    assert network.reached(moving) == NEW[0]


@pytest.mark.row("18.1", "21.20")
def test_what_became_stale_while_nobody_looked(network):
    cluster = network.cluster
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    assert network.reached(client) == OLD[0]
    cluster.kill()
    cluster.put("web", *objects(UDP, {NEW[0]: "ready"}))
    assert network.reached(client) == OLD[0]
    cluster.start().ready()
    network.wait(lambda: "1 endpoint-gone" in cluster.log, "the removal")
    assert network.reached(client) == NEW[0]


@pytest.mark.row("29.9", "18.5")
def test_what_went_past_rules_that_somebody_had_flushed(network):
    cluster = network.cluster
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    # As a connection that began in the moment without rules.
    network.insert(UDP, CLUSTER_IP[4], 80, CLUSTER_IP[4], client.getsockname()[1], "--reply-port-src", "80")
    if cluster.mode == "nftables":
        run(["nft", "flush", "ruleset"], namespace=cluster.world.node)
    else:
        run(["iptables", "-t", "nat", "-F"], namespace=cluster.world.node)
    network.wait(lambda: "1 black-hole" in cluster.log, "the removal")
    until(lambda: CLUSTER_IP[4] in cluster.rules(), "the rules")
    assert network.reached(client) == OLD[0]


@pytest.mark.row("18.11")
def test_a_client_of_the_relay_goes_on_to_the_next_service_that_has_the_address(tmp_path):
    with SmallCluster(tmp_path, "userspace") as cluster:
        network = Network(cluster)
        try:
            network.serve(*OLD, *NEW)
            cluster.put("web", *objects(UDP, {OLD[0]: "ready"}))
            cluster.start().ready()
            client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
            assert network.reached(client) == OLD[0]
            cluster.put("web", *objects(UDP, {NEW[0]: "ready"}, "other"))
            network.wait(lambda: "1 frontend-gone" in cluster.log, "the removal")
            assert network.reached(client) == NEW[0]
        finally:
            network.close()
