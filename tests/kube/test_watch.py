"""The watch protocol, step by step: for each thing that can come, what is asked next."""

import msgspec
import pytest

from narthex.kube.messages import (
    WATCH_TIMES,
    BytesReceived,
    DeadlineReached,
    LinesReceived,
    RequestRefused,
    ResponseBody,
    ResponseOpened,
    StreamEnded,
)
from narthex.kube.resources import ENDPOINT_SLICES, SERVICE_CIDRS, SERVICES, own_node
from narthex.kube.watch import Watch
from narthex.lab.api.api import error_response
from narthex.lab.api.errors import StatusError
from narthex.lab.api.reads import expired
from narthex.model.decode.objects import _KINDS
from narthex.model.objects import NamespacedName
from narthex.model.problem import MAX_PROBLEMS
from narthex.model.store import Delete, Upsert

MIDDLE = 0.5
SELECTOR = "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"


class Table:
    """A Watch of ServiceCIDRs, which are short, and a clock that is set by hand."""

    def __init__(self, resource=SERVICE_CIDRS, **options):
        self.watch = Watch(resource, lambda: MIDDLE, **options)
        self.now = 0.0
        self.asked = None
        self.events = []

    def __call__(self, *inputs, after=0.0):
        """What the last of these inputs makes it do."""
        for each in inputs:
            self.now += after
            step = self.watch.take(each, self.now)
            self.events += step.events
            if step.request is not None:
                self.asked = step.request
            elif step.over:
                self.asked = None
        return step

    @property
    def query(self):
        return dict(self.asked.query)

    @property
    def delay(self):
        assert self.asked is None, "it is not backing off"
        return self.watch.wake_at - self.now

    @property
    def held(self):
        return {
            str(each.object.key) if isinstance(each, Upsert) else f"-{each.key}": None for each in self.events
        }.keys()


def cidr(name, version=1, cidrs=("10.96.0.0/16",)):
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "spec": {"cidrs": list(cidrs)}}


def page(version, *items, follow=""):
    meta = {"resourceVersion": str(version)} | ({"continue": follow} if follow else {})
    return ResponseBody(msgspec.json.encode({"metadata": meta, "items": items}))


def line(type, raw):
    return LinesReceived(msgspec.json.encode({"type": type, "object": raw}))


def bookmark(version, end=False):
    meta = {"resourceVersion": str(version)} | ({"annotations": {"k8s.io/initial-events-end": "true"}} if end else {})
    return line("BOOKMARK", {"metadata": meta})


def status(code, reason, message, **details):
    return error_response(StatusError(code, reason, message, details)).body


def failure(code, **more):
    return RequestRefused(code, status(code, **{"reason": "", "message": ""} | more))


TOO_LARGE = RequestRefused(504, status(504, "Timeout", "Too large resource version: 9, current: 5"))
GONE = RequestRefused(410, status(410, "Expired", "too old"))
LOST = StreamEnded("connection reset")


def listing(**options):
    table = Table(streaming=False, **options)
    table(DeadlineReached())
    return table


def watching(version=100, *items, **options):
    """A table that has a list and watches."""
    table = listing(**options)
    table(ResponseOpened(), page(version, *items), ResponseOpened())
    return table


def streaming():
    table = Table()
    table(DeadlineReached(), ResponseOpened())
    return table


PROBE = {"limit": "1", "resourceVersion": "41", "resourceVersionMatch": "NotOlderThan"}


def silent():
    """A table whose watch has been silent for too long."""
    table = watching(41, cidr("a"))
    table(DeadlineReached(), after=480.0)
    assert table.query == PROBE
    return table


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


# Watches


def test_the_watch_begins_where_the_list_ended():
    table = watching(41, cidr("a"))
    assert table.asked.lines
    assert table.query == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "450",
        "resourceVersion": "41",
    }


def test_changes_are_events():
    table = watching(41, cidr("a"))
    table(
        line("ADDED", cidr("b", 42)), line("MODIFIED", cidr("a", 43, ["10.97.0.0/16"])), line("DELETED", cidr("b", 44))
    )
    assert list(table.held) == ["a", "b", "-b"]
    assert table.events[2].object.cidrs == ("10.97.0.0/16",)
    assert table.watch.counts.events == 3


