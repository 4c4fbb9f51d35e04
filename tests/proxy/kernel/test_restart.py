"""The proxy is killed and started again under load: no connection notices, and only what differs is written."""

import random

import pytest
from tests.proxy.kernel.small_cluster import HERE, SOCKETS, THERE, SmallCluster, service, slices

from narthex.linux.nfnetlink import NfNetlink
from narthex.testing.load import Load

pytestmark = [pytest.mark.kernel, pytest.mark.row("21.16", "21.20", "30.15")]

MODES = ("nftables", "iptables", SOCKETS)
HELD = 200
ENDPOINTS = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
QUIET = {"nothing to write", "wrote settings only"}


@pytest.fixture(params=MODES)
def cluster(request, tmp_path):
    with SmallCluster(tmp_path, request.param) as made:
        made.serve(*ENDPOINTS)
        made.put("web", service(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
        yield made


@pytest.fixture
def load(cluster):
    made = Load([cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_outside(6)])
    yield made
    made.close()


def settled(load, cluster):
    """All that is held still works, and nothing failed or was lost on the way."""
    load.exchange()
    assert load.failures == []
    assert len(load.held) == HELD
    assert load.resent == 0, "new connections lost packets"
    if cluster.sockets:
        assert cluster.sent_to_endpoints > load.made // 4, "programs chose no endpoints for the pod's sockets"


def test_kill_and_restart_without_harm(cluster, load):
    cluster.start().ready()
    load.hold(HELD)
    before, netlink = cluster.rules(handles=True), NfNetlink(cluster.world.node)
    generation = netlink.generation()
    ends = {f"[{a}]:8080" if ":" in a else f"{a}:8080" for a in ENDPOINTS}
    with load.streaming():
        cluster.kill()
        assert cluster.rules(handles=True) == before, "the rules stay when the process goes"
        made = load.made
        cluster.wait(lambda: load.made > made + 20, "new connections without a proxy")
        cluster.start().ready()
        made = load.made
        cluster.wait(lambda: load.made > made + 20, "new connections after the restart")
        cluster.wait(lambda: set(load.endpoints) == ends, "an answer of each endpoint")
    settled(load, cluster)
    assert cluster.rules(handles=True) == before
    assert netlink.generation() == generation, "a restart without a change makes no transaction at all"
    assert len(cluster.wrote()) >= 2 and set(cluster.wrote()) <= QUIET, cluster.wrote()


def test_a_restart_writes_only_the_difference(cluster, load):
    for number in range(2, 40):
        states = dict.fromkeys(ENDPOINTS, "ready")
        cluster.put(
            f"other-{number}", service(f"other-{number}", number, 30100 + number), *slices(states, f"other-{number}")
        )
    cluster.start().ready()
    load.hold(HELD)
    with load.streaming():
        cluster.kill()
        added = HERE[4][3]
        cluster.serve(added)
        cluster.put("web", service(), *slices(dict.fromkeys([*ENDPOINTS, added], "ready")))
        cluster.start().ready()
        cluster.wait(lambda: load.endpoints[f"{added}:8080"] > 0, "the endpoint that came while the proxy was down")
    settled(load, cluster)
    ipv4 = next(line for line in cluster.log.splitlines() if "synced IPv4" in line)
    ipv6 = next(line for line in cluster.log.splitlines() if "synced IPv6" in line)
    assert ipv6.rpartition("; ")[2] in QUIET, ipv6
    numbers = [int(word) for word in ipv4.rpartition("; wrote ")[2].replace(",", "").split() if word.isdigit()]
    # nftables: elements of this Service's two frontends and its row; iptables: its chains, of 39 Services' hundreds.
    assert 0 < sum(numbers) < 30, ipv4


def test_killed_in_the_middle_of_its_work(cluster, load):
    """Wherever a kill hits, what is there works, and the next start brings it to what is asked for."""
    chance = random.Random(7)
    cluster.start().ready()
    load.hold(HELD)
    spare = [HERE[4][4], THERE[4][4], HERE[6][4], THERE[6][4]]
    cluster.serve(*spare)
    with load.streaming():
        for turn in range(6):
            chosen = ENDPOINTS + chance.sample(spare, turn % 5)
            cluster.put("web", service(), *slices(dict.fromkeys(chosen, "ready")))
            for number in range(2, 12):
                cluster.put(f"other-{number}", service(f"other-{number}", number, 30100 + number + turn))
            made = load.made
            cluster.wait(lambda: load.made >= made + chance.randrange(2, 12), "some load")  # noqa: B023
            cluster.kill()
            cluster.start()
        cluster.ready()
        cluster.synced(spare[0] if spare[0] in chosen else ENDPOINTS[0])
    settled(load, cluster)
    cluster.kill()
    cluster.start().ready()
    assert set(cluster.wrote()) <= QUIET, cluster.wrote()
