"""Clients of UDP in mode ipvs: they leave an endpoint that is gone, and nobody else is touched."""

import pytest
from tests.proxy.kernel.conntrack_network import NEW, OLD, UDP, Network, objects
from tests.proxy.kernel.small_cluster import SmallCluster
from tests.proxy.kernel.test_conntrack import clients


@pytest.fixture
def network(tmp_path):
    with SmallCluster(tmp_path, "ipvs") as cluster:
        made = Network(cluster)
        try:
            made.serve(*OLD, *NEW)
            yield made
        finally:
            made.close()


@pytest.mark.row("18.1", "18.3", "24.8")
def test_udp_goes_to_the_new_endpoint(network):
    """By ClusterIP and node port, in both families, from a pod, from outside and from the node."""
    cluster = network.cluster
    cluster.put("web", *objects(UDP, dict.fromkeys(OLD, "ready")))
    cluster.start().ready()
    talkers = clients(network)
    assert [network.reached(client) for client in talkers] == [OLD[0]] * 4 + [OLD[1]] * 4
    cluster.put("web", *objects(UDP, dict.fromkeys(NEW, "ready")))
    # IPVS takes its entries along when the real server goes (expire_nodest_conn), so the search finds few or none.
    ends = lambda: {end for version in (4, 6) for end in network.ends(version, UDP)}  # noqa: E731
    network.wait(lambda: ends().isdisjoint(OLD), "the end of the old entries")
    assert [network.reached(client) for client in talkers] == [NEW[0]] * 4 + [NEW[1]] * 4
