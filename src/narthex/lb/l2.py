"""ARP (RFC 826) and IPv6 Neighbor Discovery (RFC 4861) as far as an announcer needs them: bytes in, bytes out.

Frames are complete Ethernet frames without a VLAN tag. IP addresses are canonical strings, MAC addresses are six bytes.
Also the socket filters (classic BPF) that pass only frames about announced addresses, so that the neighbor traffic of
other hosts does not wake the process.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Collection
from socket import AF_INET, AF_INET6, inet_pton

import msgspec

from narthex.model.values import address_text

ETHERTYPE_ARP, ETHERTYPE_IPV6 = 0x0806, 0x86DD
BROADCAST = b"\xff" * 6
ALL_NODES, ALL_NODES_MAC = "ff02::1", bytes.fromhex("333300000001")

_ETHERNET = struct.Struct("!6s6sH")
_ARP = struct.Struct("!HHBBH6s4s6s4s")
_ARP_KIND = (1, 0x0800, 6, 4)
"""Ethernet, IPv4, and the lengths of their addresses."""
_REQUEST, _REPLY = 1, 2
_IPV6 = struct.Struct("!IHBB16s16s")
_ND = struct.Struct("!BBHI16s")
_ICMPV6, _HOPS = 58, 255
"""A hop limit of 255 proves that a message comes from this link (RFC 4861 3.1)."""
SOLICITATION, ADVERTISEMENT = 135, 136
_SOLICITED, _OVERRIDE = 0x40000000, 0x20000000
_SOURCE_OPTION, _TARGET_OPTION = 1, 2
_NOBODY = {AF_INET: bytes(4), AF_INET6: bytes(16)}
_SOLICITED_NODE = bytes.fromhex("ff0200000000000000000001ff")


class NeighborMessageKind(enum.Enum):
    """What a message does."""

    ASKS = "asks"
    """Requests the MAC address of the target."""
    CLAIMS = "claims"
    """Claims the address: a reply, a gratuitous announcement, or duplicate address detection."""


class NeighborMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One ARP or NDP message about an address."""

    kind: NeighborMessageKind
    address: str
    mac: bytes
    """MAC address of the sender, from the message or else from the frame."""
    sender: str = ""
    """IP address of the requester; empty in duplicate address detection."""
    destination: bytes = BROADCAST
    answerable: bool = False
    """True for a request that names its sender."""


def read(frame: bytes) -> tuple[NeighborMessage, ...]:
    """Decode a frame into messages: none, one, or two if an ARP request for one address claims another."""
    if len(frame) < _ETHERNET.size:
        return ()
    destination, source, kind = _ETHERNET.unpack_from(frame)
    if kind == ETHERTYPE_ARP:
        return _read_arp(frame, destination)
    return _read_nd(frame, destination, source) if kind == ETHERTYPE_IPV6 else ()


def _read_arp(frame: bytes, destination: bytes) -> tuple[NeighborMessage, ...]:
    if len(frame) < _ETHERNET.size + _ARP.size:
        return ()
    *shape, operation, mac, sender, _, target = _ARP.unpack_from(frame, _ETHERNET.size)
    if tuple(shape) != _ARP_KIND or operation not in (_REQUEST, _REPLY):
        return ()
    probes = sender == _NOBODY[AF_INET]
    claims = () if probes else (_claim(sender, mac, destination),)
    if operation != _REQUEST or target == sender:
        return claims
    return *claims, _request(target, mac, "" if probes else address_text(sender), destination, answerable=True)


def _claim(address: bytes, mac: bytes, destination: bytes) -> NeighborMessage:
    return NeighborMessage(
        kind=NeighborMessageKind.CLAIMS, address=address_text(address), mac=mac, destination=destination
    )


def _request(address: bytes, mac: bytes, sender: str, destination: bytes, *, answerable: bool) -> NeighborMessage:
    return NeighborMessage(
        kind=NeighborMessageKind.ASKS,
        address=address_text(address),
        mac=mac,
        sender=sender,
        destination=destination,
        answerable=answerable,
    )


