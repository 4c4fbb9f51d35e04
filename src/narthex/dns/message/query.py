"""Queries: parsing those of clients, building those to upstreams, and matching responses to them.

`parse_query` decides first whether a packet is a query at all:

* A response, or less than a header, gets no response, which could start a loop.
* An opcode other than QUERY gets NOTIMP (RFC 1035 section 4.1.1).
* Any number of questions but one, a compressed or unterminated question name, a broken record after the question, two OPT
  records (RFC 6891 section 6.1.1), or trailing bytes get FORMERR.

Error responses consist of the 12 header bytes only, so that they never amplify.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from narthex.dns.message import wire
from narthex.dns.message.names import MAX_LABEL, MAX_NAME

Transport = Literal["udp", "tcp"]

MAX_UDP_SIZE = 4096
"""Longest response over UDP, whatever size a client advertises; bounds the amplification of forged queries."""
EDNS_SIZE = 1232
"""UDP size that is advertised to upstreams: fits every path without fragmentation (DNS flag day 2020)."""
_MIN_UDP_SIZE = 512
_MAX_RECORDS = 16
"""Limit of records after the question: legitimate queries carry an OPT record, a signature, and the SOA of an IXFR."""
_DO = 0x8000
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz")


class Query(msgspec.Struct, frozen=True, gc=False):
    """A parsed query of a client."""

    packet: bytes
    """The whole message as received."""
    id: int
    name: bytes
    """Question name in wire form (with the root's zero byte), in lower case."""
    qname: bytes
    """Question name as the client wrote it; responses repeat its case."""
    qtype: int
    qclass: int
    flags: int
    """Second 16 bits of the header."""
    edns_size: int | None
    """UDP size that the client advertises; None without an OPT record."""
    edns_version: int
    """0 without an OPT record."""
    question_end: int
    """Offset after the question: `packet[12:question_end]` is the question section."""
    dnssec_ok: bool = False
    """DO bit of the OPT record (RFC 3225)."""


class DnsClient(msgspec.Struct, frozen=True):
    """Sender of a query."""

    address: str
    """IPv4 or IPv6 address without port and zone index; an IPv4 address is never IPv6-mapped."""
    transport: Transport = "udp"
    port: int = 0
    lookups: int = 0
    """Number of queries of this server for other names that the client's query has caused."""


def max_response_size(query: Query, transport: Transport) -> int:
    """Return the size limit of the response in bytes (row S3)."""
    if transport == "tcp":
        return 65_535
    return _MIN_UDP_SIZE if query.edns_size is None else min(max(_MIN_UDP_SIZE, query.edns_size), MAX_UDP_SIZE)


def parse_query(packet: bytes) -> Query | int | None:
    """Parse a message. Return the response code of an error, or None for a packet that gets no response. Never raises."""
    if len(packet) < wire.HEADER.size:
        return None
    id_, flags, questions, answers, authorities, additional = wire.HEADER.unpack_from(packet)
    if flags & wire.QR:
        return None
    if flags & wire.OPCODE:
        return wire.NOTIMP
    if questions != 1 or answers or authorities + additional > _MAX_RECORDS:
        return wire.FORMERR
    end = _name_end(packet, wire.HEADER.size)
    if end == 0 or end + wire.QUESTION_TAIL.size > len(packet):
        return wire.FORMERR
    qtype, qclass = wire.QUESTION_TAIL.unpack_from(packet, end)
    edns_size: int | None = None
    version = edns_flags = 0
    at = question_end = end + wire.QUESTION_TAIL.size
    if authorities or additional:
        found = _parse_edns(packet, at, authorities, additional)
        if found is None:
            return wire.FORMERR
        at, edns_size, version, edns_flags = found
    if at != len(packet):
        return wire.FORMERR
    qname = packet[wire.HEADER.size : end]
    dnssec_ok = bool(edns_flags & _DO)
    return Query(packet, id_, qname.lower(), qname, qtype, qclass, flags, edns_size, version, question_end, dnssec_ok)


def _name_end(packet: bytes, at: int) -> int:
    """Return the offset after an uncompressed name, or 0. Label lengths are below "A", so `lower` keeps them."""
    end = min(len(packet), at + MAX_NAME)
    while at < end:
        length = packet[at]
        at += 1 + length
        if length == 0:
            return at
        if length > MAX_LABEL:
            return 0
    return 0


def _parse_edns(packet: bytes, at: int, authorities: int, additional: int) -> tuple[int, int | None, int, int] | None:
    """Return the end of the records after the question, and UDP size, version, and flags of the OPT record."""
    size: int | None = None
    version = flags = 0
    compressed = False
    for index in range(authorities + additional):
        root = packet[at : at + 1] == b"\0"
        at = _skip_name(packet, at)
        if at == 0 or at + wire.RECORD_TAIL.size > len(packet):
            return None
        compressed = compressed or packet[at - 1] != 0
        type_, class_, ttl, length = wire.RECORD_TAIL.unpack_from(packet, at)
        at += wire.RECORD_TAIL.size + length
        if at > len(packet):
            return None
        if type_ == wire.OPT:
            if size is not None or not root or index < authorities:
                return None
            # Compression pointers are not verified, so the flags of an OPT record after one are not trusted.
            size, version, flags = class_, ttl >> 16 & 0xFF, 0 if compressed else ttl & 0xFFFF
    return at, size, version, flags


def _skip_name(packet: bytes, at: int) -> int:
    """Return the offset after a name that may end in a compression pointer, which is not followed, or 0."""
    start, end = at, len(packet)
    while at < end and at - start < MAX_NAME:
        length = packet[at]
        if length & 0xC0 == 0xC0:
            return at + 2
        at += 1 + length
        if length == 0:
            return at
        if length > MAX_LABEL:
            return 0
    return 0


def opt_record(extended_rcode: int, dnssec_ok: bool, size: int = EDNS_SIZE) -> bytes:
    """Return an OPT record. `extended_rcode` is the upper eight bits of the response code."""
    return b"\0" + wire.RECORD_TAIL.pack(wire.OPT, size, extended_rcode << 24 | (_DO if dnssec_ok else 0), 0)


class UpstreamQuery(msgspec.Struct, frozen=True):
    """A query to an upstream, built anew so that nothing of the client's packet leaks.

    Equal queries have equal responses: of those in flight, only one is sent.
    """

    name: bytes
    """Wire form, lower case."""
    qtype: int
    qclass: int
    flags: int
    """RD, CD, and AD as the client set them."""
    size: int | None = None
    """UDP size to advertise; None sends no OPT record. Other EDNS options of the client are not forwarded."""
    dnssec: bool = False

    def packet(self, id_: int, name: bytes) -> bytes:
        """Return the message. `name` is the question name with its letters in any case."""
        extra = b"" if self.size is None else opt_record(0, self.dnssec, self.size)
        header = wire.HEADER.pack(id_, self.flags, 1, 0, 0, bool(extra))
        return header + name + wire.QUESTION_TAIL.pack(self.qtype, self.qclass) + extra


def upstream_query(query: Query) -> UpstreamQuery:
    """Return the query to send to an upstream on behalf of a client."""
    size = None if query.edns_size is None else min(max(query.edns_size, _MIN_UDP_SIZE), EDNS_SIZE)
    flags = query.flags & (wire.RD | wire.CD | wire.AD)
    return UpstreamQuery(query.name, query.qtype, query.qclass, flags, size, query.dnssec_ok)


def health_check_query(domain: bytes, recursion: bool = True) -> UpstreamQuery:
    """Return the query of a health check: the NS records of a domain."""
    return UpstreamQuery(domain, wire.NS, wire.IN, wire.RD if recursion else 0)


def randomize_case(name: bytes, bits: int) -> bytes:
    """Return the name with each letter in upper case whose bit in `bits` is set (draft-vixie-dnsext-dns0x20)."""
    mixed = bytearray(name)
    for at, byte in enumerate(mixed):
        if byte in _LETTERS:
            if bits & 1:
                mixed[at] = byte - 32
            bits >>= 1
    return bytes(mixed)


def count_letters(name: bytes) -> int:
    """Return how many bits `randomize_case` consumes for a name in lower case."""
    # Label lengths are below "a".
    return sum(byte in _LETTERS for byte in name)


def match_response(packet: bytes, sent: bytes) -> Literal["yes", "case", "bare", "no"]:
    """Compare ID and question of a response with the query that was sent (RFC 5452 section 9.1).

    "case" means that only the case of letters differs, and "bare" an error response without a question, which servers send
    that do not understand the query.
    """
    if len(packet) == wire.HEADER.size and packet[:2] == sent[:2] and packet[4:] == bytes(8):
        return "bare" if packet[2] & 0x80 and packet[3] & 0xF else "no"
    end = wire.HEADER.size
    while end < len(sent) and sent[end]:
        end += 1 + sent[end]
    end += 1 + wire.QUESTION_TAIL.size
    if packet[:2] != sent[:2] or packet[4:6] != b"\0\1" or len(packet) < end:
        return "no"
    theirs, ours = packet[wire.HEADER.size : end], sent[wire.HEADER.size : end]
    if theirs == ours:
        return "yes"
    if theirs[-4:] != ours[-4:] or theirs[:-4].lower() != ours[:-4].lower():
        return "no"
    return "case"
