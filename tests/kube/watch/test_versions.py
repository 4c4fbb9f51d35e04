"""Resource versions that are too old or too new, and lists that lack objects."""

import pytest
from tests.kube.watch.steps import GONE, TOO_LARGE, bookmark, cidr, line, listing, page, status, watching

from narthex.kube.messages import WATCH_TIMES, DeadlineReached, LinesReceived, RequestRefused, ResponseOpened
from narthex.lab.api.reads import expired

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
