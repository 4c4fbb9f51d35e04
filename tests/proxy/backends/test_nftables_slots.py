"""Slots of endpoints: dense, each endpoint once, and as few moves as can be."""

from hypothesis import given
from hypothesis import strategies as st

from narthex.proxy.backends.nftables.service import arrange
from narthex.proxy.plan.ir import Endpoint, Pool


def pool(numbers):
    return Pool(endpoints=tuple(Endpoint(f"10.0.0.{number}", 80) for number in sorted(numbers)))


some_endpoints = st.sets(st.integers(1, 12), min_size=1)


@given(st.lists(some_endpoints, min_size=1, max_size=6))
def test_any_history(turns):
    slots = ()
    for numbers in turns:
        wanted = {(f"10.0.0.{number}", 80) for number in numbers}
        before, slots = slots, arrange(slots, pool(numbers))
        assert sorted(slots) == sorted(wanted)
        leaving, coming = set(before) - wanted, wanted - set(before)
        written = sum(1 for index, one in enumerate(slots) if index >= len(before) or before[index] != one)
        assert written <= max(len(leaving), len(coming))


def test_first_order_is_the_pools():
    assert arrange((), pool({3, 1, 2})) == (("10.0.0.1", 80), ("10.0.0.2", 80), ("10.0.0.3", 80))


def test_no_pool_no_slots():
    assert arrange((("10.0.0.1", 80),), None) == ()


def test_the_last_fills_the_hole():
    assert arrange((("10.0.0.1", 80), ("10.0.0.2", 80), ("10.0.0.3", 80)), pool({2, 3})) == (
        ("10.0.0.3", 80),
        ("10.0.0.2", 80),
    )
