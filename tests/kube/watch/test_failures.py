"""Silent connections, refused requests, and the delay before the next one."""

import msgspec
import pytest
from tests.kube.watch.steps import GONE, LOST, TOO_LARGE, bookmark, cidr, failure, line, listing, page, watching

from narthex.kube.messages import (
    WATCH_TIMES,
    BytesReceived,
    DeadlineReached,
    RequestRefused,
    ResponseBody,
    ResponseOpened,
    StreamEnded,
)
from narthex.kube.resources import ENDPOINT_SLICES, SERVICE_CIDRS, SERVICES
from narthex.kube.watch import Watch

PROBE = {"limit": "1", "resourceVersion": "41", "resourceVersionMatch": "NotOlderThan"}


def silent():
    """A table whose watch has been silent for too long."""
    table = watching(41, cidr("a"))
    table(DeadlineReached(), after=480.0)
    assert table.query == PROBE
    return table


# Silence


def test_a_list_that_stays_away_is_given_up():
    table = listing()
    assert table.watch.wake_at == WATCH_TIMES.list_silence
    table(ResponseOpened(), BytesReceived(), after=50.0)
    assert table.watch.wake_at == 100 + WATCH_TIMES.list_silence
    table(DeadlineReached(), after=60.0)
    assert table.watch.counts.failures == {"silent": 1}
    assert table.delay > 0


def test_a_half_closed_watch_is_given_up_when_it_should_have_ended():
    table = watching(41)
    assert table.watch.wake_at == 450 + WATCH_TIMES.watch_grace
    table(DeadlineReached(), after=480.0)
    assert table.watch.counts.failures == {"silent": 1}
    assert table.query == PROBE


@pytest.mark.parametrize("version", [41, 44])
def test_silence_where_nothing_has_gone_back_is_only_watched_anew(version):
    table = silent()
    table(ResponseOpened(), page(version, cidr("any")))
    assert table.asked.lines
    assert table.query["resourceVersion"] == "41"
    assert len(table.events) == 1


@pytest.mark.parametrize("answer", [TOO_LARGE, page(12)])
def test_silence_of_a_server_that_went_back_leads_to_a_list(answer):
    table = silent()
    table(ResponseOpened(), answer)
    assert table.query == {"limit": "500"}


@pytest.mark.parametrize("answer", [LOST, DeadlineReached(), failure(500), ResponseBody(b"{")])
def test_a_question_that_is_not_answered_leads_to_a_list(answer):
    table = silent()
    table(answer)
    table(DeadlineReached(), after=table.delay)
    assert table.query == {"resourceVersion": "41", "resourceVersionMatch": "NotOlderThan"}


def test_where_bookmarks_come_silence_is_noticed_sooner():
    table = watching(41)
    table(bookmark(42), after=60.0)
    assert table.watch.wake_at == 60 + WATCH_TIMES.bookmark_silence


def test_a_watch_that_is_not_answered_is_asked_for_again():
    table = listing()
    table(ResponseOpened(), page(41))
    table(DeadlineReached(), after=WATCH_TIMES.list_silence)
    assert table.watch.counts.failures == {"silent": 1}
    table(DeadlineReached(), after=1.0)
    assert table.asked.lines


def test_everything_is_listed_again_now_and_then():
    table = watching(41, cidr("a"))
    for minute in range(1, 30):
        table(bookmark(41), after=60.0)
        if table.now >= table.watch.wake_at:
            table(DeadlineReached())
            break
        if minute % 7 == 0:
            table(StreamEnded(), ResponseOpened())
    assert table.query == {"resourceVersion": "41", "resourceVersionMatch": "NotOlderThan"}
    assert 0.9 * WATCH_TIMES.relist <= table.now <= 1.2 * WATCH_TIMES.relist
    table(ResponseOpened(), page(41, cidr("a"), cidr("missed")))
    assert list(table.held) == ["a", "missed"]


def test_what_has_not_changed_is_held_once():
    table = watching(41, cidr("a", 3), cidr("b", 4))
    first = table.events[0].object
    table(GONE, ResponseOpened(), page(50, cidr("a", 3), cidr("b", 49)))
    assert len(table.events) == 3
    assert table.watch.cache._objects[first.key] is first


