"""Stale UDP connections on the kernel: what is removed, what must stay, and where the next packet goes.

`conntrack -L` is the witness: another program's view of the same table.
"""

import re

import pytest
from tests.proxy.kernel.conntrack_network import NEW, NODE_PORT, OLD, TCP, UDP, Network, objects
from tests.proxy.kernel.small_cluster import (
    CALLERS,
    CLIENTS,
    CLUSTER_IP,
    HERE,
    NODE_IP,
    OUTSIDE,
    POD,
    PORT,
    THERE,
    SmallCluster,
)

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


def clients(network):
    """One of each kind, in both families."""
    made = []
    for version in (4, 6):
        made += [
            network.client(CALLERS, POD[version], CLUSTER_IP[version], 80),
            network.client(CLIENTS, OUTSIDE[version], NODE_IP[version], NODE_PORT),
            network.client(None, NODE_IP[version], NODE_IP[version], NODE_PORT),
            network.client(None, NODE_IP[version], CLUSTER_IP[version], 80),
        ]
    return made


@pytest.mark.row("18.1", "18.2", "18.3", "29.4", "30.8", "20.20", "20.21")
def test_udp_goes_to_the_new_endpoint_with_the_next_packet_and_nobody_else_is_touched(network):
    cluster = network.cluster
    cluster.put("web", *objects(UDP, dict.fromkeys(OLD, "ready")))
    cluster.start().ready()
    talkers = clients(network)
    assert [network.reached(client) for client in talkers] == [OLD[0]] * 4 + [OLD[1]] * 4

    # To the node port's number elsewhere, to the pod itself, in a zone of somebody else's, of another protocol.
    for version, old in zip((4, 6), OLD, strict=True):
        network.client(CLIENTS, OUTSIDE[version], THERE[version][3], NODE_PORT).send(b"x")
        network.client(CALLERS, POD[version], THERE[version][3], 80).send(b"x")
        assert network.reached(network.client(CLIENTS, OUTSIDE[version], old, PORT)) == old
        network.insert(UDP, CLUSTER_IP[version], 80, old, 7001, "--zone", "5")
        network.insert(TCP, CLUSTER_IP[version], 80, old, 7002)
    ours = {OLD[0]: 4, OLD[1]: 4}
    others = {version: {flow for flow in network.flows(version) if not is_ours(flow)} for version in (4, 6)}
    assert [len(others[version]) for version in (4, 6)] == [5, 5]

    cluster.put("web", *objects(UDP, dict.fromkeys(NEW, "ready")))
    network.wait(lambda: "removed 4 stale connections of IPv6: 4 endpoint-gone" in cluster.log, "the removal")
    for version in (4, 6):
        assert network.flows(version) == others[version]
    assert [network.reached(client) for client in talkers] == [NEW[0]] * 4 + [NEW[1]] * 4
    metrics = cluster.get(10249, "/metrics")[1]
    for family, old in zip(("IPv4", "IPv6"), OLD, strict=True):
        assert f'kubeproxy_conntrack_reconciler_deleted_entries_total{{ip_family="{family}"}} {ours[old]}.0' in metrics
        assert (
            f'narthex_stale_flows_removed_total{{ip_family="{family}",reason="endpoint-gone"}} {ours[old]}.0' in metrics
        )
        searches = re.search(
            rf'kubeproxy_conntrack_reconciler_sync_duration_seconds_count{{ip_family="{family}"}} (\d+)', metrics
        )
        assert searches and int(searches[1]) == 2


def is_ours(flow):
    protocol, _, destination, _, port, _, _, zone = flow
    ours = {(CLUSTER_IP[4], "80"), (CLUSTER_IP[6], "80"), (NODE_IP[4], str(NODE_PORT)), (NODE_IP[6], str(NODE_PORT))}
    return protocol == "udp" and not zone and (destination, port) in ours


@pytest.mark.row("18.3", "18.6", "30.8")
def test_internal_local_and_what_still_serves(network):
    cluster = network.cluster
    second = HERE[4][1]
    network.serve(second)
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}, internalTrafficPolicy="Local"))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    assert network.reached(client) == OLD[0]

    # Terminating but serving: new connections go to the other one, this one stays.
    cluster.put("web", *objects(UDP, {OLD[0]: "terminating", second: "ready"}, internalTrafficPolicy="Local"))
    fresh = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    cluster.synced(second)
    assert network.reached(fresh) == second
    assert network.reached(client) == OLD[0]
    cluster.put("web", *objects(UDP, {second: "ready"}, internalTrafficPolicy="Local"))
    network.wait(lambda: OLD[0] not in network.ends(4, UDP), "the removal")
    assert network.reached(client) == second


@pytest.mark.row("18.4", "30.8")
def test_another_target_port(network):
    cluster = network.cluster
    network.serve(OLD[0], port=PORT + 1)
    cluster.put("web", *objects(UDP, {OLD[0]: "ready"}))
    cluster.start().ready()
    client = network.client(CALLERS, POD[4], CLUSTER_IP[4], 80)
    assert network.reached(client) == OLD[0]
    changed = objects(UDP, {OLD[0]: "ready"})
    for one in changed[1:]:
        one["ports"][0]["port"] = PORT + 1
    cluster.put("web", *changed)
    network.wait(lambda: not network.flows(4, UDP), "the removal")
    assert network.reached(client) == OLD[0]
    assert {flow[6] for flow in network.flows(4, UDP)} == {str(PORT + 1)}


@pytest.mark.row("18.5", "30.8")
def test_udp_that_was_there_before_the_service(network):
    cluster = network.cluster
    cluster.start().ready()
    talkers = [
        network.client(CALLERS, POD[4], CLUSTER_IP[4], 80),
        network.client(None, NODE_IP[4], CLUSTER_IP[4], 80),
        network.client(CALLERS, POD[6], CLUSTER_IP[6], 80),
    ]
    for client in talkers:
        client.send(b"into nothing")
    assert network.ends(4, UDP) == {CLUSTER_IP[4]}
    cluster.put("web", *objects(UDP, dict.fromkeys(OLD, "ready")))
    network.wait(lambda: "1 black-hole" in cluster.log and "2 black-hole" in cluster.log, "the removal")
    assert [network.reached(client) for client in talkers] == [OLD[0], OLD[0], OLD[1]]
