"""Entries as a kernel (6.18) lists them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import ConntrackFlow, Protocol
from narthex.netfilter.netlink.conntrack import read

TAIL = (
    "0800030000000008080008000000000008000c00abecf0f908000b0000000001080007000000025"
    "71c001880080001000000000008000200000000000800030000000000"
)
UDP4 = bytes.fromhex(
    "3400018014000180080001000a4001c8080002000a6e00011c0002800500010011000000060002009c4000000600030000500000"
    "3400028014000180080001000a400105080002000a14000b1c0002800500010011000000060002001f9000000600030004d20000" + TAIL
)
TCP6 = bytes.fromhex(
    "4c0001802c00018014000300fd6400000000000000000000000000c814000400fd6e0000000000000000000000000001"
    "1c0002800500010006000000060002009c4100000600030001bb00004c0002802c00018014000300fd64000000000000"
    "000000000000000514000400fd6400000000000000000000000000c81c00028005000100060000000600020020fb0000"
    "060003009c4100000800030000000008080008000000000008000c0055020a9c08000b00000000010800070000000257"
    "300004802c000180050001000300000005000200000000000500030000000000060004000a000000060005000a000000"
    "1c001880080001000000000008000200000000000800030000000000"
)
ICMP = bytes.fromhex(
    "3c00018014000180080001000a4001c8080002000a6e00012400028005000100010000000600040000070000050005000800000005000600"
    "000000003c00028014000180080001000a6e0001080002000a4001c82400028005000100010000000600040000070000050005000000000005"
    "00060000000000" + TAIL
)
ZONE = bytes.fromhex(
    "3400018014000180080001000a4001c8080002000a6e00011c0002800500010011000000060002009c4200000600030000500000"
    "3400028014000180080001000a6e0001080002000a4001c81c00028005000100110000000600020000500000060003009c420000"
    "0600120000050000" + TAIL
)
ZONE_OF_ONE_WAY = bytes.fromhex(
    "3c00018014000180080001000a4001c8080002000a6e00011c0002800500010011000000060002009c430000060003000050000006000300000500"
    "003400028014000180080001000a6e0001080002000a4001c81c00028005000100110000000600020000500000060003009c430000" + TAIL
)
ID4 = bytes.fromhex("08000c00abecf0f9")


class Anything:
    def __contains__(self, _):
        return True


def test_ipv4_udp_rewritten_and_masqueraded():
    entry = read(UDP4, {(Protocol.UDP, 80)})
    assert entry.flow == ConntrackFlow(Protocol.UDP, "10.64.1.200", 40000, "10.110.0.1", 80, "10.64.1.5", 8080)
    assert entry.flow.translated
    assert entry.handle == UDP4[:0x34] + ID4


def test_ipv6_tcp():
    entry = read(TCP6, {(Protocol.TCP, 443)})
    assert entry.flow == ConntrackFlow(Protocol.TCP, "fd64::c8", 40001, "fd6e::1", 443, "fd64::5", 8443)
    assert entry.handle == TCP6[:0x4C] + bytes.fromhex("08000c0055020a9c")


def test_sctp():
    entry = read(UDP4.replace(b"\x05\x00\x01\x00\x11", b"\x05\x00\x01\x00\x84"), {(Protocol.SCTP, 80)})
    assert entry.flow.protocol is Protocol.SCTP


@pytest.mark.parametrize("towards", [(Protocol.UDP, 8080), (Protocol.UDP, 40000), (Protocol.TCP, 80)])
def test_what_was_first_sent_elsewhere_is_left_out(towards):
    assert read(UDP4, {towards}) is None


@pytest.mark.parametrize("body", [ICMP, ZONE, ZONE_OF_ONE_WAY], ids=["ICMP", "zone", "zone of one direction"])
def test_what_services_never_make_is_left_out(body):
    assert read(body, Anything()) is None


def test_the_order_of_attributes_does_not_matter():
    original, reply, rest = UDP4[:0x34], UDP4[0x34:0x68], UDP4[0x68:]
    entry = read(reply + rest + original, {(Protocol.UDP, 80)})
    assert entry == read(UDP4, {(Protocol.UDP, 80)})
    assert read(reply + rest + original, {(Protocol.UDP, 81)}) is None


@given(st.binary(max_size=200), st.integers(0, len(UDP4)), st.integers(0, len(UDP4)))
def test_anything_else_is_no_error(noise, cut, place):
    for body in (noise, UDP4[:cut], UDP4[:place] + noise + UDP4[place:]):
        entry = read(body, Anything())
        assert entry is None or isinstance(entry.flow, ConntrackFlow)
