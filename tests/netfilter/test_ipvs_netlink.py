"""The binary form of virtual and real servers; a kernel takes and gives it in tests/uml."""

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import Protocol
from narthex.netfilter.ipvs import RealServer, VirtualServer
from narthex.netfilter.netlink.ipvs import (
    IpvsTimeouts,
    KernelRealServer,
    KernelVirtualServer,
    read_real,
    read_server,
    read_timeouts,
    real_attributes,
    server_attributes,
    server_key_attributes,
    timeout_attributes,
)

ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
PORTS = st.integers(0, 65535)
SECONDS = st.none() | st.integers(1, 1 << 20)
SERVERS = st.builds(
    VirtualServer,
    address=ADDRESSES,
    protocol=st.sampled_from((Protocol.TCP, Protocol.UDP, Protocol.SCTP)),
    port=PORTS,
    scheduler=st.sampled_from(("rr", "wlc", "mh")),
    persistence_seconds=SECONDS,
    hash_ports=st.booleans(),
)
REALS = st.builds(RealServer, ADDRESSES, PORTS, st.integers(0, 65535), st.sampled_from(("masquerade", "gateway")))


def attribute(kind, content):
    return struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)


@given(SERVERS)
def test_a_virtual_server_comes_back_as_it_was(server):
    assert read_server(server_attributes(server)) == KernelVirtualServer(server, "")


@given(SERVERS, REALS)
def test_a_real_server_comes_back_as_it_was(server, real):
    assert read_real(real_attributes(server.key, real)) == KernelRealServer(real, 0)
    assert real_attributes(server.key, real).startswith(server_key_attributes(server.key))


@given(st.tuples(*[st.integers(0, 2**31)] * 3))
def test_timeouts_come_back_as_they_were(seconds):
    assert read_timeouts(timeout_attributes(IpvsTimeouts(*seconds))) == IpvsTimeouts(*seconds)


@pytest.mark.parametrize(
    ("address", "family", "packed"),
    [("10.110.0.1", 2, IPv4Address("10.110.0.1").packed + bytes(12)), ("fd6e::1", 10, IPv6Address("fd6e::1").packed)],
)
def test_the_bytes_are_those_of_the_kernel(address, family, packed):
    """Numbers of linux/ip_vs.h: family, protocol and port 80 of a virtual server's name."""
    key = (address, Protocol.TCP, 80)
    inner = attribute(1, struct.pack("=H", family)) + attribute(2, struct.pack("=H", 6))
    inner += attribute(3, packed) + attribute(4, struct.pack(">H", 80))
    assert server_key_attributes(key) == attribute(1 | 0x8000, inner)


def test_addresses_are_written_as_everywhere():
    """The C library ends some IPv6 addresses in dots."""
    assert read_real(real_attributes(("::1", Protocol.TCP, 1), RealServer("::102:304", 1))).real.address == "::102:304"


def test_others_are_told_apart():
    """By a packet mark, or of a protocol that Services do not have."""
    by_mark = attribute(1, struct.pack("=H", 2)) + attribute(5, struct.pack("=I", 7)) + attribute(6, b"rr\0")
    assert read_server(attribute(1, by_mark)) is None
    esp = attribute(1, struct.pack("=H", 2)) + attribute(2, struct.pack("=H", 50)) + attribute(3, bytes(16))
    assert read_server(attribute(1, esp + attribute(4, bytes(2)))) is None


def test_connections_that_go_on_or_end_count_and_remembered_clients_do_not():
    address = attribute(1, IPv4Address("10.64.1.5").packed + bytes(12)) + attribute(2, struct.pack(">H", 80))
    counts = b"".join(attribute(kind, struct.pack("=I", number)) for kind, number in ((7, 3), (8, 4), (9, 100)))
    assert read_real(attribute(2, address + counts)).connections == 7
    # A kernel that does not say the family.
    assert read_real(attribute(2, address)).real.address == "10.64.1.5"
