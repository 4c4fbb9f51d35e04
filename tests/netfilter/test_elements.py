"""Set elements as bytes: the layout that the kernel has, and back."""

import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import IPFamily, address, network, networks_between
from narthex.netfilter.ast import DropPacket, Field, Goto, Return, Set, Slot, Unprintable
from narthex.netfilter.netlink.attributes import attribute, attributes
from narthex.netfilter.netlink.elements import decode_list, encoder, is_config_set, key_encoder

V4, V6 = IPFamily.IPV4, IPFamily.IPV6
FRONTEND = (Field.DADDR, Field.L4PROTO, Field.DPORT)
SERVICES = Set(name="services", key=FRONTEND, data="verdict")
ENDPOINTS = Set(name="endpoints", key=(*FRONTEND, Slot(4294967295)), data="endpoint")
SOURCES = Set(name="sources", key=(*FRONTEND, Field.SADDR), interval=True)
HAIRPIN = Set(name="hairpin", key=(Field.SADDR, Field.DADDR))


def there_and_back(one, family, elements):
    payload = b"".join(encoder(one, family)(elements.items()))
    return {key: data for key, data, _ in decode_list(one, family, payload, 0, len(payload))}


def test_bytes_of_an_endpoint_element():
    """As `nft --debug=netlink` shows it: address, protocol, port, slot, then address and port, each on four bytes."""
    (raw,) = encoder(ENDPOINTS, V4)([(("10.96.0.1", "tcp", 80, 5), ("10.64.1.10", 8080))])
    key = bytes([10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0]) + (5).to_bytes(4, sys.byteorder)
    data = bytes([10, 64, 1, 10, 0x1F, 0x90, 0, 0])
    nested = 0x8000
    assert raw == attribute(
        1 | nested, attribute(1 | nested, attribute(1, key)) + attribute(2 | nested, attribute(1, data))
    )


def test_bytes_of_a_verdict():
    (raw,) = encoder(SERVICES, V4)([(("10.96.0.1", "udp", 53), Goto("send-c2"))])
    nested = 0x8000
    verdict = attribute(1, struct.pack(">i", -4)) + attribute(2, b"send-c2\0")
    assert raw == attribute(
        1 | nested,
        attribute(1 | nested, attribute(1, bytes([10, 96, 0, 1, 17, 0, 0, 0, 0, 53, 0, 0])))
        + attribute(2 | nested, attribute(2 | nested, verdict)),
    )


@pytest.mark.parametrize(
    ("one", "family", "elements"),
    [
        (HAIRPIN, V4, {("10.64.1.1", "10.64.1.1"): None}),
        (HAIRPIN, V6, {("fd64::1", "fd64::1"): None, ("::ffff:a00:1", "::ffff:a00:1"): None}),
        (
            SERVICES,
            V6,
            {("fd6e::1", "tcp", 80): Goto("a"), ("fd6e::1", "sctp", 1): DropPacket(), ("fd6e::2", "udp", 5): Return()},
        ),
        (
            ENDPOINTS,
            V6,
            {("fd6e::1", "tcp", 65535, 0): ("fd64::1", 1), ("fd6e::1", "tcp", 65535, 70000): ("fd64::2", 2)},
        ),
        (
            SOURCES,
            V4,
            {
                ("203.0.113.1", "tcp", 80, "198.51.100.0/25"): None,
                ("203.0.113.1", "tcp", 80, "198.51.100.200"): None,
                ("203.0.113.1", "udp", 80, "0.0.0.0/0"): None,
            },
        ),
        (SOURCES, V6, {("2001:db8::1", "tcp", 80, "2001:db8:c::/64"): None, ("2001:db8::1", "tcp", 80, "::1"): None}),
    ],
    ids=str,
)
def test_there_and_back(one, family, elements):
    assert there_and_back(one, family, elements) == elements


ports = st.integers(0, 65535)
protocols = st.sampled_from(["tcp", "udp", "sctp"])


def addresses(family):
    return st.ip_addresses(v=family.value).map(lambda ip: address(str(ip)))


