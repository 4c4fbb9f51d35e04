"""Delays between attempts that fail."""

import pytest

from narthex.model.backoff import Backoff


def test_delays_double_up_to_the_limit():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.delay(failures) for failures in (0, 1, 2, 3, 4, 1000)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("random, share", [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5)])
def test_jitter_spreads_around_the_delay(random, share):
    assert Backoff(0.4, 30.0, jitter=1.0).delay(2, random) == pytest.approx(0.8 * share)


def test_the_limit_may_be_below_the_first_delay():
    assert Backoff(1.0, 0.25).delay(1) == 0.25
