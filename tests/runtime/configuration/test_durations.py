"""Durations as Go writes and reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.duration import duration, duration_text


@given(st.integers(0, 10**17))
def test_durations_are_written_as_they_are_read(nanoseconds):
    text = duration_text(nanoseconds / 1e9)
    assert duration(text) == pytest.approx(nanoseconds / 1e9, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("given_seconds", "text"),
    [
        (0, "0s"), (30, "30s"), (90, "1m30s"), (4500, "1h15m0s"), (86400, "24h0m0s"), (0.25, "250ms"), (1.5, "1.5s"),
        (5e-9, "5ns"), (1.5e-6, "1.5µs"), (3600.001, "1h0m0.001s"),
    ],
)  # fmt: skip
def test_durations_as_go_writes_them(given_seconds, text):
    assert duration_text(given_seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("1h15m0s", 4500),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("1us", 1e-6),
        ("1µs", 1e-6),
        ("5ns", 5e-9),
        ("0", 0),
    ],
)
def test_durations(text, seconds):
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", "s", "1x", "1 s", "1s ", "١s", "1" * 70 + "s", "1e3s", "--1s"])
def test_no_durations(text):
    with pytest.raises(ValueError, match="is not a duration"):
        duration(text)
