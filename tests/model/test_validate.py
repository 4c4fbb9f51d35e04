"""Addresses and names: the quick ways in agree with the slow and plain ones."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model import net
from narthex.model.net import IPFamily
from narthex.model.validate import DNS_LABEL, DNS_SUBDOMAIN, cached_syntax, family_address, host_address, special_use

ADDRESSES = st.one_of(
    st.ip_addresses().map(str),
    st.ip_addresses(v=6).map(lambda ip: ip.exploded),
    st.integers(0, 2**32 - 1).map(lambda number: f"::{ipaddress.IPv4Address(number)}"),
    st.lists(st.integers(0, 300).map(str) | st.sampled_from(["010", "00", "", "1 ", "٣"]), min_size=3, max_size=5).map(
        ".".join
    ),
    st.text("0123456789abcdefF:.%/ \n\0x", max_size=45),
    st.text(max_size=10),
)


def by_hand(text):
    """What `host_address` says, the slow way; None for an error."""
    try:
        address = net.address(text)
    except ValueError:
        return None
    return None if special_use(address) else address


@given(ADDRESSES)
def test_an_address_is_read_the_same_by_the_quick_way(text):
    try:
        found = host_address(text)
    except ValueError:
        found = None
    assert found == by_hand(text)
    for family in IPFamily:
        try:
            of_family = family_address(text, family)
        except ValueError:
            of_family = None
        assert of_family == (found if found is not None and net.family_of(found) is family else None)


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0",
        "127.0.0.1",
        "169.254.1.1",
        "224.0.0.1",
        "239.1.1.1",
        "::",
        "::1",
        "fe80::1",
        "ff02::1",
        "::ffff:10.0.0.1",
    ],
)
def test_special_addresses_are_refused(text):
    with pytest.raises(ValueError, match="which no other host can reach"):
        host_address(text)


@pytest.mark.parametrize("text", ["0.1.2.3", "169.253.1.1", "223.1.1.1", "240.0.0.1", "::2", "fe00::1"])
def test_their_neighbours_are_not(text):
    assert host_address(text) == text


@given(st.text("ab-.0\n", max_size=8) | st.text(max_size=5))
def test_what_is_remembered_is_what_holds(text):
    known = cached_syntax(DNS_LABEL, 2)
    assert [known(text), known(text)] == [text if DNS_LABEL.holds(text) else None] * 2


def test_equal_names_become_one_and_old_ones_are_forgotten():
    known = cached_syntax(DNS_SUBDOMAIN, 2)
    first = known("node-" + "1")
    assert known("-".join(["node", "1"])) is first
    for number in range(5):
        known(f"other-{number}")
    assert known("".join(["node", "-1"])) == "node-1"


@pytest.mark.parametrize(("syntax", "longest"), [(DNS_LABEL, 63), (DNS_SUBDOMAIN, 253)])
def test_names_have_a_limit(syntax, longest):
    assert syntax.holds("a" * longest)
    assert not syntax.holds("a" * (longest + 1))