def test_the_same_once_more_is_no_event():
    table = watching(41, cidr("a", 41))
    table(line("MODIFIED", cidr("a", 41)))
    assert len(table.events) == 1


@pytest.mark.parametrize("seen", [bookmark(77), line("MODIFIED", cidr("a", 77))])
def test_a_lost_watch_goes_on_where_it_was(seen):
    table = watching(41, cidr("a"))
    table(seen, LOST)
    assert 0 < table.delay < 1
    table(DeadlineReached(), after=1.0)
    assert table.query["resourceVersion"] == "77"


def test_a_watch_that_ends_in_order_is_asked_for_again_at_once():
    table = watching(41)
    table(StreamEnded(), after=400.0)
    assert table.query["resourceVersion"] == "41"


def test_watches_that_end_at_once_are_not_asked_for_at_once():
    table = watching(41)
    table(StreamEnded(), after=0.1)
    first = table.delay
    table(DeadlineReached(), ResponseOpened(), after=first)
    table(StreamEnded(), after=0.1)
    assert table.delay == pytest.approx(2 * first)


@pytest.mark.parametrize("end", [LOST, StreamEnded()], ids=["lost", "in order"])
@pytest.mark.parametrize("lives", [0.6, 1.0, 5.0])
@pytest.mark.parametrize("number", [0.0, 0.5, 1.0])
def test_watches_that_end_every_second_delay_changes_by_little(end, lives, number):
    """And need few requests, and are no trouble that is reported each second."""
    table = watching(41)
    table.watch._random = lambda: number
    pauses = []
    for _ in range(30):
        table(end, after=lives)
        pauses.append(table.delay)
        assert table.watch.trouble is None
        table(DeadlineReached(), after=table.delay)
        assert table.asked.lines and table.query["resourceVersion"] == "41"
        table(ResponseOpened())
    assert min(pauses) >= 0.1 and max(pauses) <= 1.5
    assert table.watch.counts.failures == {"lost": 30}


def test_watches_that_end_after_each_change_delay_changes_by_little():
    table = watching(41)
    for version in range(42, 72):
        table(line("ADDED", cidr(f"n{version}", version)), LOST)
        assert table.delay <= 1.5
        table(DeadlineReached(), ResponseOpened(), after=table.delay)
    assert len(table.held) == 30


def test_a_server_that_is_gone_after_such_watches_is_asked_soon_at_first():
    table = watching(41)
    for _ in range(30):
        table(LOST, after=1.0)
        table(DeadlineReached(), ResponseOpened(), after=table.delay)
    table(LOST, after=1.0)
    table(DeadlineReached(), LOST, after=table.delay)
    assert table.delay <= 4 * WATCH_TIMES.backoff.first
    for _ in range(30):
        table(DeadlineReached(), LOST, after=table.delay)
    assert table.delay == WATCH_TIMES.backoff.longest


@pytest.mark.parametrize("data", [b"{", b"x", b'{"type":"ADDED"}', b'{"type":"ADDED","object":{}}', b"\x00", b"[]"])
def test_a_garbled_line_ends_the_watch_and_the_next_brings_it_again(data):
    table = watching(41, cidr("a"))
    table(LinesReceived(data))
    assert table.asked is None
    table(DeadlineReached(), after=1.0)
    assert table.query["resourceVersion"] == "41"
    assert len(table.events) == 1


def test_a_line_that_stays_garbled_is_got_round_by_a_list():
    table = watching(41, cidr("a"))
    for _ in range(4):
        table(ResponseOpened(), LinesReceived(b"{"))
        table(DeadlineReached(), after=30.0)
    assert not table.asked.lines


UNFIT = line("ADDED", cidr("unfit", 44) | {"spec": {"cidrs": 7}})
"""An object of another form than the rest."""


