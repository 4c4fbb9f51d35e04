"""Codec for tracked connections in netlink messages: entries of a dump, entries to delete, and entries to create.

Numbers are those of linux/netfilter/nfnetlink_conntrack.h. The socket is in `linux/nfnetlink.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import NamedTuple

from narthex.model import ConntrackFlow, Protocol
from narthex.model.values import address_text, packed_address
from narthex.netfilter.netlink.attributes import NESTED, attribute, attributes

SUBSYSTEM = 1
NEW, GET, DELETE, GET_STATISTICS = 0, 1, 2, 5

_TUPLE_ORIG, _TUPLE_REPLY, _ID, _ZONE, _FILTER = 1, 2, 12, 18, 25
_STATUS, _PROTO_INFO, _NAT_SOURCE, _TIMEOUT, _NAT_DESTINATION = 3, 4, 6, 7, 13
_SEQUENCE_ORIG, _SEQUENCE_REPLY = 15, 16
_SEEN_REPLY, _ASSURED, _CONFIRMED = 1 << 1, 1 << 2, 1 << 3
_ESTABLISHED, _BE_LIBERAL, _WINDOW_SCALE = 3, 1 << 3, 1 << 0
_ESTABLISHED_SECONDS = 432_000
"""Default of nf_conntrack_tcp_timeout_established."""
_FILTER_ORIG = 1
_BY_PROTOCOL_AND_PORT = 1 << 3 | 1 << 5
_TUPLE_IP, _TUPLE_PROTO, _TUPLE_ZONE = 1, 2, 3
_IP_SOURCE, _IP_DESTINATION = (1, 3), (2, 4)
"""For IPv4 and IPv6."""
_PROTO_NUMBER, _PROTO_SOURCE_PORT, _PROTO_DESTINATION_PORT = 1, 2, 3
_KIND = 0x3FFF
_GLOBAL_ENTRIES = 1
_PORT = struct.Struct(">H")
_HEAD = struct.Struct("=HHHH")
_PROTO = struct.Struct("=HHHHB3xHH2s2xHH2s")
_PROTO_KINDS = _TUPLE_PROTO, _PROTO_NUMBER, _PROTO_SOURCE_PORT, _PROTO_DESTINATION_PORT
_PROTOCOLS = {each.number: each for each in (Protocol.TCP, Protocol.UDP, Protocol.SCTP)}


class ConntrackEntry(NamedTuple):
    """An entry of the conntrack table."""

    flow: ConntrackFlow
    handle: bytes
    """Attributes that identify this entry, and no other one that replaces it."""


TcpSide = tuple[str, int]
"""Address and port of one side of a TCP connection."""


class JoinedConnection(NamedTuple):
    """Two TCP connections that a process relayed, as one that the kernel rewrites: addresses, ports, sequence numbers.

    The client keeps its connection to `destination`; the endpoint keeps its connection from `relay`.
    """

    client: TcpSide
    destination: TcpSide
    """Where the client connected to, before any rewriting."""
    relay: TcpSide
    """This side of the connection to the endpoint."""
    endpoint: TcpSide
    towards_endpoint: int
    """What is added to sequence numbers of the client, modulo 2**32."""
    towards_client: int
    """What is added to sequence numbers of the endpoint, modulo 2**32."""


def tcp_handle(source: TcpSide, destination: TcpSide) -> bytes:
    """Return the attributes that identify the entry of a TCP connection by its first packet."""
    return _tuple_attribute(_TUPLE_ORIG, source, destination)


def joined(connection: JoinedConnection) -> bytes:
    """Return the attributes of a new entry for two relayed connections.

    It has no window state, so the kernel must not check windows.
    """
    flags = bytes([_BE_LIBERAL | _WINDOW_SCALE]) * 2
    state = attribute(1, bytes([_ESTABLISHED])) + attribute(4, flags) + attribute(5, flags)
    return (
        _tuple_attribute(_TUPLE_ORIG, connection.client, connection.destination)
        + _tuple_attribute(_TUPLE_REPLY, connection.destination, connection.client)
        + attribute(_STATUS, struct.pack(">I", _SEEN_REPLY | _ASSURED | _CONFIRMED))
        + attribute(_PROTO_INFO | NESTED, attribute(1 | NESTED, state))
        + attribute(_TIMEOUT, struct.pack(">I", _ESTABLISHED_SECONDS))
        + _nat_attribute(_NAT_SOURCE, connection.relay)
        + _nat_attribute(_NAT_DESTINATION, connection.endpoint)
        + _sequence_attribute(_SEQUENCE_ORIG, connection.towards_endpoint)
        + _sequence_attribute(_SEQUENCE_REPLY, connection.towards_client)
    )


def _tuple_attribute(kind: int, source: TcpSide, destination: TcpSide) -> bytes:
    first, second = packed_address(source[0]), packed_address(destination[0])
    at = int(len(first) == 16)
    addresses = attribute(_IP_SOURCE[at], first) + attribute(_IP_DESTINATION[at], second)
    ports = (
        attribute(_PROTO_NUMBER, bytes([Protocol.TCP.number]))
        + attribute(_PROTO_SOURCE_PORT, _PORT.pack(source[1]))
        + attribute(_PROTO_DESTINATION_PORT, _PORT.pack(destination[1]))
    )
    return attribute(kind | NESTED, attribute(_TUPLE_IP | NESTED, addresses) + attribute(_TUPLE_PROTO | NESTED, ports))


def _nat_attribute(kind: int, side: TcpSide) -> bytes:
    """Return CTA_NAT_SRC or CTA_NAT_DST with one address and port: both are ranges, from 1 or 4 to 2 or 5."""
    address, port = packed_address(side[0]), _PORT.pack(side[1])
    first, last = (1, 2) if len(address) == 4 else (4, 5)
    ports = attribute(3 | NESTED, attribute(1, port) + attribute(2, port))
    return attribute(kind | NESTED, attribute(first, address) + attribute(last, address) + ports)


def _sequence_attribute(kind: int, offset: int) -> bytes:
    """Return CTA_SEQ_ADJ_ORIG or _REPLY: the same offset before and after a position."""
    number = struct.pack(">I", offset & 0xFFFFFFFF)
    return attribute(kind | NESTED, attribute(1, bytes(4)) + attribute(2, number) + attribute(3, number))


class _Tuple(NamedTuple):
    source: bytes
    destination: bytes
    source_port: int
    port: int


def narrowed(protocol: Protocol, port: int) -> bytes:
    """Return the filter for entries with this original protocol and port. Kernels before 5.8 ignore it and list all entries."""
    port_filter = attribute(_PROTO_NUMBER, bytes([protocol.number])) + attribute(
        _PROTO_DESTINATION_PORT, _PORT.pack(port)
    )
    by = attribute(_FILTER_ORIG, struct.pack("=I", _BY_PROTOCOL_AND_PORT))
    first = attribute(_TUPLE_ORIG | NESTED, attribute(_TUPLE_PROTO | NESTED, port_filter))
    return first + attribute(_FILTER | NESTED, by)


def entry_count(body: bytes) -> int:
    """Return the number of entries of the namespace, from the attributes of the answer to GET_STATISTICS (Linux 2.6.39)."""
    found = (int.from_bytes(body[start:end]) for kind, start, end in attributes(body) if kind == _GLOBAL_ENTRIES)
    return next(found, 0)


def read(body: bytes, towards: Container[tuple[Protocol, int]]) -> ConntrackEntry | None:
    """Decode an entry from the attributes of one message of a dump.

    Returns None unless the original destination is one of the given protocols and ports. Also returns None for entries that
    Services never create: those of other protocols, and those in a conntrack zone, which belong to other software.
    """
    if _elsewhere(body, towards):
        return None
    attributes = _spans(body, 0, len(body))
    place = attributes.get(_TUPLE_ORIG)
    if place is None or _ZONE in attributes:
        return None
    protocol, first = _tuple(body, *place)
    if protocol is None or first is None or (protocol, first.port) not in towards:
        return None
    answer = _tuple(body, *attributes[_TUPLE_REPLY])[1] if _TUPLE_REPLY in attributes else None
    if answer is None:
        return None
    handle = body[place[0] - 4 : place[1]]
    if _ID in attributes:
        start, end = attributes[_ID]
        handle += body[start - 4 : end]
    flow = ConntrackFlow(
        protocol,
        address_text(first.source),
        first.source_port,
        address_text(first.destination),
        first.port,
        address_text(answer.source),
        answer.source_port,
    )
    return ConntrackEntry(flow, handle)


def _elsewhere(body: bytes, towards: Container[tuple[Protocol, int]]) -> bool:
    """Return True if an entry is certainly for another destination, judged from the fixed layout that kernels use.

    Tables have hundreds of thousands of entries, few of which are relevant.
    """
    if len(body) < _HEAD.size:
        return False
    _, first, length, second = _HEAD.unpack_from(body)
    at = 4 + length
    if (first & _KIND, second & _KIND) != (_TUPLE_ORIG, _TUPLE_IP) or len(body) < at + _PROTO.size:
        return False
    _, proto, _, first, number, _, second, _, _, third, port = _PROTO.unpack_from(body, at)
    if (proto & _KIND, first & _KIND, second & _KIND, third & _KIND) != _PROTO_KINDS:
        return False
    protocol = _PROTOCOLS.get(number)
    return protocol is None or (protocol, _PORT.unpack(port)[0]) not in towards


def _tuple(body: bytes, start: int, end: int) -> tuple[Protocol | None, _Tuple | None]:
    parts = _spans(body, start, end)
    if _TUPLE_ZONE in parts or _TUPLE_IP not in parts or _TUPLE_PROTO not in parts:
        return None, None
    numbers = {kind: body[at:to] for kind, at, to in attributes(body, *parts[_TUPLE_PROTO], strict=False)}
    protocol = _PROTOCOLS.get(int.from_bytes(numbers.get(_PROTO_NUMBER, b"")))
    source_port, port = numbers.get(_PROTO_SOURCE_PORT, b""), numbers.get(_PROTO_DESTINATION_PORT, b"")
    source = destination = b""
    for kind, at, to in attributes(body, *parts[_TUPLE_IP], strict=False):
        if kind in _IP_SOURCE:
            source = body[at:to]
        elif kind in _IP_DESTINATION:
            destination = body[at:to]
    if protocol is None or len(source_port) != 2 or len(port) != 2:
        return None, None
    if len(source) != len(destination) or len(source) not in (4, 16):
        return None, None
    return protocol, _Tuple(source, destination, int.from_bytes(source_port), int.from_bytes(port))


def _spans(body: bytes, start: int, end: int) -> dict[int, tuple[int, int]]:
    """Return start and end of the payload of each attribute."""
    return {kind: (at, to) for kind, at, to in attributes(body, start, end, strict=False)}
