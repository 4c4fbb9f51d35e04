"""Growth of the parsers of foreign text: twice the input takes at most 2.5 times the steps, and no megabyte takes ten seconds.

Two measurements, neither of which depends on the speed of the machine:

* Steps are the lines of Python that run (`sys.settrace`), which is the same number in each run.
* What happens inside of regular expressions and methods of `str` counts as no step. For this, the processor time of a text is
  compared with that of one of a quarter of its length: a linear parser takes 4 times as long, a quadratic one 16 times as
  long. Only texts that take noticeable time at all are compared.

docs/explanation/failure-modes.md lists what the limits do.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from types import FrameType
from typing import Any

import pytest
from tests.hostile_texts import PARSERS, ForeignParser, HostileText, hostile_texts, kubeconfig_parser

MOST_GROWTH = 2.5
"""Steps of twice the text, relative to those of the text."""
SLACK = 400
"""Steps that do not count: those at the ends of a text."""
STEP_SIZES = (600, 1200)
TIME_SIZES = (3500, 14000)
"""Below MAX_LINE, so that the limit of a line does not hide how its parts are parsed."""
QUARTER_GROWTH = 9.0
"""Processor time of four times the text, between 4 (linear) and 16 (quadratic)."""
NOTICEABLE = 0.06
"""Seconds of processor time from which on a text is compared with a shorter one."""
MEGABYTE = 1 << 20
MOST_SECONDS = 10.0
"""Processor time of a megabyte, on a processor that counts to COUNT in COUNT_SECONDS. One that others use as well takes longer."""
COUNT = 1_000_000
COUNT_SECONDS = 0.01
ATTEMPTS = 5
"""A measurement of time counts if it is repeatable: the least of several."""


def _run(parser: ForeignParser, text: str) -> None:
    with contextlib.suppress(parser.refuses):
        parser.parse(text)


def steps(parser: ForeignParser, text: str) -> int:
    """Return the number of lines of Python that run while a text is parsed."""
    count = 0

    def count_line(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return count_line

    before = sys.gettrace()
    sys.settrace(count_line)
    try:
        _run(parser, text)
    finally:
        sys.settrace(before)
    return count


def seconds(parser: ForeignParser, text: str) -> float:
    """Return the processor time for a text."""
    gc.disable()
    try:
        begin = time.thread_time()
        _run(parser, text)
        return time.thread_time() - begin
    finally:
        gc.enable()


@pytest.fixture(params=PARSERS)
def parser(request: pytest.FixtureRequest, tmp_path: Any) -> ForeignParser:
    """Return one of the parsers."""
    found = PARSERS[request.param]
    return found._replace(parse=kubeconfig_parser(tmp_path)) if request.param == "kubeconfig" else found


def test_twice_the_text_takes_at_most_two_and_a_half_times_the_steps(parser: ForeignParser) -> None:
    grown = []
    for text in hostile_texts(parser):
        steps(parser, text.of(16))  # Imports and caches.
        few, many = (steps(parser, text.of(size)) for size in STEP_SIZES)
        if many > MOST_GROWTH * few + SLACK:
            grown.append(f"{text}: {few} steps, then {many}")
    assert not grown, "\n".join(grown)


def test_regular_expressions_are_linear(parser: ForeignParser) -> None:
    grown = [found for text in hostile_texts(parser) if (found := _growth(parser, text))]
    assert not grown, "\n".join(grown)


def _slowness() -> float:
    """Return how much slower this processor is at the moment than the one of COUNT_SECONDS."""
    begin = time.thread_time()
    for _ in range(COUNT):
        pass
    return (time.thread_time() - begin) / COUNT_SECONDS


def _growth(parser: ForeignParser, text: HostileText) -> str:
    """Return what is wrong with the processor time for a text, measured again until it is not, or often enough."""
    short, long = (text.of(size) for size in TIME_SIZES)
    most = MOST_SECONDS * len(long) / MEGABYTE
    took, quarter = 0.0, 0.0
    for attempt in range(ATTEMPTS):
        if attempt:
            most = max(most, _slowness() * MOST_SECONDS * len(long) / MEGABYTE)
        quarter = seconds(parser, short)
        # Whatever takes as long as this for a quarter is not tried with the whole.
        again = seconds(parser, long) if quarter <= most else 4 * quarter
        took = min(took or again, again)
        if took <= min(most, max(NOTICEABLE, QUARTER_GROWTH * quarter)):
            return ""
    return f"{text}: {quarter:.3f} s for {len(short)} characters, {took:.3f} s for {len(long)}"