def _read_nd(frame: bytes, destination: bytes, ethernet: bytes) -> tuple[NeighborMessage, ...]:
    start = _ETHERNET.size + _IPV6.size
    if len(frame) < start + _ND.size:
        return ()
    _, length, following, hops, sender, receiver = _IPV6.unpack_from(frame, _ETHERNET.size)
    body = frame[start : start + length]
    if following != _ICMPV6 or hops != _HOPS or not _ND.size <= length == len(body):
        return ()
    kind, code, _, _, target = _ND.unpack_from(body)
    if kind not in (SOLICITATION, ADVERTISEMENT) or code or target[0] == 0xFF:
        return ()
    options = _options(body[_ND.size :])
    if options is None or _checksum(sender, receiver, body):
        return ()
    if kind == ADVERTISEMENT:
        return (_claim(target, options.get(_TARGET_OPTION, ethernet), destination),)
    if sender == _NOBODY[AF_INET6]:
        # Duplicate address detection: the sender will use the address unless another host objects.
        return (_claim(target, ethernet, destination),)
    known = options.get(_SOURCE_OPTION)
    return (_request(target, known or ethernet, address_text(sender), destination, answerable=known is not None),)


def _options(data: bytes) -> dict[int, bytes] | None:
    """Return the link-layer address options by type; None if the options are malformed, which invalidates the message."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        if at + 2 > len(data) or not (length := data[at + 1] * 8) or at + length > len(data):
            return None
        if data[at] in (_SOURCE_OPTION, _TARGET_OPTION) and length == 8:
            found[data[at]] = data[at + 2 : at + 8]
        at += length
    return found


def answer(asked: NeighborMessage, mac: bytes, link_local: str) -> bytes | None:
    """Return the reply to a request, stating that `mac` has the address; None if there is none to send.

    `link_local` is the source address for IPv6; without one there is no reply. Requests that are neither broadcast, multicast,
    nor addressed to `mac` are ignored, so that a bridge in promiscuous mode does not answer for others.
    """
    if asked.kind is not NeighborMessageKind.ASKS or not asked.answerable:
        return None
    if asked.destination != mac and not asked.destination[0] & 1:
        return None
    if ":" in asked.address:
        if not link_local:
            return None
        return _advertisement(asked.address, mac, link_local, asked.mac, asked.sender, _SOLICITED)
    sender = _raw(asked.sender) if asked.sender else _NOBODY[AF_INET]
    return _arp(_REPLY, mac, _raw(asked.address), asked.mac, sender, asked.mac)


def gratuitous(address: str, mac: bytes, link_local: str) -> tuple[bytes, ...]:
    """Return frames that announce to all hosts that `mac` has the address.

    For ARP a request and a reply, since hosts differ in which one they accept. Empty for IPv6 without a `link_local` address.
    """
    if ":" in address:
        if not link_local:
            return ()
        return (_advertisement(address, mac, link_local, ALL_NODES_MAC, ALL_NODES, _OVERRIDE),)
    raw = _raw(address)
    return (_arp(_REQUEST, mac, raw, BROADCAST, raw, BROADCAST), _arp(_REPLY, mac, raw, BROADCAST, raw, BROADCAST))


def probe(address: str, mac: bytes, link_local: str) -> bytes | None:
    """Return a request for the address that updates no caches: an ARP probe (RFC 5227) or a Neighbor Solicitation.

    Any host that replies uses the address.
    """
    if ":" not in address:
        return _arp(_REQUEST, mac, _NOBODY[AF_INET], bytes(6), _raw(address), BROADCAST)
    if not link_local:
        return None
    group = solicited_node(address)
    body = struct.pack("!I16sBB6s", 0, _raw(address), _SOURCE_OPTION, 1, mac)
    return _nd(SOLICITATION, body, mac, link_local, multicast_mac(group), group)


def solicited_node(address: str) -> str:
    """Return the solicited-node multicast group of an IPv6 address (RFC 4291 2.7.1)."""
    return address_text(_SOLICITED_NODE + _raw(address)[13:])


def multicast_mac(group: str) -> bytes:
    """Return the destination MAC address of an IPv6 multicast group (RFC 2464 7)."""
    return b"\x33\x33" + _raw(group)[12:]


def mac_text(mac: bytes) -> str:
    """Format a MAC address with colons."""
    return mac.hex(":")


def _arp(operation: int, mac: bytes, sender: bytes, to_mac: bytes, target: bytes, destination: bytes) -> bytes:
    head = _ETHERNET.pack(destination, mac, ETHERTYPE_ARP)
    return head + _ARP.pack(*_ARP_KIND, operation, mac, sender, to_mac, target)


def _advertisement(address: str, mac: bytes, source: str, to_mac: bytes, to: str, flags: int) -> bytes:
    body = struct.pack("!I16sBB6s", flags, _raw(address), _TARGET_OPTION, 1, mac)
    return _nd(ADVERTISEMENT, body, mac, source, to_mac, to)


def _nd(kind: int, rest: bytes, mac: bytes, source: str, to_mac: bytes, to: str) -> bytes:
    sender, receiver = _raw(source), _raw(to)
    head = struct.pack("!BBH", kind, 0, 0)
    sum_ = _checksum(sender, receiver, head + rest)
    body = struct.pack("!BBH", kind, 0, sum_) + rest
    header = _IPV6.pack(6 << 28, len(body), _ICMPV6, _HOPS, sender, receiver)
    return _ETHERNET.pack(to_mac, mac, ETHERTYPE_IPV6) + header + body


def _checksum(sender: bytes, receiver: bytes, body: bytes) -> int:
    """Return the ICMPv6 checksum (RFC 4443 2.3); 0 for a message that contains a valid one."""
    data = sender + receiver + struct.pack("!II", len(body), _ICMPV6) + body + bytes(len(body) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _raw(address: str) -> bytes:
    return inet_pton(AF_INET6 if ":" in address else AF_INET, address)


_LD_WORD, _LD_BYTE, _JUMP_EQUAL, _RETURN = 0x20, 0x30, 0x15, 0x06
_WHOLE, _NONE = 0xFFFFFFFF, 0
_ARP_SENDER, _ARP_TARGET = 28, 38
_ND_NEXT, _ND_TYPE, _ND_TARGET_END = 20, 54, 74
_MOST_LISTED = 500
"""Above this, all messages pass: the kernel limits programs to 4096 instructions, and long ones cost more than they save.
"""

BpfInstruction = tuple[int, int, int, int]
"""One classic BPF instruction: code, jump if true, jump if false, operand."""


def arp_filter(addresses: Collection[str]) -> tuple[BpfInstruction, ...]:
    """Return a filter for an ARP socket that passes messages from or about one of the addresses."""
    words = sorted(_tail(each) for each in addresses if ":" not in each)
    if len(words) > _MOST_LISTED:
        return ((_RETURN, 0, 0, _WHOLE),)
    return (*_one_of(_ARP_TARGET, words), *_one_of(_ARP_SENDER, words), (_RETURN, 0, 0, _NONE))


def nd_filter(addresses: Collection[str]) -> tuple[BpfInstruction, ...]:
    """Return a filter for an IPv6 socket that passes solicitations and advertisements for one of the addresses.

    Matches the last four bytes of the target. Extension headers are not parsed; Neighbor Discovery has none.
    """
    words = sorted({_tail(each) for each in addresses if ":" in each})
    picked = ((_RETURN, 0, 0, _WHOLE),) if len(words) > _MOST_LISTED else _one_of(_ND_TARGET_END, words)
    return (
        (_LD_BYTE, 0, 0, _ND_NEXT),
        (_JUMP_EQUAL, 1, 0, _ICMPV6),
        (_RETURN, 0, 0, _NONE),
        (_LD_BYTE, 0, 0, _ND_TYPE),
        (_JUMP_EQUAL, 2, 0, SOLICITATION),
        (_JUMP_EQUAL, 1, 0, ADVERTISEMENT),
        (_RETURN, 0, 0, _NONE),
        *picked,
        (_RETURN, 0, 0, _NONE),
    )


def _one_of(at: int, words: Collection[int]) -> tuple[BpfInstruction, ...]:
    """Return instructions that pass packets with one of these words at an offset."""
    steps: list[BpfInstruction] = [(_LD_WORD, 0, 0, at)]
    for word in words:
        steps += [(_JUMP_EQUAL, 0, 1, word), (_RETURN, 0, 0, _WHOLE)]
    return tuple(steps)


def _tail(address: str) -> int:
    return int.from_bytes(_raw(address)[-4:])
