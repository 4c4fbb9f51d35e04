"""Endpoints are replaced under load, as a rollout of a Deployment does: no connection fails."""

import pytest
from tests.proxy.kernel.small_cluster import HERE, THERE, SmallCluster, service, slices

from narthex.testing.load import Load

pytestmark = [pytest.mark.kernel, pytest.mark.row("3.2", "3.3", "3.8", "3.11", "30.13")]

MODES = ("nftables", "iptables")
HELD = 60


class Deployment:
    """Pods in the order that a rollout would do things in: a new one serves before it is told of; an old one is told
    of as terminating while it still serves, its clients leave it, and it ends when nobody is left."""

    def __init__(self, cluster, load, **spec):
        self.cluster, self.load, self.spec = cluster, load, spec
        self.states = {}

    def publish(self):
        self.cluster.put("web", service(**self.spec), *slices(self.states))

    def add(self, *addresses):
        self.cluster.serve(*addresses)
        self.states.update(dict.fromkeys(addresses, "ready"))
        self.publish()
        self.wait_for(*addresses)

    def wait_for(self, *addresses):
        for address in addresses:
            before = self.load.endpoints[name_of(address)]
            self.cluster.wait(lambda: self.load.endpoints[name_of(address)] > before, f"connections to {address}")  # noqa: B023

    def terminate(self, *addresses):
        """New connections go elsewhere, while there is an elsewhere; those that are open go on."""
        self.states.update(dict.fromkeys(addresses, "terminating"))
        self.publish()
        self.cluster.wait(lambda: not self.any_met(addresses), f"the rules without {addresses}")

    def any_met(self, addresses):
        """Whether one of these endpoints gets any of the next connections. 60 of them miss one of three by luck with
        a chance of 1 in thirty billion."""
        met = lambda: sum(self.load.endpoints[name_of(address)] for address in addresses)  # noqa: E731
        before, made = met(), self.load.made
        self.cluster.wait(lambda: met() > before or self.load.made > made + 60, "more connections")
        return met() > before

    def remove(self, *addresses):
        """The pods are gone for good once their last client is."""
        for address in addresses:
            self.load.leave(name_of(address))
            self.cluster.wait(lambda: not self.cluster.answers.open_connections(name_of(address)), "the last client")  # noqa: B023
            assert self.cluster.answers.close(name_of(address)) == 0
            del self.states[address]
        self.publish()


def name_of(address):
    return f"[{address}]:8080" if ":" in address else f"{address}:8080"


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
    cluster.serve(*first)
    deployment.states.update(dict.fromkeys(first, "ready"))
    deployment.publish()
    cluster.start().ready()
    load.hold(HELD)
    return deployment


def settled(load):
    load.exchange()
    assert load.failures == []
    assert len(load.held) == HELD
    assert load.resent == 0, "new connections lost packets"


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
    settled(load)
    assert {line.endpoint for line in load.held} <= {name_of(address) for pair in new for address in pair}


def test_scaled_from_three_to_one_and_back(cluster, load):
    deployment = began(cluster, load)
    gone = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
    with load.streaming():
        deployment.terminate(*gone)
        deployment.remove(*gone)
        assert {line.endpoint for line in load.held} == {name_of(HERE[4][1]), name_of(HERE[6][1])}
        deployment.add(*gone)
    settled(load)


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
    settled(load)
    assert outside.failures == [] and outside.resent == 0
    assert set(outside.endpoints) == set(map(name_of, here))
