"""How long changes of endpoints waited for this node."""

import msgspec
import pytest

from narthex.model.net import IPFamily
from narthex.model.objects import TRIGGER_TIME, trigger_time
from narthex.proxy.program.metrics import ProgrammingLatency
from narthex.testing.build import endpoint, endpoint_slice

FOUR = IPFamily.IPV4


def changed_at(text):
    made = endpoint_slice("shop/web", endpoint("10.64.1.5"))
    return msgspec.structs.replace(made, annotations=((TRIGGER_TIME, text),) if text is not None else ())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:10Z", 10.0),
        ("1970-01-01T00:00:10.25Z", 10.25),
        ("1970-01-01T00:00:10.123456789Z", 10.123457),
        ("1970-01-01T01:00:10+01:00", 10.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("1970-13-01T00:00:10Z", None),
        ("1970-01-01 00:00:10Z", None),
    ],
)
def test_the_annotation(text, seconds):
    assert trigger_time(changed_at(text)) == (None if seconds is None else pytest.approx(seconds, abs=1e-5))


@pytest.mark.row("2.13", "20.5")
def test_changes_count_from_their_time_until_they_are_written():
    waiting = ProgrammingLatency(start=5.0)
    first, second = changed_at("1970-01-01T00:00:10Z"), changed_at("1970-01-01T00:00:11Z")
    waiting.saw(None, first)
    waiting.saw(first, second)
    assert waiting.written(IPFamily.IPV6, 13.0) == []
    assert waiting.written(FOUR, 13.0) == [3.0, 2.0]
    assert waiting.written(FOUR, 14.0) == []


@pytest.mark.row("2.13")
def test_what_is_older_than_the_process_or_said_already_does_not_count():
    waiting = ProgrammingLatency(start=20.0)
    waiting.saw(None, changed_at("1970-01-01T00:00:10Z"))
    waiting.saw(None, changed_at("nonsense"))
    late = changed_at("1970-01-01T00:00:30Z")
    # The slice changed in another way: the trigger is the one before.
    waiting.saw(late, msgspec.structs.replace(late, labels=(("a", "b"),)))
    assert waiting.written(FOUR, 40.0) == []


def test_a_clock_that_is_behind_gives_no_negative_time():
    waiting = ProgrammingLatency(start=0.0)
    waiting.saw(None, changed_at("1970-01-01T00:00:30Z"))
    assert waiting.written(FOUR, 29.0) == [0.0]


def test_what_waits_is_bounded():
    waiting = ProgrammingLatency(start=0.0)
    for number in range(10_500):
        waiting.saw(None, changed_at(f"1970-01-02T0{number % 10}:00:00Z"))
    assert len(waiting.written(FOUR, 1e6)) == 10_000
