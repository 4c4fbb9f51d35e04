"""A proxy that proves its changes serves a cluster, and refuses to write wrong rules."""

from pathlib import Path

import pytest
from tests.proxy.kernel.faulty_proxy import SPOILED
from tests.proxy.kernel.small_cluster import HERE, THERE, SmallCluster, service, slices

from narthex.testing.load import OpenConnection

pytestmark = pytest.mark.kernel

FAULTY = str(Path(__file__).with_name("faulty_proxy.py"))
ENDS = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]


def ask(way):
    """Return the endpoint that answers one connection."""
    line = OpenConnection(way)
    line.close()
    return line.endpoint.rpartition(":")[0].strip("[]")


def ready(*addresses):
    return dict.fromkeys(addresses, "ready")


@pytest.fixture(params=["nftables", "iptables"])
def cluster(tmp_path, request):
    with SmallCluster(tmp_path, request.param) as made:
        made.serve(*ENDS, HERE[4][1], SPOILED)
        made.put("web", service(), *slices(ready(*ENDS)))
        yield made


def refused(cluster):
    text = cluster.get(10249, "/metrics")[1]
    lines = (line for line in text.splitlines() if line.startswith("narthex_refused_service_ports{"))
    return sum(float(line.split()[-1]) for line in lines)


def test_wrong_rules_are_refused_and_all_else_is_served(cluster):
    cluster.start("--verify", module=(FAULTY,)).ready()
    for way in (cluster.from_pod(), cluster.from_pod(6), cluster.from_outside(), cluster.from_outside(6)):
        assert ask(way) in ENDS
    cluster.put("web", service(), *slices(ready(*ENDS, SPOILED)))
    cluster.wait(lambda: "IPv4 changes of shop/web:http are refused" in cluster.log, "the refusal")
    assert SPOILED not in cluster.rules() and refused(cluster) == 1
    cluster.put("cart", service("cart", 2, 30081), *slices(ready(HERE[4][1]), "cart"))
    cluster.synced("10.110.0.2")
    assert ask(cluster.from_pod(address="10.110.0.2")) == HERE[4][1]
    assert {ask(cluster.from_pod()) for _ in range(20)} <= set(ENDS)
    assert cluster.get(10256, "/healthz")[0] == 200
    cluster.put("web", service(), *slices(ready(*ENDS, HERE[4][1])))
    cluster.wait(lambda: "no IPv4 change is refused any more" in cluster.log, "the end of the refusal")
    assert HERE[4][1] in cluster.rules() and refused(cluster) == 0


def test_a_mode_that_works_by_more_than_rules_is_no_mode_to_verify(tmp_path):
    with SmallCluster(tmp_path, "userspace") as made:
        made.start("--verify")
        assert made.process.wait(60) != 0
        made.process = None
        assert "verifyChanges" in made.log and "modes nftables and iptables only" in made.log
