"""An API server as a proxy's origin: what a scrape sees of its lists, and Events that are posted."""

import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from narthex.kube.access import Access
from narthex.kube.events import EventPoster, event_object, starting
from narthex.kube.messages import WatchCounts
from narthex.kube.source import FollowedList, SourceMetrics, api_origin
from narthex.testing.apiserver import FaultyApiServer


def scrape(collector):
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return {
        (sample.name.removeprefix("narthex_source_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_how_fresh_the_lists_are():
    services = FollowedList(
        kind="Service",
        counts=WatchCounts(events=7, lists=2, watches=3, failures={"410": 1, "silent": 2}),
        last_list=90.0,
        last_event=95.5,
        last_heard=99.0,
        objects=5,
        broken=1,
        trouble=True,
    )
    nodes = FollowedList(kind="Node", counts=WatchCounts())
    seen = scrape(SourceMetrics([services, nodes], lambda: 100.0))
    assert seen == {
        ("last_list_age_seconds", "Service"): 10.0,
        ("last_event_age_seconds", "Service"): 4.5,
        ("last_word_age_seconds", "Service"): 1.0,
        ("objects", "Service"): 5,
        ("objects", "Node"): 0,
        ("broken_objects", "Service"): 1,
        ("broken_objects", "Node"): 0,
        ("trouble", "Service"): 1,
        ("trouble", "Node"): 0,
        ("lists_total", "Service"): 2,
        ("lists_total", "Node"): 0,
        ("watches_total", "Service"): 3,
        ("watches_total", "Node"): 0,
        ("events_total", "Service"): 7,
        ("events_total", "Node"): 0,
        ("failures_total", "Service", "410"): 1,
        ("failures_total", "Service", "silent"): 2,
    }


def test_a_clock_that_went_back_gives_no_negative_age():
    followed = FollowedList(kind="Service", counts=WatchCounts(), last_list=101.0)
    assert scrape(SourceMetrics([followed], lambda: 100.0))["last_list_age_seconds", "Service"] == 0


def test_an_origin_has_all_that_a_proxy_needs():
    origin = api_origin(Access(master="http://127.0.0.1:1"), "worker-a", 60.0, lambda: 0.0)
    assert [each.kind for each in origin.source.followed] == ["Service", "EndpointSlice", "Node", "ServiceCIDR"]
    assert origin.creator is not None
    assert len(origin.collectors) == 1


@pytest.mark.row("26.4")
def test_events_are_posted_where_they_belong():
    event = event_object(starting("worker-a"), 1.0, "worker-a")
    with FaultyApiServer() as server:
        EventPoster(Access(master=server.url)).create_event("default", event)
    (seen,) = server.requests
    assert (seen.method, seen.path) == ("POST", "/apis/events.k8s.io/v1/namespaces/default/events")
    assert seen.headers["content-type"] == "application/json"
    assert json.loads(seen.body) == event


def test_a_server_that_refuses_or_is_away_is_an_error():
    with FaultyApiServer(token="right") as server:
        poster = EventPoster(Access(master=server.url))
        with pytest.raises(RuntimeError, match="status 401"):
            poster.create_event("default", {})
    with pytest.raises(RuntimeError, match=str(server.port)):
        poster.create_event("default", {})
