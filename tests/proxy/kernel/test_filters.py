"""Connections among other software's filters, and beside our own refusals."""

import pytest
from tests.proxy.kernel.small_cluster import CLUSTER_IP, HERE, THERE, SmallCluster, service, slices

from narthex.linux.run import run
from narthex.testing.load import OpenConnection

pytestmark = pytest.mark.kernel

MODES = ("nftables", "iptables")
HERE_4, THERE_4 = HERE[4][0], THERE[4][0]
SOON = 1.0
"""Seconds to wait for what is not to come."""


@pytest.fixture
def cluster(mode, tmp_path):
    with SmallCluster(tmp_path, mode) as made:
        made.serve(HERE_4, THERE_4)
        yield made


def started(cluster, *states):
    cluster.put("web", service(), *slices(dict(states or [(HERE_4, "ready"), (THERE_4, "ready")])))
    return cluster.start().ready()


def filtered(cluster, text):
    """A firewall's rules beside ours."""
    run(["nft", "-f", "-"], stdin=f"table inet firewall {{\n{text}\n}}\n", namespace=cluster.world.node)


def answers(way, count=6):
    """Who answers some connections in a row."""
    seen = set()
    for _ in range(count):
        line = OpenConnection(way)
        line.close()
        seen.add(line.endpoint.rpartition(":")[0])
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.row("13.2")
def test_a_service_that_becomes_empty_refuses_the_new_only(cluster):
    started(cluster, (HERE_4, "ready"))
    ways = [cluster.from_pod(), cluster.from_outside()]
    lines = [OpenConnection(way) for way in ways]
    cluster.put("web", service(), *slices({HERE_4: "unready"}))
    cluster.wait(lambda: HERE_4 not in cluster.rules(), "the empty Service")
    for way in ways:
        with pytest.raises(ConnectionRefusedError):
            OpenConnection(way)
    for line in lines:
        line.exchange()
        line.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.row("22.8")
def test_a_closed_input_does_not_matter_to_what_is_sent_on(cluster):
    started(cluster)
    filtered(cluster, "chain input { type filter hook input priority 0; policy drop; ct state established accept; }")
    assert answers(cluster.from_outside()) <= {HERE_4, THERE_4}
    assert answers(cluster.from_pod()) <= {HERE_4, THERE_4}


@pytest.mark.parametrize("mode", ["nftables"])
@pytest.mark.row("23.7")
def test_what_another_table_drops_stays_dropped(cluster):
    started(cluster)
    filtered(cluster, "chain forward { type filter hook forward priority 10; policy drop; }")
    for way in (cluster.from_pod(), cluster.from_outside()):
        with pytest.raises(TimeoutError):
            OpenConnection(way, SOON)


@pytest.mark.parametrize("mode", ["iptables"])
@pytest.mark.row("22.7", "22.8")
def test_under_a_closed_forward_only_what_is_masqueraded_passes(cluster):
    started(cluster)
    run(["iptables", "-P", "FORWARD", "DROP"], namespace=cluster.world.node)
    assert answers(cluster.from_outside()) <= {HERE_4, THERE_4}
    assert answers(cluster.from_outside(address=CLUSTER_IP[4], port=80)) <= {HERE_4, THERE_4}
    with pytest.raises(TimeoutError):
        OpenConnection(cluster.from_pod(), SOON)