def test_much_is_listed_more_seldom():
    few, many = watching(41, cidr("a")), watching(41, *(cidr(f"c{number}") for number in range(3000)))
    table_of = [table.watch._relist_at for table in (few, many)]
    assert table_of[1] == pytest.approx(4 * table_of[0], rel=0.01)


# Refusals and backoff


@pytest.mark.parametrize("code", [401, 403, 429, 500, 502, 503, 504])
def test_a_refused_watch_is_asked_for_again_later(code):
    table = watching(41, resource=SERVICES)
    table(failure(code))
    assert table.delay > 0
    table(DeadlineReached(), after=1.0)
    assert table.query["resourceVersion"] == "41"


@pytest.mark.parametrize("code", [400, 401, 403, 404, 405, 422, 429, 500, 503])
def test_a_refused_list_is_asked_for_again_later(code):
    table = listing(resource=ENDPOINT_SLICES)
    table(failure(code))
    assert table.delay > 0
    assert not table.watch.synced
    assert str(code) in table.watch.trouble.message
    table(DeadlineReached(), after=1.0)
    assert not table.asked.lines


@pytest.mark.parametrize(
    ("account", "hint"),
    [("system:node:node-1", "credentials of the proxy"), ("system:serviceaccount:shop:me", "deploy/rbac.yaml")],
)
def test_what_to_do_about_missing_rights_depends_on_the_account(account, hint):
    table = listing(resource=ENDPOINT_SLICES)
    said = f'endpointslices.discovery.k8s.io is forbidden: User "{account}" cannot list resource "endpointslices"'
    table(RequestRefused(403, msgspec.json.encode({"code": 403, "reason": "Forbidden", "message": said}), None))
    assert hint in table.watch.trouble.message


def test_retry_after_is_kept_to():
    table = listing()
    table(RequestRefused(429, b"busy", 17.0))
    assert 17 <= table.delay < 20
    table = watching(41)
    table(line("ERROR", {"code": 429, "reason": "TooManyRequests", "details": {"retryAfterSeconds": 9}}))
    assert 9 <= table.delay < 11


def test_delays_grow_up_to_a_limit():
    table, delays = listing(), []
    for _ in range(10):
        table(LOST)
        delays.append(table.delay)
        table(DeadlineReached(), after=table.delay)
    assert delays[:3] == pytest.approx([0.4, 0.8, 1.6])
    assert delays[-1] == WATCH_TIMES.backoff.longest


@pytest.mark.parametrize(("number", "share"), [(0.0, 0.5), (1.0, 1.5)])
def test_delays_differ_at_random(number, share):
    watch = Watch(SERVICE_CIDRS, lambda: number, streaming=False)
    watch.take(DeadlineReached(), 0.0)
    watch.take(LOST, 0.0)
    assert watch.wake_at == pytest.approx(WATCH_TIMES.backoff.first * share)


def test_a_watch_that_lives_ends_the_counting_of_failures():
    table = watching(41)
    for _ in range(3):
        table(LOST)
        table(DeadlineReached(), ResponseOpened(), after=table.delay)
    table(LOST, after=WATCH_TIMES.steady)
    assert table.delay == pytest.approx(WATCH_TIMES.backoff.first)


def test_an_outage_changes_no_object_and_is_reported_once():
    table = watching(41, cidr("a"))
    table(LOST)
    assert table.watch.trouble is None, "one lost watch is nothing to speak of"
    told = set()
    for _ in range(200):
        table(DeadlineReached(), after=table.delay)
        table(LOST)
        told.add(str(table.watch.trouble))
    assert len(told) == 1
    assert "what is known stays in force" in told.pop()
    assert len(table.events) == 1 and table.now > 5000


def test_trouble_ends_with_the_next_watch():
    table = watching(41, cidr("a"))
    table(LOST)
    table(DeadlineReached(), after=1.0)
    table(LOST)
    assert table.watch.trouble
    table(DeadlineReached(), ResponseOpened(), after=2.0)
    assert table.watch.trouble is None
