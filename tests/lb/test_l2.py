"""ARP and Neighbour Discovery by the byte, and what the kernel is to let through (rows A6-A8)."""

import struct
from ipaddress import ip_address

import pytest

from narthex.lb.l2 import (
    NeighborMessage,
    NeighborMessageKind,
    answer,
    arp_filter,
    gratuitous,
    nd_filter,
    probe,
    read,
    solicited_node,
)

OWN, PEER = bytes.fromhex("02000000000a"), bytes.fromhex("02000000000b")
IP, HOST = "192.0.2.7", "192.0.2.99"
SIX, HOST_SIX, LOCAL = "2001:db8::1:7", "2001:db8::99", "fe80::a"
ALL = b"\xff" * 6


def packed(text):
    return ip_address(text).packed if text else bytes(4)


def arp(operation=1, mac=PEER, sender=HOST, target=IP, destination=ALL, kind=1):
    head = destination + mac + bytes.fromhex("0806")
    shape = struct.pack("!HHBBH", kind, 0x0800, 6, 4, operation)
    return head + shape + mac + packed(sender) + bytes(6) + packed(target)


def summed(source, to, body):
    data = packed(source) + packed(to) + struct.pack("!II", len(body), 58) + body
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def nd(kind=135, source=HOST_SIX, target=SIX, options=b"\x01\x01" + PEER, hops=255, to=None, wrong=0, flags=0):
    to = to or solicited_node(target)
    rest = struct.pack("!I", flags) + packed(target) + options
    blank = bytes((kind, 0, 0, 0)) + rest
    body = bytes((kind, 0)) + struct.pack("!H", summed(source, to, blank) ^ wrong) + rest
    header = struct.pack("!IHBB", 6 << 28, len(body), 58, hops) + packed(source) + packed(to)
    return b"\x33\x33\xff\x01\x00\x07" + PEER + bytes.fromhex("86dd") + header + body


def asks(**fields):
    given = {"address": IP, "mac": PEER, "sender": HOST, "answerable": True}
    return NeighborMessage(kind=NeighborMessageKind.ASKS, **{**given, **fields})


def claims(address, mac=PEER, destination=ALL):
    return NeighborMessage(kind=NeighborMessageKind.CLAIMS, address=address, mac=mac, destination=destination)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        # Who asks for one address tells that it has another.
        (arp(), (claims(HOST), asks())),
        (arp(destination=OWN), (claims(HOST, destination=OWN), asks(destination=OWN))),
        (arp(sender=""), (asks(sender=""),)),
        (arp(2), (claims(HOST),)),
        (arp(1, sender=IP), (claims(IP),)),
        (arp(2, sender=IP), (claims(IP),)),
        (arp(3), ()),
        (arp(kind=6), ()),
        (arp()[:41], ()),
        (b"", ()),
        (ALL + PEER + b"\x08\x00" + bytes(60), ()),
    ],
)
def test_arp_that_comes_in(frame, said):
    assert read(frame) == said
    # Ethernet makes short frames longer.
    assert read(frame + bytes(18)) == said or len(frame) < 42


GROUP = b"\x33\x33\xff\x01\x00\x07"


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (nd(), (asks(address=SIX, sender=HOST_SIX, destination=GROUP),)),
        (
            nd(options=b"\x0e\x01" + bytes(6) + b"\x01\x01" + PEER),
            (asks(address=SIX, sender=HOST_SIX, destination=GROUP),),
        ),
        (nd(options=b""), (asks(address=SIX, sender=HOST_SIX, destination=GROUP, answerable=False),)),
        (nd(source="::", options=b""), (claims(SIX, destination=GROUP),)),
        (nd(136, options=b"\x02\x01" + OWN), (claims(SIX, OWN, GROUP),)),
        (nd(136, options=b""), (claims(SIX, PEER, GROUP),)),
        (nd(134), ()),
        (nd(hops=254), ()),
        (nd(wrong=1), ()),
        (nd(target="ff02::1"), ()),
        (nd(options=b"\x01\x00" + PEER), ()),
        (nd(options=b"\x01\x02" + PEER), ()),
        (nd()[:70], ()),
        (nd()[:-1], ()),
    ],
)
def test_neighbour_discovery_that_comes_in(frame, said):
    assert read(frame) == said


