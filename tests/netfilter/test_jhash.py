"""The kernel's hash, against the known answers of Bob Jenkins' lookup3.c, from which the kernel has it."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.netfilter.jhash import jhash, scaled


@pytest.mark.parametrize(
    "data, seed, expected",
    [
        (b"", 0, 0xDEADBEEF),
        (b"", 0xDEADBEEF, 0xBD5B7DDE),
        (b"Four score and seven years ago", 0, 0x17770551),
        (b"Four score and seven years ago", 1, 0xCD628161),
    ],
)
def test_known_answers(data, seed, expected):
    assert jhash(data, seed) == expected


@given(st.integers(0, 0xFFFFFFFF), st.integers(1, 70000))
def test_scaling_reaches_every_number_in_order(hashed, mod):
    assert 0 <= scaled(hashed, mod) < mod
    assert scaled(0, mod) == 0 and scaled(0xFFFFFFFF, mod) == mod - 1
    assert scaled(hashed, mod) <= scaled(min(hashed + 1, 0xFFFFFFFF), mod)


def test_hashes_of_addresses_are_spread():
    slots = [scaled(jhash(struct.pack(">I", 0x0A400000 + number), 7), 8) for number in range(8000)]
    assert all(800 < slots.count(slot) < 1200 for slot in range(8))
