"""Addresses are replaced by others with the same common prefixes and the same order."""

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from narthex.trace.issue.addresses import AddressReplacements

ADDRESSES = st.one_of(
    st.ip_addresses(v=4),
    st.ip_addresses(v=6),
    st.ip_addresses(network="10.96.0.0/12"),
    st.ip_addresses(network="fd00::/64"),
)
KEYS = st.binary(min_size=4, max_size=4)


def shared(one, other):
    """The number of leading bits that two addresses have in common; -1 for different families."""
    if one.version != other.version:
        return -1
    return one.max_prefixlen - (int(one) ^ int(other)).bit_length()


@given(st.lists(ADDRESSES, min_size=2, max_size=12, unique=True), KEYS)
def test_prefixes_and_order_are_kept(held, key):
    replace = AddressReplacements(map(str, held), key)
    made = [ipaddress.ip_address(replace.replaced(str(each))) for each in held]
    for number, one in enumerate(held):
        for other, (mine, its) in zip(
            held[number:], zip([made[number]] * len(held), made[number:], strict=False), strict=False
        ):
            assert shared(one, other) == shared(mine, its)
            assert one.version != other.version or (one < other) == (mine < its)


@given(st.lists(ADDRESSES, max_size=8, unique=True), st.integers(0, 128), KEYS)
def test_networks_contain_the_same_addresses(held, length, key):
    nets = [ipaddress.ip_network(f"{each}/{min(length, each.max_prefixlen)}", strict=False) for each in held]
    replace = AddressReplacements([*map(str, held), *map(str, nets)], key)
    for net in nets:
        made = ipaddress.ip_network(replace.replaced(str(net)))
        assert made.prefixlen == net.prefixlen
        for each in held:
            assert (each in net) == (ipaddress.ip_address(replace.replaced(str(each))) in made)


def test_addresses_with_a_meaning_stay():
    kept = [
        "127.0.0.1",
        "0.0.0.0",
        "0.0.0.0/0",
        "169.254.20.10",
        "224.0.0.0/4",
        "255.255.255.255",
        "::1",
        "::",
        "::/0",
        "fe80::1",
        "10.0.0.0/8",
        "192.168.0.0/16",
    ]
    replace = AddressReplacements(kept, b"key")
    assert [replace.replaced(each) for each in kept] == kept


def test_private_addresses_stay_private():
    replace = AddressReplacements(["10.1.2.3", "172.16.5.4", "192.168.7.7", "fd12::7", "203.0.113.7"], b"key")
    made = [
        ipaddress.ip_address(replace.replaced(each)) for each in ("10.1.2.3", "172.16.5.4", "192.168.7.7", "fd12::7")
    ]
    assert all(each.is_private for each in made)
    assert str(made[0]) != "10.1.2.3"
    assert replace.replaced("203.0.113.7") != "203.0.113.7"
    assert replace.replaced("203.0.113.7") == replace.replaced("203.0.113.7")
    other = AddressReplacements(["203.0.113.7"], b"another key")
    assert other.replaced("203.0.113.7") != replace.replaced("203.0.113.7")