@pytest.mark.parametrize(
    "odd",
    [
        None,
        UNFIT,
        bookmark(44),
        line("MODIFIED", cidr("b", 44, ("10.1.0.0/16", "x"))),
        line("DELETED", cidr("a", 44)),
        line("DELETED", {"metadata": {"resourceVersion": "44"}}),
        line("ADDED", cidr("old", 7)),
        line("ERROR", {"code": 410, "reason": "Expired"}),
        line("ERROR", {"code": 500, "metadata": 5}),
        line("SYNC", cidr("c", 44)),
        LinesReceived(b"{"),
        LinesReceived(b"\xff"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("begin", [watching, streaming])
def test_a_block_of_lines_is_what_its_lines_are_one_after_another(begin, place, odd):
    lines = [line("ADDED", cidr("a", 42)), line("MODIFIED", cidr("a", 43)), line("ADDED", cidr("b", 45))]
    lines = [*lines[:place], *([odd] if odd else []), *lines[place:]]
    if begin is streaming:
        lines.append(bookmark(50, end=True))
    block, single = begin(), begin()
    block(LinesReceived(b"\n".join(each.data for each in lines) + b"\n"))
    for each in lines:
        if single(each).over:
            break
    watch, other = block.watch, single.watch
    assert (block.events, block.asked) == (single.events, single.asked)
    assert (watch.wake_at, watch.synced, watch.trouble) == (other.wake_at, other.synced, other.trouble)
    assert watch.cache.problems == other.cache.problems
    assert msgspec.structs.replace(watch.counts, heard=0) == msgspec.structs.replace(other.counts, heard=0)


def test_events_before_the_end_of_a_watch_are_reported():
    table = watching(41)
    table(LinesReceived(line("ADDED", cidr("a", 42)).data + b"\n" + line("ERROR", {"code": 410}).data + b"\n"))
    assert table.held == {"a"}
    assert table.query["resourceVersion"] == "42"
    assert not table.asked.lines


@pytest.mark.parametrize("type", ["", "SYNC", "added"])
def test_an_unknown_event_is_garbled(type):
    table = watching(41)
    table(line(type, cidr("a", 42)))
    assert table.watch.counts.failures == {"garbled": 1}


# Too old, too new


@pytest.mark.parametrize("said", [GONE, LinesReceived(expired()[:-1]), line("ERROR", {"code": 410, "reason": "Gone"})])
def test_a_version_that_is_gone_is_listed_anew(said):
    table = watching(41, cidr("a"))
    table(said)
    assert not table.asked.lines
    assert table.query == {"resourceVersion": "41", "resourceVersionMatch": "NotOlderThan"}
    table(ResponseOpened(), page(60, cidr("b")))
    assert list(table.held) == ["a", "-a", "b"]


def test_watches_that_are_always_too_old_are_not_listed_without_backoff():
    table = watching(41)
    for number in range(3):
        table(GONE)
        assert not table.asked.lines, number
        table(ResponseOpened(), page(41), ResponseOpened())
    table(GONE)
    assert table.delay > 0


@pytest.mark.parametrize(
    "words",
    [TOO_LARGE, RequestRefused(504, status(504, "Timeout", "x", causes=[{"reason": "ResourceVersionTooLarge"}]))],
)
def test_a_version_that_the_server_does_not_have_yet_is_let_go(words):
    table = watching(41, cidr("a"))
    table(GONE, words)
    assert table.query == {"limit": "500"}
    table(ResponseOpened(), page(7, cidr("b")))
    assert list(table.held) == ["a", "b"]
    assert table.query["resourceVersion"] == "7"


@pytest.mark.parametrize("older", [bookmark(12), line("ADDED", cidr("b", 12))])
def test_a_server_that_went_back_is_asked_for_what_is_true_now(older):
    table = watching(41, cidr("a"))
    table(older)
    assert table.watch.counts.failures == {"older": 1}
    table(DeadlineReached(), after=1.0)
    assert table.query == {"limit": "500"}


def test_versions_that_are_no_numbers_are_not_compared():
    table = watching("aa", cidr("a"))
    table(bookmark("a"))
    assert table.watch.counts.failures == {}


def test_a_list_from_a_server_that_lags_behind_is_not_believed_at_once():
    table = watching(41, cidr("a"))
    table(GONE, ResponseOpened(), page(30))
    assert table.asked is None and len(table.events) == 1
    table(DeadlineReached(), after=1.0)
    assert table.query == {"limit": "500"}
    table(ResponseOpened(), page(30, cidr("b")))
    assert list(table.held) == ["a", "b"]


# Lists that lack what was there


def doubting(*items, version=7):
    """A table that has a and b, and then a list of a server that lost its data."""
    table = watching(41, cidr("a"), cidr("b"))
    table(GONE, TOO_LARGE, ResponseOpened(), page(version, *items), ResponseOpened())
    return table


@pytest.mark.parametrize("items", [(), (cidr("c", 6),)])
def test_an_older_list_adds_and_removes_nothing(items):
    table = doubting(*items)
    assert list(table.held) == ["a", "b", *(["c"] if items else [])]
    assert table.watch.counts.failures["doubted"] == 1
    assert "has lost objects" in table.watch.trouble.message
    assert table.query["watch"] == "true"


def test_an_empty_list_removes_nothing_whatever_its_version():
    assert list(doubting(version=60).held) == ["a", "b"]


def test_one_object_that_is_gone_is_gone():
    table = watching(41, cidr("a"))
    table(GONE, ResponseOpened(), page(60))
    assert list(table.held) == ["a", "-a"]


def test_a_deletion_that_the_watch_reports_takes_effect_at_once():
    table = doubting(cidr("c", 6))
    table(line("DELETED", cidr("a", 8)))
    assert list(table.held) == ["a", "b", "c", "-a"]


def test_a_doubted_list_is_asked_for_again_and_takes_effect_in_the_end():
    table = doubting(cidr("c", 6))
    while table.now < WATCH_TIMES.doubt:
        assert "-a" not in table.held
        table(DeadlineReached(), after=table.watch.wake_at - table.now)
        table(ResponseOpened(), page(8, cidr("c", 6)), ResponseOpened())
    assert table.watch.counts.lists > WATCH_TIMES.doubt / WATCH_TIMES.doubt_relist
    assert {"-a", "-b"} <= table.held
    assert table.watch.trouble is None


def test_a_list_that_is_complete_again_ends_the_doubt():
    table = doubting()
    table(DeadlineReached(), after=table.watch.wake_at - table.now)
    table(ResponseOpened(), page(43, cidr("a"), cidr("b")), ResponseOpened())
    assert list(table.held) == ["a", "b"]
    assert table.watch.trouble is None and table.watch.doubted_at is None
    # From here on, a list is believed as before.
    table(GONE, ResponseOpened(), page(60, cidr("a")))
    assert list(table.held) == ["a", "b", "-b"]


def test_a_server_that_asks_for_a_long_pause_gets_a_short_one():
    table = listing()
    table(RequestRefused(429, b"", retry_after=600.0))
    assert table.delay <= 1.1 * WATCH_TIMES.retry_after


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


# What servers lack


def test_an_older_version_of_the_api_is_asked_next():
    table = listing()
    table(failure(404))
    assert table.asked.path == "/apis/networking.k8s.io/v1beta1/servicecidrs"
    table(ResponseOpened(), page(5))
    assert table.asked.path == "/apis/networking.k8s.io/v1beta1/servicecidrs"


@pytest.mark.parametrize("code", [404, 403])
def test_what_need_not_be_there_counts_as_empty(code):
    table = listing()
    table(failure(code), *([failure(404)] if code == 404 else []))
    assert table.watch.synced and table.asked is None
    assert (table.watch.trouble is None) is (code == 404)
    table(DeadlineReached(), after=table.delay)
    assert table.asked.path == "/apis/networking.k8s.io/v1/servicecidrs"


def test_what_was_there_is_not_given_up_for_a_404():
    table = watching(5, cidr("a"))
    table(LOST)
    table(DeadlineReached(), after=1.0)
    table(failure(404), failure(404))
    assert list(table.held) == ["a"]


def test_what_must_be_there_is_waited_for():
    table = listing(resource=SERVICES)
    table(failure(404))
    assert not table.watch.synced


def test_a_server_that_cannot_select_by_cluster_ip_is_asked_without():
    table = listing(resource=SERVICES)
    table(failure(400, message="field label not supported: spec.clusterIP"))
    assert "fieldSelector" not in table.query
    table(failure(400))
    assert table.asked is None, "a second 400 is another matter"


def test_the_nodes_name_is_never_left_out():
    table = listing(resource=own_node("worker-a"))
    table(failure(400))
    table(DeadlineReached(), after=1.0)
    assert table.query["fieldSelector"] == "metadata.name=worker-a"


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


# Objects that cannot be used


def test_a_broken_object_is_reported_and_the_others_are_used():
    table = listing()
    table(ResponseOpened(), page(5, cidr("a"), cidr("bad", cidrs=["nonsense"]), {"metadata": "x"}, cidr("c")))
    assert list(table.held) == ["a", "c"]
    problems = table.watch.cache.problems
    assert any(each.object == "ServiceCIDR bad" and each.field == "spec.cidrs[0]" for each in problems)
    assert table.watch.cache.broken == 2


def test_an_object_that_the_decoder_breaks_on_is_reported_and_the_others_are_used(monkeypatch):
    kind = _KINDS["ServiceCIDR"]

    def make(raw, report):
        if raw.metadata.name == "cursed":
            raise ZeroDivisionError("division by zero")
        return kind.make(raw, report)

    monkeypatch.setitem(_KINDS, "ServiceCIDR", msgspec.structs.replace(kind, make=make))
    table = watching(5, cidr("a"), cidr("cursed"), cidr("c"))
    assert list(table.held) == ["a", "c"]
    (problem,) = table.watch.cache.problems
    assert problem.object == "ServiceCIDR cursed" and "ZeroDivisionError" in problem.message
    table(line("ADDED", cidr("cursed", 6)), line("ADDED", cidr("d", 7)))
    assert list(table.held) == ["a", "c", "d"]
    table(line("DELETED", cidr("cursed", 8)))
    assert table.watch.cache.problems == ()


def test_an_object_that_breaks_is_gone_until_it_is_mended():
    table = watching(5, cidr("a"))
    table(line("MODIFIED", cidr("a", 6, ["nonsense"])))
    assert list(table.held) == ["a", "-a"]
    assert len(table.watch.cache.problems) == 1
    table(line("MODIFIED", cidr("a", 7)))
    assert isinstance(table.events[-1], Upsert)
    assert table.watch.cache.problems == ()


def test_a_broken_object_that_is_deleted_is_no_problem_any_more():
    table = watching(5, cidr("bad", cidrs=["nonsense"]))
    assert table.watch.cache.problems
    table(line("DELETED", cidr("bad", 6, cidrs=["nonsense"])))
    assert table.watch.cache.problems == ()


def test_a_deleted_object_without_a_name_is_garbled():
    table = watching(5, cidr("a"))
    table(line("DELETED", {"metadata": {"resourceVersion": "6"}}))
    assert table.watch.counts.failures == {"garbled": 1}


def test_problems_of_many_objects_are_limited_and_counted():
    """Their number costs nothing when they are asked for, which happens with each change."""
    bad = [cidr(f"n{number}") | {"spec": {"cidrs": ["x"]}} for number in range(MAX_PROBLEMS + 50)]
    table = watching(41, cidr("good"), *bad)
    cache = table.watch.cache
    assert cache.broken == MAX_PROBLEMS + 50
    assert len(cache.problems) == MAX_PROBLEMS + 1
    assert cache.problems[-1].message == "50 more problems are not listed"
    bad[0]["metadata"]["resourceVersion"] = "42"
    table(line("DELETED", bad[0]), line("MODIFIED", cidr("n1", 42)))
    assert cache.broken == MAX_PROBLEMS + 48
    table(line("MODIFIED", bad[1] | {"metadata": {"name": "n1", "resourceVersion": "43"}}))
    assert cache.broken == MAX_PROBLEMS + 49
