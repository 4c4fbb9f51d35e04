"""Questions as they go to other servers: made anew from the client's, so that nothing of the client goes along but what
it asks; and the check that an answer belongs to one (RFC 5452 9.1)."""

from __future__ import annotations

from typing import Literal

import msgspec

from narthex.dns.interfaces import Query
from narthex.dns.message import names, wire
from narthex.dns.message.response import AD, ADVERTISED, dnssec_ok, options

_LEAST_SIZE = 512
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz")


class Question(msgspec.Struct, frozen=True):
    """What is asked. Equal questions have equal answers, so they go out once for all who wait."""

    name: bytes
    """In wire form, lower case."""
    qtype: int
    qclass: int
    flags: int
    """RD, CD and AD as the client set them."""
    size: int | None = None
    """The UDP size to advertise; None: no OPT record goes along. A client's other EDNS options stay here."""
    dnssec: bool = False

    def packet(self, id_: int, name: bytes) -> bytes:
        """The message. `name`: the question's name, its letters in whatever case."""
        extra = b"" if self.size is None else options(0, self.dnssec, self.size)
        header = wire.HEADER.pack(id_, self.flags, 1, 0, 0, bool(extra))
        return header + name + wire.QUESTION_TAIL.pack(self.qtype, self.qclass) + extra


def of(query: Query) -> Question:
    """The question to ask for a client."""
    size = None if query.edns_size is None else min(max(query.edns_size, _LEAST_SIZE), ADVERTISED)
    flags = query.flags & (wire.RD | wire.CD | AD)
    return Question(query.name, query.qtype, query.qclass, flags, size, dnssec_ok(query))


def check(domain: bytes, recursion: bool = True) -> Question:
    """The question that tells whether a server is there: the name servers of a domain."""
    return Question(domain, wire.NS, wire.IN, wire.RD if recursion else 0)


def mixed(name: bytes, bits: int) -> bytes:
    """The name with each letter in upper case where a bit of `bits` is set, so that who answers must have seen it
    (draft-vixie-dnsext-dns0x20)."""
    found = bytearray(name)
    for at, byte in enumerate(found):
        if byte in _LETTERS:
            if bits & 1:
                found[at] = byte - 32
            bits >>= 1
    return bytes(found)


def letters(name: bytes) -> int:
    """How many bits `mixed` takes."""
    return sum(byte in _LETTERS for label in names.labels(name) for byte in label)


def belongs(packet: bytes, sent: bytes) -> Literal["yes", "case", "bare", "no"]:
    """Whether a response's id and question are those of the message sent; "case": but for the letters' case; "bare": it
    is a header with a response code and no question, from a server that did not understand ours."""
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
