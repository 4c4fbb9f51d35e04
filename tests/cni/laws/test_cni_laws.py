"""Laws of the CNI room: JSON is JSON, and addresses are each given once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.cni.json import JsonError, parse, write
from narthex.cni.plugins import host_local as ipam
from narthex.cni.plugins.host_local import IpamConfig, IpamRange
from narthex.model.values import address_number, packed_address, packed_network

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_what_others_write_is_read(value, ascii_only, indent):
    assert parse(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()) == value


@given(VALUES)
def test_what_is_written_is_read_by_others(value):
    assert json.loads(write(value)) == value
    assert write(value).isascii()


@given(
    st.text(alphabet='{}[]",:\\/ubnrt0123456789eE+-. \n\x00aæ', max_size=30)
    | st.binary(max_size=30).map(lambda data: data.decode("latin-1"))
)
def test_nobody_else_refuses_what_we_take(text):
    """Stricter than the standard library, never more generous."""
    data = text.encode()
    try:
        ours = parse(data)
    except JsonError:
        return
    assert json.loads(data) == ours


@given(st.binary(max_size=200))
def test_only_its_own_error(data):
    try:
        parse(data)
    except JsonError as error:
        assert str(error)


SIZES = st.integers(26, 30)


@given(SIZES, st.lists(st.booleans(), max_size=60), st.randoms(use_true_random=False))
def test_no_address_is_given_twice(prefix, turns, chance):
    """Over any order of coming and going: never the gateway, never one that is held, and none is missed."""
    network = packed_network(f"10.0.0.0/{prefix}")
    first, last = packed_address("10.0.0.1"), (address_number(network.last) - 1).to_bytes(4, "big")
    config = IpamConfig(((IpamRange(network, first, last, first),),), (), (), "", "/x/net")
    held, before = [], {}
    for comes in turns:
        if not comes and held:
            held.remove(chance.choice(held))
            continue
        if len(held) == (1 << 32 - prefix) - 3:
            with pytest.raises(ipam.RangeExhausted):
                ipam.choose(config, set(held), before)
            continue
        one = ipam.choose(config, set(held), before).ips[0].network.address
        assert one not in held and first < one <= last
        held.append(one)
        before[0] = one
