"""Counting in bulk loses nothing."""

from narthex.dns.program.worker_protocol import CountsReport, MessageReader, StartServing
from narthex.dns.server import counters as tallies
from narthex.dns.server.counters import SIZES, AnswerCounter, AnswerCounts, sum_of
from narthex.dns.server.dispatcher import AnswerLabels
from narthex.linux.module_process import frame

LABELS = (".", "A", "NOERROR", "kubernetes")
KEY = ("udp", 1, *LABELS)


def test_what_is_taken_is_counted_once():
    tally = AnswerCounter(lambda: None)
    counter = tally.counter(("udp", 1, AnswerLabels(*LABELS), 50, 120))
    counter[0] += 3
    tally.counter(("udp", 1, AnswerLabels(*LABELS), 60, 120))[0] += 1
    tally.observe(".", 0.0003, 4)
    first = tally.take()
    assert first.answers == {KEY: 4}
    assert first.request_sizes["udp", "."].total == 3 * 50 + 60
    assert first.response_sizes["udp", "."].counts[SIZES.index(200)] == 4
    assert (first.durations["."].counts[1], sum(first.durations["."].counts)) == (4, 4)
    # The counter goes on, for entries that hold it.
    counter[0] += 1
    assert tally.take().answers == {KEY: 1}
    assert tally.take() == AnswerCounts()


def test_too_many_kinds_are_folded_and_everybody_told(monkeypatch):
    monkeypatch.setattr(tallies, "_MAX_KINDS", 10)
    dropped = []
    tally = AnswerCounter(lambda: dropped.append(1))
    for size in range(35):
        tally.counter(("udp", 1, AnswerLabels(*LABELS), size, size))[0] += 1
    assert len(dropped) == 3
    assert tally.take().answers == {KEY: 35}


def test_counts_of_workers_add_up():
    def one(zone):
        tally = AnswerCounter(lambda: None)
        tally.counter(("tcp", 2, AnswerLabels(zone, *LABELS[1:]), 50, 120))[0] += 2
        tally.observe(zone, 1.5, 2)
        tally.lost = 1
        return tally.take()

    whole = AnswerCounts()
    for zone in ("a.", "b.", "a."):
        whole = sum_of(whole, one(zone))
    assert whole.answers == {("tcp", 2, "a.", *LABELS[1:]): 4, ("tcp", 2, "b.", *LABELS[1:]): 2}
    assert whole.durations["a."].total == 6.0
    assert whole.lost == 3


class Pieces:
    """A socket that gives a few bytes at a time."""

    def __init__(self, data, size):
        self.data, self.size = data, size

    def recv(self, _most):
        given, self.data = self.data[: self.size], self.data[self.size :]
        return given


def test_messages_come_in_any_pieces():
    data = frame(StartServing()) * 3
    for size in (1, 3, len(data)):
        reader = MessageReader(Pieces(data, size))
        found = []
        while reader._sock.data:
            found += reader.read()
        assert found == [StartServing()] * 3
    assert frame(CountsReport(AnswerCounts()))[4:]
