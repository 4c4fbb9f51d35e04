"""Session affinity on the kernel, with short timeouts: who stays where, until when, and who must not."""

import time
from collections import Counter

import pytest
from tests.proxy.kernel.small_cluster import CLUSTER_IP, CROWD, HERE, THERE, SmallCluster, service, slices

from narthex.testing.load import OpenConnection

pytestmark = [pytest.mark.kernel, pytest.mark.row("14.1", "14.2", "14.3", "30.5")]

MODES = ("nftables", "iptables")
ENDPOINTS = [HERE[4][0], HERE[4][1], THERE[4][0], HERE[6][0], HERE[6][1], THERE[6][0]]
LONG = 10800


def sticky(seconds=LONG, **spec):
    return service(sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": seconds}}, **spec)


@pytest.fixture(params=MODES)
def cluster(request, tmp_path):
    with SmallCluster(tmp_path, request.param) as made:
        made.serve(*ENDPOINTS)
        yield made


def started(cluster, web, states=None):
    cluster.put("web", web, *slices(states or dict.fromkeys(ENDPOINTS, "ready")))
    return cluster.start().ready()


def ask(way):
    """Who answers one connection."""
    line = OpenConnection(way)
    line.close()
    return line.endpoint.rpartition(":")[0].strip("[]")


def ask_all(cluster):
    """Who answers each of the crowd."""
    return [ask(cluster.from_outside(4, CLUSTER_IP[4], 80, source=client)) for client in CROWD]


def without(cluster, address):
    """The rules no longer send to an endpoint."""
    cluster.wait(lambda: address not in cluster.rules(), f"the rules without {address}")


def test_a_session_lasts_while_it_is_used_and_ends_after(cluster):
    """Each visit begins the time anew; afterwards turns are drawn again. That sixty clients all draw the same as
    before, or leave one of three out, happens once in ten billion runs."""
    started(cluster, sticky(4))
    start = time.monotonic()
    first = ask_all(cluster)
    assert set(first) == set(ENDPOINTS[:3])
    for seconds in (2, 4.2):
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        assert ask_all(cluster) == first, f"after {seconds} s"
    time.sleep(5.2)
    later = ask_all(cluster)
    assert set(later) == set(ENDPOINTS[:3])
    assert later != first


@pytest.mark.row("14.2")
@pytest.mark.parametrize("version", [4, 6])
def test_all_frontends_share_a_session(cluster, version):
    started(cluster, sticky())
    inside, outside = cluster.from_pod(version), cluster.from_outside(version)
    same = cluster.from_pod(version, outside.destination, outside.port)
    first = ask(inside)
    assert {ask(way) for way in [same, inside] * 8} == {first}
    node = ask(cluster.from_node(version))
    assert {ask(cluster.from_node(version)) for _ in range(15)} == {node}


@pytest.mark.row("29.7")
@pytest.mark.parametrize("state", ["unready", "terminating", "gone"])
def test_nobody_is_pinned_to_an_endpoint_that_is_not_ready(cluster, state):
    """Its clients go elsewhere at once and stay there, also when it is ready again; the others do not move."""
    started(cluster, sticky())
    first = ask_all(cluster)
    left = first[0]
    states = dict.fromkeys(ENDPOINTS, "ready") | {left: state}
    if state == "gone":
        del states[left]
        cluster.answers.close(f"{left}:8080")
    cluster.put("web", sticky(), *slices(states))
    without(cluster, left)
    second = ask_all(cluster)
    assert left not in second
    assert [now for was, now in zip(first, second, strict=True) if was != left] == [x for x in first if x != left]
    if state == "gone":
        cluster.serve(left)
    cluster.put("web", sticky(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
    cluster.synced(left)
    assert ask_all(cluster) == second, "a session of long ago must not come back"


@pytest.mark.row("14.4")
def test_who_is_remembered_for_a_broken_endpoint_is_refused_while_it_is_ready(cluster):
    """Nobody but its own probes says what an endpoint can do; the proxy keeps clients where they are."""
    started(cluster, sticky())
    first = ask(cluster.from_pod())
    cluster.answers.close(f"{first}:8080")
    for _ in range(5):
        with pytest.raises(ConnectionRefusedError):
            ask(cluster.from_pod())
    cluster.serve(first)
    assert ask(cluster.from_pod()) == first


@pytest.mark.row("29.7")
@pytest.mark.parametrize("version", [4, 6])
def test_another_frontend_does_not_bring_a_dead_endpoint_back(cluster, version):
    """The session was made through the ClusterIP; the node port must not follow it to an endpoint that left."""
    started(cluster, sticky())
    inside = cluster.from_pod(version)
    node_port = cluster.from_pod(version, cluster.from_outside(version).destination, 30080)
    left = ask(inside)
    cluster.answers.close(f"[{left}]:8080" if version == 6 else f"{left}:8080")
    cluster.put("web", sticky(), *slices(dict.fromkeys(ENDPOINTS, "ready") | {left: "unready"}))
    without(cluster, left)
    now = ask(node_port)
    assert now != left
    assert {ask(way) for way in [inside, node_port] * 6} == {now}


@pytest.mark.row("14.1", "21.16")
def test_sessions_outlive_the_proxy(cluster):
    started(cluster, sticky())
    first = ask_all(cluster)
    cluster.kill()
    assert ask_all(cluster) == first
    cluster.start().ready()
    assert ask_all(cluster) == first


@pytest.mark.row("14.3", "21.19")
def test_what_happens_to_others_does_not_end_a_session(cluster):
    """Another Service, another port and a new endpoint of the same Service change rules; sessions go on."""
    started(cluster, sticky())
    first = ask_all(cluster)
    added = HERE[4][5]
    cluster.serve(added)
    cluster.put("other", service("other", 2, 30081), *slices(dict.fromkeys(ENDPOINTS, "ready"), "other"))
    cluster.put("web", sticky(), *slices(dict.fromkeys([*ENDPOINTS, added], "ready")))
    cluster.synced(added)
    cluster.synced("10.110.0.2")
    assert ask_all(cluster) == first


@pytest.mark.row("14.7")
def test_affinity_is_switched_while_it_runs(cluster):
    started(cluster, service())
    way = cluster.from_pod(4)
    assert len({ask(way) for _ in range(60)}) == 3
    cluster.put("web", sticky(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
    cluster.wait(lambda: len({ask(way) for _ in range(20)}) == 1, "affinity")
    cluster.put("web", sticky(LONG - 60), *slices(dict.fromkeys(ENDPOINTS, "ready")))
    before = ask(way)
    cluster.wait(lambda: str(LONG - 60) in cluster.rules() or "2h59m" in cluster.rules(), "the new timeout")
    assert {ask(way) for _ in range(15)} == {before}, "a new timeout does not end a session"
    cluster.put("web", service(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
    cluster.wait(lambda: len({ask(way) for _ in range(20)}) == 3, "the end of affinity")


@pytest.mark.row("14.5", "14.8")
def test_under_local_policy_a_session_elsewhere_is_not_followed(cluster):
    """A pod met a remote endpoint through the ClusterIP; what it made of the node port is as for pods: the session
    goes on. Someone outside gets this node's endpoints only."""
    started(cluster, sticky(externalTrafficPolicy="Local"))
    through_cluster_ip = ask_all(cluster)
    through_node_port = [ask(cluster.from_outside(4, source=client)) for client in CROWD]
    assert set(through_node_port) <= set(HERE[4])
    for was, now in zip(through_cluster_ip, through_node_port, strict=True):
        assert now == was or was in THERE[4]
    assert Counter(through_cluster_ip)[THERE[4][0]] > 0
