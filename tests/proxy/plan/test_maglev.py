"""Lookup tables for consistent hashing: even, stable when endpoints change, and the same on every node."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.proxy.plan.ir import Endpoint
from narthex.proxy.plan.maglev import TABLE_SIZES, client_slot, filled, lookup_table, table_size


def endpoints(count, start=0):
    return tuple(
        Endpoint(f"10.{64 + n // 62500}.{n // 250 % 250}.{n % 250 + 1}", 8080) for n in range(start, start + count)
    )


def test_the_example_of_the_paper():
    """Section 3.4: three candidates, seven slots; then the second one leaves."""
    preferences = [(3, 4), (0, 2), (3, 1)]
    assert filled(preferences, 7) == [1, 0, 1, 0, 2, 2, 0]
    assert filled([preferences[0], preferences[2]], 7) == [0, 0, 0, 0, 1, 1, 1]


def test_nobody_has_no_slots():
    assert filled([], 7) == [] and lookup_table(()) == ()


@pytest.mark.parametrize("size", [size for _, size in TABLE_SIZES])
def test_sizes_are_primes(size):
    assert all(size % divisor for divisor in range(2, int(size**0.5) + 1))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20, 21, 320, 400])
def test_every_endpoint_has_the_same_share(count):
    """Slots are taken in turns, so that counts differ by one at most."""
    held = Counter(lookup_table(endpoints(count)))
    assert len(held) == count
    assert max(held.values()) - min(held.values()) <= 1
    assert min(held.values()) >= 50


@pytest.mark.parametrize("count", [2, 10, 20, 100, 320])
def test_an_endpoint_that_leaves_moves_few_clients_of_others(count):
    all_of_them = endpoints(count)
    before = lookup_table(all_of_them)
    for leaving in (0, count // 2, count - 1):
        after = lookup_table(all_of_them[:leaving] + all_of_them[leaving + 1 :])
        if len(after) != len(before):
            continue
        moved = sum(one != other for one, other in zip(before, after, strict=True))
        own = sum(one == all_of_them[leaving] for one in before)
        assert own <= moved <= own + len(before) * 0.05


def test_a_replaced_endpoint_moves_few_clients_of_others():
    before, after = lookup_table(endpoints(10)), lookup_table(endpoints(9, 1) + endpoints(1, 99))
    assert sum(one != other for one, other in zip(before, after, strict=True)) < len(before) * 0.25


@given(st.permutations(endpoints(12)), st.sets(st.integers(0, 11)))
def test_neither_order_nor_node_matters(shuffled, here):
    """Each node sees its own endpoints as local ones, and other nodes choose alike."""
    plain = [(one.address, one.port) for one in lookup_table(endpoints(12))]
    local = tuple(Endpoint(one.address, one.port, number in here) for number, one in enumerate(shuffled))
    assert [(one.address, one.port) for one in lookup_table(local)] == plain


def test_a_client_gets_the_same_pod_on_all_ports():
    one, other = endpoints(7), tuple(Endpoint(end.address, 9090) for end in endpoints(7))
    assert [end.address for end in lookup_table(one)] == [end.address for end in lookup_table(other)]


def test_clients_are_spread_over_slots_in_both_families():
    for form in ("10.64.{}.{}", "fd64::{:x}:{:x}"):
        slots = [client_slot(form.format(a, b), 1021) for a in range(40) for b in range(250)]
        assert len(set(slots)) > 1000
        table = lookup_table(endpoints(10))
        shares = Counter(table[slot] for slot in slots).values()
        assert max(shares) < 1.15 * len(slots) / 10 and min(shares) > 0.85 * len(slots) / 10


def test_sizes_grow_in_large_steps():
    assert [table_size(count) for count in (1, 20, 21, 320, 321, 5000)] == [1021, 1021, 16381, 16381, 65521, 65521]
