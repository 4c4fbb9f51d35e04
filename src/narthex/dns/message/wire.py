"""Constants of the DNS wire format (RFC 1035 section 4): header layout, flags, response codes, and record types."""

from __future__ import annotations

from struct import Struct

HEADER = Struct(">HHHHHH")
"""ID, flags, and the number of questions, answers, authorities, and additional records."""
QUESTION_TAIL = Struct(">HH")
"""Type and class after the name of a question."""
RECORD_TAIL = Struct(">HHIH")
"""Type, class, TTL, and data length after the owner name of a record."""

QR, AA, TC, RD, RA, AD, CD = 0x8000, 0x0400, 0x0200, 0x0100, 0x0080, 0x0020, 0x0010
OPCODE = 0x7800

RCODES = (
    "NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "YXDOMAIN", "YXRRSET", "NXRRSET", "NOTAUTH",
)  # fmt: skip
"""Names of the response codes 0 to 9."""
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
BADVERS = 16

IN = 1
A, NS, CNAME, SOA, PTR, HINFO, MX, TXT, AAAA, SRV, DNAME, OPT, IXFR, AXFR = (
    1, 2, 5, 6, 12, 13, 15, 16, 28, 33, 39, 41, 251, 252,
)  # fmt: skip
ADDRESS_SIZES = {A: 4, AAAA: 16}
"""Bytes of an address, by record type."""

OTHER = "other"
"""Metric label of types and codes that have no label of their own, so that clients cannot create new time series."""
_TYPE_LABELS = {
    A: "A", NS: "NS", CNAME: "CNAME", SOA: "SOA", PTR: "PTR", MX: "MX", TXT: "TXT", AAAA: "AAAA", SRV: "SRV", 43: "DS",
    48: "DNSKEY", 64: "SVCB", 65: "HTTPS", 255: "ANY", IXFR: "IXFR", AXFR: "AXFR",
}  # fmt: skip


def rcode_label(rcode: int) -> str:
    """Return the name of a response code as metrics and logs show it."""
    return RCODES[rcode] if rcode <= REFUSED else "BADVERS" if rcode == BADVERS else OTHER


def type_label(qtype: int) -> str:
    """Return the name of a record type as metrics show it."""
    return _TYPE_LABELS.get(qtype, OTHER)