@given(
    st.sampled_from(IPFamily).flatmap(
        lambda family: st.tuples(
            st.just(family),
            st.dictionaries(
                st.tuples(addresses(family), protocols, ports, st.integers(0, 2**32 - 1)),
                st.tuples(addresses(family), ports),
                max_size=8,
            ),
        )
    )
)
def test_any_endpoint_element(case):
    family, elements = case
    assert there_and_back(ENDPOINTS, family, elements) == elements


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_any_network_of_a_source_range(ip, length):
    cidr = network(f"{ip}/{length}")
    text = cidr.removesuffix("/32")
    elements = {("203.0.113.1", "tcp", 80, text): None}
    assert there_and_back(SOURCES, V4, elements) == elements


@pytest.mark.parametrize(
    ("one", "key", "data"),
    [
        (SERVICES, ("fd00::1", "tcp", 80), Goto("a")),
        (SERVICES, ("10.0.0.1", "icmp6", 80), Goto("a")),
        (SERVICES, ("10.0.0.1", "tcp", 70000), Goto("a")),
        (SERVICES, ("10.0.0.1", "tcp", -1), Goto("a")),
        (SERVICES, ("10.0.0.1", "tcp"), Goto("a")),
        (SERVICES, ("10.0.0.1", "tcp", "80"), Goto("a")),
        (SERVICES, ("10.0.0.1", "tcp", 80), None),
        (ENDPOINTS, ("10.0.0.1", "tcp", 80, 2**32), ("10.0.0.2", 1)),
        (ENDPOINTS, ("10.0.0.1", "tcp", 80, 0), None),
        (ENDPOINTS, ("10.0.0.1", "tcp", 80, 0), Goto("a")),
        (SOURCES, ("10.0.0.1", "tcp", 80, "fd00::/64"), None),
        (Set(name="n", key=(Field.SADDR,), interval=True), ("10.0.0.0/8",), None),
        (Set(name="n", key=(Field.IIFNAME,)), ("eth0",), None),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(one, key, data):
    with pytest.raises(Unprintable):
        list(encoder(one, V4)([(key, data)]))


def test_a_deletion_needs_keys_only():
    pairs = [(("10.0.0.1", "tcp", 80), Goto("a"))]
    (raw,) = key_encoder(SERVICES, V4)(pairs)
    assert [(key, data) for key, data, _ in decode_list(SERVICES, V4, raw, 0, len(raw))] == [(pairs[0][0], None)]


def test_packets_of_a_counter():
    nested = 0x8000
    counter = attribute(1, b"counter\0") + attribute(
        2 | nested, attribute(1, (720).to_bytes(8, "big")) + attribute(2, (12).to_bytes(8, "big"))
    )
    key = attribute(1 | nested, attribute(1, bytes([10, 64, 1, 1] * 2)))
    raw = attribute(1 | nested, key + attribute(7 | nested, counter))
    assert list(decode_list(HAIRPIN, V4, raw, 0, len(raw))) == [(("10.64.1.1", "10.64.1.1"), None, 12)]


@pytest.mark.parametrize(
    "raw", [b"\x40\x00\x01\x80", b"\x02\x00\x01\x80", attribute(1, attribute(1, attribute(1, b"abc")))]
)
def test_cut_or_strange_bytes_are_refused(raw):
    with pytest.raises(ValueError):
        list(decode_list(HAIRPIN, V4, raw, 0, len(raw)))


def test_attributes_say_where_they_are():
    data = attribute(5, b"abc") + attribute(6, b"")
    assert [(kind, data[at:stop]) for kind, at, stop in attributes(data)] == [(5, b"abc"), (6, b"")]


def test_networks_between():
    assert networks_between("10.0.0.4", "10.0.0.9") == ("10.0.0.4/30", "10.0.0.8/31")
    with pytest.raises(ValueError):
        networks_between("10.0.0.9", "10.0.0.4")
    with pytest.raises(ValueError):
        networks_between("10.0.0.9", "fd00::1")


def test_config_sets():
    assert is_config_set(Set(name="n", key=(Field.SADDR,), interval=True))
    assert not is_config_set(SOURCES)
    assert not is_config_set(HAIRPIN)
