"""When the proxy says that it is well (rows of group 17)."""

import pytest

from narthex.model.net import FAMILIES, IPFamily
from narthex.model.objects import Node
from narthex.proxy.program.health import ProxyHealth
from narthex.testing.fakes import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def health(clock):
    return ProxyHealth(FAMILIES, 30.0, clock)


def sync_all(health):
    for family in FAMILIES:
        health.synced(family)


@pytest.mark.row("17.7", "29.1")
def test_not_healthy_before_the_first_good_sync_of_all_families(health):
    assert health.healthz()[0] == 503
    health.synced(IPFamily.IPV4)
    assert health.healthz()[0] == 503
    assert not health.ready
    health.synced(IPFamily.IPV6)
    assert health.healthz()[0] == health.livez()[0] == 200
    assert health.ready


@pytest.mark.row("17.1", "17.7")
def test_alive_until_a_sync_is_overdue(health, clock):
    """The proxy waits for the API server, and later for one sync; meanwhile, another program removes rules."""
    clock.advance(1000)
    assert health.livez()[0] == 200
    health.queued(IPFamily.IPV4)
    clock.advance(60)
    assert health.livez()[0] == 200
    clock.advance(1)
    assert health.livez()[0] == 503
    sync_all(health)
    health.suspected(IPFamily.IPV4)
    clock.advance(1000)
    assert health.livez()[0] == 200
    assert health.healthz()[0] == 503


@pytest.mark.row("17.1", "17.2")
def test_a_change_may_wait_twice_the_sync_period(health, clock):
    sync_all(health)
    health.queued(IPFamily.IPV6)
    clock.advance(60)
    assert health.livez()[0] == 200
    clock.advance(1)
    status, body = health.livez()
    assert status == 503
    assert body["status"]["IPv4"]["healthy"] and not body["status"]["IPv6"]["healthy"]
    health.synced(IPFamily.IPV6)
    assert health.livez()[0] == 200


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_wall_clock_that_jumps_changes_dates_only(health, clock, jump):
    sync_all(health)
    health.queued(IPFamily.IPV4)
    before = health.livez()[1]["currentTime"]
    clock.jump(jump)
    assert health.livez()[0] == health.healthz()[0] == 200
    assert health.livez()[1]["currentTime"] != before
    clock.advance(60)
    assert health.livez()[0] == 200
    clock.advance(1)
    assert health.livez()[0] == 503
    health.synced(IPFamily.IPV4)
    assert health.livez()[0] == health.healthz()[0] == 200


@pytest.mark.row("17.2")
def test_the_oldest_waiting_change_counts(health, clock):
    sync_all(health)
    for _ in range(7):
        health.queued(IPFamily.IPV4)
        clock.advance(10)
    assert health.livez()[0] == 503


@pytest.mark.row("17.5", "17.6")
def test_last_updated_is_now_when_healthy_and_the_last_good_sync_when_not(health, clock):
    assert health.healthz()[1]["lastUpdated"] is None
    assert health.livez()[1]["lastUpdated"] == health.livez()[1]["currentTime"]
    sync_all(health)
    clock.advance(1000)
    body = health.healthz()[1]
    assert body["lastUpdated"] == body["currentTime"] == "2023-11-14T22:30:00.000Z"
    health.queued(IPFamily.IPV4)
    clock.advance(100)
    body = health.healthz()[1]
    assert body["lastUpdated"] == body["status"]["IPv4"]["lastUpdated"] == "2023-11-14T22:13:20.000Z"
    assert body["status"]["IPv6"]["lastUpdated"] == body["currentTime"]


@pytest.mark.row("17.3", "17.4", "16.12")
@pytest.mark.parametrize(
    "node",
    [
        Node(name="a", deletion_timestamp="2026-01-01T00:00:00Z"),
        Node(name="a", taints=("ToBeDeletedByClusterAutoscaler",)),
    ],
)
def test_a_node_that_leaves_is_not_eligible_but_lives(health, node):
    sync_all(health)
    health.saw_node(node)
    status, body = health.healthz()
    assert (status, body["nodeEligible"], body["healthy"]) == (503, False, False)
    assert health.livez()[0] == 200
    assert "nodeEligible" not in health.livez()[1]
    assert health.healthy, "what is said of single Services is another matter (row 16.12)"


@pytest.mark.parametrize("node", [None, Node(name="a", taints=("other",))])
def test_other_nodes_are_eligible(health, node):
    sync_all(health)
    health.saw_node(node)
    assert health.healthz()[0] == 200


@pytest.mark.row("17.3")
def test_where_every_node_has_an_object_one_that_was_never_seen_is_not_eligible(clock):
    health = ProxyHealth([IPFamily.IPV4], 30.0, clock, node_expected=True)
    health.synced(IPFamily.IPV4)
    assert health.healthz()[0] == 503
    assert health.livez()[0] == 200
    health.saw_node(None)
    assert health.healthz()[0] == 503
    health.saw_node(Node(name="worker-a"))
    assert health.healthz()[0] == 200
    health.saw_node(None)
    assert health.healthz()[0] == 503


@pytest.mark.row("17.1", "29.12")
def test_another_period_counts_at_once(clock):
    health = ProxyHealth([IPFamily.IPV4], 30.0, clock)
    health.synced(IPFamily.IPV4)
    health.queued(IPFamily.IPV4)
    clock.advance(25)
    assert health.healthy
    health.pace(10.0)
    assert not health.healthy
