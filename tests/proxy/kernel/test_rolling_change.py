"""Endpoints are replaced under load, as a rollout of a Deployment does: no connection fails."""

import pytest
from tests.proxy.kernel.rollout import Deployment, name_of
from tests.proxy.kernel.small_cluster import HERE, SOCKETS, THERE, SmallCluster

from narthex.testing.load import Load

pytestmark = [pytest.mark.kernel, pytest.mark.row("3.2", "3.3", "3.8", "3.11", "30.13")]

MODES = ("nftables", "iptables", SOCKETS)
HELD = 60


@pytest.fixture(params=MODES)
def cluster(request, tmp_path):
    with SmallCluster(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def load(cluster):
    made = Load([cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_outside(6)])
    yield made
    made.close()


def began(cluster, load, **spec):
    deployment = Deployment(cluster, load, **spec)
    first = [HERE[4][0], THERE[4][0], HERE[4][1], HERE[6][0], THERE[6][0], HERE[6][1]]
    deployment.begin(*first)
    cluster.start().ready()
    load.hold(HELD)
    return deployment


def settled(load, cluster):
    load.exchange()
    assert load.failures == []
    assert len(load.held) == HELD
    assert load.resent == 0, "new connections lost packets"
    if cluster.sockets:
        assert cluster.sent_to_endpoints > load.made // 4, "programs chose no endpoints for the pod's sockets"


def test_three_endpoints_replaced_one_after_another(cluster, load):
    deployment = began(cluster, load)
    old = list(zip((HERE[4][0], THERE[4][0], HERE[4][1]), (HERE[6][0], THERE[6][0], HERE[6][1]), strict=True))
    new = list(zip((HERE[4][4], THERE[4][4], HERE[4][5]), (HERE[6][4], THERE[6][4], HERE[6][5]), strict=True))
    with load.streaming():
        for leaving, coming in zip(old, new, strict=True):
            deployment.add(*coming)
            deployment.terminate(*leaving)
            load.exchange()
            deployment.remove(*leaving)
    settled(load, cluster)
    assert {line.endpoint for line in load.held} <= {name_of(address) for pair in new for address in pair}


def test_scaled_from_three_to_one_and_back(cluster, load):
    deployment = began(cluster, load)
    gone = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
    with load.streaming():
        deployment.terminate(*gone)
        deployment.remove(*gone)
        assert {line.endpoint for line in load.held} == {name_of(HERE[4][1]), name_of(HERE[6][1])}
        deployment.add(*gone)
    settled(load, cluster)


def test_the_last_ones_serve_while_they_terminate(cluster, load):
    """Rows 3.2, 3.3: with nobody ready, those that terminate go on; under Local policy, those of this node do, though
    others are ready elsewhere."""
    deployment = began(cluster, load, externalTrafficPolicy="Local")
    here = [HERE[4][0], HERE[4][1], HERE[6][0], HERE[6][1]]
    outside = Load([cluster.from_outside(4), cluster.from_outside(6)])
    with load.streaming(), outside.streaming():
        deployment.states.update(dict.fromkeys(here, "terminating"))
        deployment.publish()
        made = outside.made
        cluster.wait(lambda: outside.made > made + 100, "more load from outside")
        deployment.states.update(dict.fromkeys((*here, THERE[4][0], THERE[6][0]), "terminating"))
        deployment.publish()
        made = load.made
        cluster.wait(lambda: load.made > made + 100, "more load")
    settled(load, cluster)
    assert outside.failures == [] and outside.resent == 0
    assert set(outside.endpoints) == set(map(name_of, here))
