"""Questions out of packets. What is no question is told apart here, before anything else looks at it.

* A response, or less than a header: silence (answering it could start a loop).
* Another opcode than QUERY: NOTIMP (RFC 1035 4.1.1). Several questions or none, a compressed or endless name in the
  question, a broken record behind it, two OPT records (RFC 6891 6.1.1), bytes behind the message: FORMERR.

Refusals are a header of 12 bytes, so nobody gets more than was sent.
"""

from __future__ import annotations

from struct import Struct

from narthex.dns.interfaces import Query
from narthex.dns.message.names import LONGEST, LONGEST_LABEL

HEADER = Struct(">HHHHHH")
"""Id, flags, and the counts of questions, answers, authorities and additional records."""
QUESTION_TAIL = Struct(">HH")
RECORD_TAIL = Struct(">HHIH")
"""Type, class, TTL and length of a record's data, behind its name."""

QR, AA, TC, RD, RA, CD = 0x8000, 0x0400, 0x0200, 0x0100, 0x0080, 0x0010
OPCODE = 0x7800

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
BADVERS = 16

IN = 1
A, NS, CNAME, SOA, PTR, TXT, AAAA, SRV, OPT, IXFR, AXFR = 1, 2, 5, 6, 12, 16, 28, 33, 41, 251, 252

_MOST_RECORDS = 16
"""Behind a question stand an OPT record, maybe a signature and an IXFR's SOA; nobody honest sends more."""


def read(packet: bytes) -> Query | int | None:
    """The question of a message, or the code to refuse it with, or None for silence. Never raises."""
    if len(packet) < HEADER.size:
        return None
    id_, flags, questions, answers, authorities, additional = HEADER.unpack_from(packet)
    if flags & QR:
        return None
    if flags & OPCODE:
        return NOTIMP
    if questions != 1 or answers or authorities + additional > _MOST_RECORDS:
        return FORMERR
    end = _name_end(packet, HEADER.size)
    if end == 0 or end + QUESTION_TAIL.size > len(packet):
        return FORMERR
    qtype, qclass = QUESTION_TAIL.unpack_from(packet, end)
    edns_size: int | None = None
    version = 0
    at = question_end = end + QUESTION_TAIL.size
    if authorities or additional:
        found = _options(packet, at, authorities, additional)
        if found is None:
            return FORMERR
        at, edns_size, version = found
    if at != len(packet):
        return FORMERR
    qname = packet[HEADER.size : end]
    return Query(packet, id_, qname.lower(), qname, qtype, qclass, flags, edns_size, version, question_end)


def refusal(packet: bytes, code: int) -> bytes:
    """A response of nothing but a header, for a packet that is at least a header."""
    id_, flags = HEADER.unpack_from(packet)[:2]
    return HEADER.pack(id_, QR | flags & (OPCODE | RD) | code, 0, 0, 0, 0)


def _name_end(packet: bytes, at: int) -> int:
    """Behind an uncompressed name; 0 when there is none. Lengths are below "A", so `lower` leaves them alone."""
    end = min(len(packet), at + LONGEST)
    while at < end:
        length = packet[at]
        at += 1 + length
        if length == 0:
            return at
        if length > LONGEST_LABEL:
            return 0
    return 0


def _options(packet: bytes, at: int, authorities: int, additional: int) -> tuple[int, int | None, int] | None:
    """The end of the records behind a question, and of an OPT record the UDP size and the version."""
    size: int | None = None
    version = 0
    for index in range(authorities + additional):
        root = packet[at : at + 1] == b"\0"
        at = _skip_name(packet, at)
        if at == 0 or at + RECORD_TAIL.size > len(packet):
            return None
        type_, class_, ttl, length = RECORD_TAIL.unpack_from(packet, at)
        at += RECORD_TAIL.size + length
        if at > len(packet):
            return None
        if type_ == OPT:
            if size is not None or not root or index < authorities:
                return None
            size, version = class_, ttl >> 16 & 0xFF
    return at, size, version


def _skip_name(packet: bytes, at: int) -> int:
    """Behind a name that may end in a pointer, which is not followed; 0 when there is none."""
    start, end = at, len(packet)
    while at < end and at - start < LONGEST:
        length = packet[at]
        if length & 0xC0 == 0xC0:
            return at + 2
        at += 1 + length
        if length == 0:
            return at
        if length > LONGEST_LABEL:
            return 0
    return 0
