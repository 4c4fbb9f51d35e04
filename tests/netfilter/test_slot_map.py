"""Elements kept by key and slot are what the same elements one by one are: as a mapping, as a difference, as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Field, Set, Slot, Unprintable
from narthex.netfilter.netlink.elements import encoder
from narthex.netfilter.netlink.slot_map import SlotMap, encode_slots

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
SLOT = Slot(4294967295)
ENDPOINTS = Set(name="endpoints", key=(Field.DADDR, Field.L4PROTO, Field.DPORT, SLOT), data="endpoint")
NODE_PORTS = Set(name="nodeport-endpoints", key=(Field.L4PROTO, Field.DPORT, SLOT), data="endpoint")

ports = st.integers(1, 65535)
protocols = st.sampled_from(["tcp", "udp", "sctp"])


def addresses(family):
    return st.ip_addresses(v=family.value).map(str)


def runs(family, *, node_ports=False):
    keys = st.tuples(protocols, ports) if node_ports else st.tuples(addresses(family), protocols, ports)
    slots = st.lists(st.tuples(addresses(family), ports), max_size=5).map(tuple)
    return st.dictionaries(keys, slots, max_size=6)


def slotted(given):
    made = SlotMap()
    made.runs.update(given)
    return made


def plain(given):
    return {(*key, number): one for key, slots in given.items() for number, one in enumerate(slots)}


@given(runs(V4))
def test_is_the_mapping_of_all_elements(some):
    held, want = slotted(some), plain(some)
    assert held == want
    assert want == held
    assert len(held) == len(want)
    assert dict(held.items()) == want
    assert all(key in held and held[key] == data for key, data in want.items())


@pytest.mark.parametrize("key", [("10.0.0.1", "tcp", 80, 2), ("10.0.0.1", "tcp", 80, -1), ("10.0.0.2", "tcp", 80, 0)])
def test_has_no_more_than_that(key):
    assert key not in slotted({("10.0.0.1", "tcp", 80): (("10.64.0.1", 80), ("10.64.0.2", 80))})


@given(runs(V4), runs(V4))
def test_the_difference_is_that_of_the_elements(one, other):
    shared = {key: slots[:2] for key, slots in one.items()} | other
    want = plain(one).items() - plain(shared).items()
    assert slotted(one).without(slotted(shared)) == dict(want)


@given(st.one_of(runs(V4).map(lambda some: (V4, some)), runs(V6).map(lambda some: (V6, some))))
def test_bytes_are_those_of_the_elements(made):
    family, some = made
    assert list(encode_slots(ENDPOINTS, family, slotted(some))) == list(encoder(ENDPOINTS, family)(plain(some).items()))


@given(runs(V6, node_ports=True))
def test_bytes_of_node_ports(some):
    assert list(encode_slots(NODE_PORTS, V6, slotted(some))) == list(encoder(NODE_PORTS, V6)(plain(some).items()))


def test_more_than_are_encoded_at_once():
    some = {(f"10.110.{number >> 8}.{number & 255}", "tcp", 80): (("10.64.0.1", 80),) * 3 for number in range(1000)}
    assert list(encode_slots(ENDPOINTS, V4, slotted(some))) == list(encoder(ENDPOINTS, V4)(plain(some).items()))


@pytest.mark.parametrize(
    "run",
    [
        {("10.0.0.1", "icmp6", 80): (("10.64.0.1", 80),)},
        {("10.0.0.1", "tcp", 80): (("fd64::1", 80),)},
        {("10.0.0.1", "tcp", 80): (("10.64.0.1", 70000),)},
    ],
)
def test_an_element_that_does_not_fit_is_named(run):
    good = {("10.0.0.9", "tcp", 80): (("10.64.0.9", 80),)}
    with pytest.raises(Unprintable, match=r"10\.0\.0\.1.*endpoints"):
        list(encode_slots(ENDPOINTS, V4, slotted(good | run)))
