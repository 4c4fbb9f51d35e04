"""The watch protocol, step by step: for each event that can arrive, the next request."""

import msgspec
import pytest
from tests.kube.watch.steps import LOST, bookmark, cidr, line, streaming, watching

from narthex.kube.messages import WATCH_TIMES, DeadlineReached, LinesReceived, ResponseOpened, StreamEnded

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
