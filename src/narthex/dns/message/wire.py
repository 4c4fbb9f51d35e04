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
    "NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "YXDOMAIN", "YXRRSET", "NXRRSET", "NOTAUTH", "NOTZONE",
)  # fmt: skip
"""Names of the response codes 0 to 10."""
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

_TYPES = {
    "A": 1, "NS": 2, "MD": 3, "MF": 4, "CNAME": 5, "SOA": 6, "NULL": 10, "PTR": 12, "HINFO": 13, "MX": 15, "TXT": 16,
    "RP": 17, "AFSDB": 18, "SIG": 24, "KEY": 25, "AAAA": 28, "LOC": 29, "SRV": 33, "NAPTR": 35, "CERT": 37, "DNAME": 39,
    "OPT": 41, "DS": 43, "SSHFP": 44, "RRSIG": 46, "NSEC": 47, "DNSKEY": 48, "NSEC3": 50, "NSEC3PARAM": 51, "TLSA": 52,
    "SMIMEA": 53, "CDS": 59, "CDNSKEY": 60, "OPENPGPKEY": 61, "CSYNC": 62, "ZONEMD": 63, "SVCB": 64, "HTTPS": 65,
    "SPF": 99, "EUI48": 108, "EUI64": 109, "TKEY": 249, "TSIG": 250, "IXFR": 251, "AXFR": 252, "ANY": 255, "URI": 256,
    "CAA": 257,
}  # fmt: skip
_CLASSES = {"IN": 1, "CH": 3, "HS": 4, "NONE": 254, "ANY": 255}
CH, ANY = 3, 255


def type_number(name: str) -> int | None:
    """Return the number of a type by its name in capitals, or `TYPE` and the number; None if it is unknown."""
    if name.startswith("TYPE") and name[4:].isdecimal() and name.isascii() and len(name) < 10:
        return int(name[4:]) if int(name[4:]) < 1 << 16 else None
    return _TYPES.get(name)


def type_name(number: int) -> str:
    """Return the name of a type, or `TYPE` and the number."""
    return _TYPE_NAMES.get(number, f"TYPE{number}")


_TYPE_NAMES = {number: name for name, number in _TYPES.items()}


def class_number(name: str) -> int | None:
    """Return the number of a class by its name in capitals; None if it is unknown."""
    return _CLASSES.get(name)


def class_name(number: int) -> str:
    """Return the name of a class, or `CLASS` and the number."""
    return next((name for name, code in _CLASSES.items() if code == number), f"CLASS{number}")


def rcode_number(word: str) -> int | None:
    """Return a response code below 16 by its name or number; None if it is unknown."""
    if word.isdecimal() and word.isascii() and len(word) < 3:
        return int(word) if int(word) < 16 else None
    return RCODES.index(word.upper()) if word.upper() in RCODES else None


def rcode_label(rcode: int) -> str:
    """Return the name of a response code as metrics and logs show it."""
    return RCODES[rcode] if rcode <= REFUSED else "BADVERS" if rcode == BADVERS else OTHER


def type_label(qtype: int) -> str:
    """Return the name of a record type as metrics show it."""
    return _TYPE_LABELS.get(qtype, OTHER)
