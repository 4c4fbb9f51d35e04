"""Lists and streaming lists: which objects a watch begins with."""

import pytest
from tests.kube.watch.steps import (
    GONE,
    LOST,
    TOO_LARGE,
    bookmark,
    cidr,
    failure,
    line,
    listing,
    page,
    streaming,
    watching,
)

from narthex.kube.messages import (
    WATCH_TIMES,
    DeadlineReached,
    LinesReceived,
    RequestRefused,
    ResponseBody,
    ResponseOpened,
    StreamEnded,
)
from narthex.kube.resources import ENDPOINT_SLICES, SERVICE_CIDRS, SERVICES, own_node
from narthex.model.objects import NamespacedName
from narthex.model.store import Delete

SELECTOR = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"


# Lists


def test_the_first_list_takes_what_the_server_has_at_hand():
    table = listing()
    assert table.asked.path == "/apis/networking.k8s.io/v1/servicecidrs"
    assert not table.asked.lines
    assert table.query == {"limit": "500", "resourceVersion": "0"}
    assert not table.watch.synced


def test_a_look_from_outside_wants_what_is_true_now():
    assert listing(newest=True).query == {"limit": "500"}


@pytest.mark.row("1.1", "1.3", "2.2")
@pytest.mark.parametrize(
    ("resource", "labels", "fields"),
    [
        (SERVICES, SELECTOR, "spec.clusterIP!=None"),
        (ENDPOINT_SLICES, SELECTOR, None),
        (own_node("worker-a"), None, "metadata.name=worker-a"),
        (SERVICE_CIDRS, None, None),
    ],
)
def test_selectors_go_with_every_request(resource, labels, fields):
    table = listing(resource=resource)
    first = table.query
    table(ResponseOpened(), page(5, follow="more"))
    second = table.query
    table(ResponseOpened(), page(5))
    assert table.query["watch"] == "true"
    for query in (first, second, table.query):
        assert (query.get("labelSelector"), query.get("fieldSelector")) == (labels, fields)


def test_pages_are_one_list():
    table = listing()
    table(ResponseOpened(), page(7, cidr("a"), follow="token"))
    assert table.query == {"limit": "500", "continue": "token"}
    assert not table.events and not table.watch.synced
    table(ResponseOpened(), page(7, cidr("b")))
    assert table.watch.synced
    assert list(table.held) == ["a", "b"]
    assert table.query["resourceVersion"] == "7"


def test_an_expired_continuation_is_read_again_in_one_piece():
    table = listing()
    table(ResponseOpened(), page(7, cidr("a"), follow="token"), GONE)
    assert table.query == {}
    table(ResponseOpened(), page(9, cidr("b")))
    assert list(table.held) == ["b"]


def test_a_list_that_breaks_off_leaves_nothing():
    table = watching(5, cidr("a"))
    table(DeadlineReached(), after=1200.0)
    table(ResponseOpened(), page(9, cidr("b"), follow="token"), ResponseOpened(), LOST)
    assert list(table.held) == ["a"]
    table(DeadlineReached(), after=1.0)
    table(ResponseOpened(), page(9, cidr("b")))
    assert table.events[-2:] == [Delete("ServiceCIDR", NamespacedName("", "a")), table.events[-1]]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"items":[]}', b'{"metadata":{}}', b"\xff", b'"x"'])
def test_a_list_that_is_none_is_asked_for_again(body):
    table = listing()
    table(ResponseOpened(), ResponseBody(body))
    assert table.delay > 0
    assert table.watch.counts.failures == {"garbled": 1}
    table(DeadlineReached(), after=1.0)
    assert table.query == {"limit": "500", "resourceVersion": "0"}


# Streaming lists


def test_streaming_lists_are_tried_first():
    table = streaming()
    assert table.asked.lines
    assert table.query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "450",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "resourceVersion": "0",
    }


def test_the_stream_is_a_list_up_to_its_bookmark_and_then_a_watch():
    table = streaming()
    table(line("ADDED", cidr("a", 3)), line("ADDED", cidr("b", 2)), bookmark(3))
    assert not table.events and not table.watch.synced
    table(bookmark(9, end=True))
    assert table.watch.synced and list(table.held) == ["a", "b"]
    table(line("DELETED", cidr("a", 10)))
    assert list(table.held) == ["a", "b", "-a"]
    table(LOST)
    table(DeadlineReached(), after=1.0)
    assert table.query["resourceVersion"] == "10"
    assert "sendInitialEvents" not in table.query


def test_changes_before_the_bookmark_count():
    table = streaming()
    table(
        line("ADDED", cidr("a", 3)), line("DELETED", cidr("a", 4)), line("ADDED", cidr("b", 5)), bookmark(5, end=True)
    )
    assert list(table.held) == ["b"]


@pytest.mark.parametrize("code", [400, 422])
def test_a_server_without_streaming_lists_is_not_asked_twice(code):
    table = streaming()
    table(failure(code))
    assert table.query == {"limit": "500", "resourceVersion": "0"}
    table(ResponseOpened(), page(5), ResponseOpened(), GONE)
    assert "sendInitialEvents" not in table.query


@pytest.mark.parametrize(
    "bad", [LOST, StreamEnded(), DeadlineReached(), failure(500), failure(405), LinesReceived(b"{")]
)
def test_a_stream_that_goes_wrong_is_followed_by_a_list(bad):
    table = streaming()
    table(line("ADDED", cidr("a", 3)), bad)
    assert not table.events
    table(DeadlineReached(), after=70.0)
    assert not table.asked.lines
    table(ResponseOpened(), page(5), ResponseOpened(), GONE)
    assert table.query["sendInitialEvents"] == "true", "next time the stream is tried again"


def test_a_server_that_is_busy_is_not_asked_for_more_than_the_stream():
    table = streaming()
    table(RequestRefused(429, b"", 1.0))
    table(DeadlineReached(), after=2.0)
    assert table.query["sendInitialEvents"] == "true"


def test_a_stream_without_an_end_is_given_up_sooner_than_a_list():
    table = streaming()
    table(line("ADDED", cidr("a", 3)))
    assert table.watch.wake_at == WATCH_TIMES.stream_silence


def test_a_stream_at_a_version_that_is_not_there_is_asked_for_without_it():
    table = streaming()
    table(bookmark(9, end=True), GONE)
    assert table.query["resourceVersion"] == "9"
    table(TOO_LARGE)
    assert "resourceVersion" not in table.query
    assert table.query["sendInitialEvents"] == "true"


def test_an_error_line_in_the_stream_is_a_refusal():
    table = streaming()
    table(line("ERROR", {"code": 500, "message": "etcd"}))
    assert table.watch.counts.failures == {"500": 1}
    assert not table.watch.synced