def test_an_arp_answer():
    frame = answer(asks(), OWN, "")
    assert frame == PEER + OWN + bytes.fromhex("0806 0001 0800 06 04 0002") + OWN + packed(IP) + PEER + packed(HOST)
    assert read(frame) == (claims(IP, OWN, PEER),)
    # Whoever checks before use is told as well (RFC 5227).
    assert answer(asks(sender=""), OWN, "")[-4:] == bytes(4)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (asks(destination=ALL), True),
        (asks(destination=OWN), True),
        # To somebody else: this link is in promiscuous mode.
        (asks(destination=PEER), False),
        (asks(answerable=False), False),
        (claims(IP), False),
    ],
)
def test_what_is_answered(asked, answered):
    assert (answer(asked, OWN, "") is not None) is answered


def test_a_neighbour_advertisement():
    asked = asks(address=SIX, sender=HOST_SIX, destination=GROUP)
    frame = answer(asked, OWN, LOCAL)
    assert frame[:14] == PEER + OWN + bytes.fromhex("86dd")
    assert frame[14:22] == bytes.fromhex("60000000 0020 3aff")
    assert frame[22:54] == packed(LOCAL) + packed(HOST_SIX)
    # Solicited, does not override.
    assert frame[54:56] == bytes((136, 0)) and frame[58:62] == bytes.fromhex("40000000")
    assert frame[62:] == packed(SIX) + b"\x02\x01" + OWN
    assert read(frame) == (claims(SIX, OWN, PEER),)
    assert answer(asked, OWN, "") is None


def test_gratuitous_announcements():
    request, reply = gratuitous(IP, OWN, "")
    assert request[:22] == ALL + OWN + bytes.fromhex("0806 0001 0800 06 04 0001")
    assert reply[:22] == ALL + OWN + bytes.fromhex("0806 0001 0800 06 04 0002")
    assert read(request) == read(reply) == (claims(IP, OWN),)
    (frame,) = gratuitous(SIX, OWN, LOCAL)
    assert frame[:6] == bytes.fromhex("333300000001") and frame[38:54] == packed("ff02::1")
    # Overrides, is not an answer.
    assert frame[58:62] == bytes.fromhex("20000000")
    assert read(frame) == (claims(SIX, OWN, frame[:6]),)
    assert gratuitous(SIX, OWN, "") == ()


def test_probes_ask_and_claim_nothing():
    assert read(probe(IP, OWN, "")) == (asks(mac=OWN, sender=""),)
    (asked,) = read(probe(SIX, OWN, LOCAL))
    assert asked == asks(address=SIX, mac=OWN, sender=LOCAL, destination=GROUP)
    assert probe(SIX, OWN, "") is None


def run(program, frame):
    """Classic BPF, as far as the filters use it. A load from behind the end drops the frame."""
    value = at = 0
    while True:
        code, true, false, operand = program[at]
        at += 1
        if code in (0x20, 0x30):
            size = 4 if code == 0x20 else 1
            if operand + size > len(frame):
                return False
            value = int.from_bytes(frame[operand : operand + size])
        elif code == 0x15:
            at += true if value == operand else false
        else:
            return bool(operand)


MANY = [f"10.{one}.{two}.1" for one in range(3) for two in range(200)]


@pytest.mark.parametrize("others", [[], [HOST, "2001:db8::5"], MANY])
def test_filters_pass_what_is_about_our_addresses(others):
    ours = [IP, SIX, *others]
    four, six = arp_filter(ours), nd_filter(ours)
    assert run(four, arp()) and run(four, arp(2, sender=IP, target="192.0.2.50"))
    assert run(six, nd()) and run(six, nd(136, options=b"")) and not run(six, nd(134))
    assert not run(six, b"\0" * 14 + b"\x60" + b"\0" * 5 + b"\x06" + bytes(60))
    strange = arp(sender="192.0.2.51", target="192.0.2.52")
    assert run(four, strange) is (others is MANY)
    assert not run(six, nd(target="2001:db8::2:8"))
    assert len(four) < 4096 and len(six) < 4096


def test_filters_of_nothing_pass_nothing():
    assert not run(arp_filter([]), arp()) and not run(nd_filter([]), nd())
