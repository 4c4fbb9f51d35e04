"""Responses of other servers: read with suspicion once, then given to clients many times.

A response is kept as the bytes that came. What differs between two clients is patched: id, the question's case, flags,
times to live, the order of addresses, and an OPT record of our own for those who sent one. The sender's own OPT record,
which is between it and us, is cut off with all behind it (RFC 6891 6.1.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from struct import Struct
from typing import Literal

import msgspec

from narthex.dns.interfaces import Query
from narthex.dns.message import wire
from narthex.dns.message.names import LONGEST, LONGEST_LABEL

Kind = Literal["success", "nodata", "nxdomain", "servfail", "other"]
Shuffle = Callable[[list[bytes]], None]
"""Puts a list into a random order."""

AD = 0x0020
ADVERTISED = 1232
"""The UDP size we say we take: what passes everywhere without fragments (DNS flag day 2020)."""
DEFAULT_TTL = 5
"""Of responses without any record."""
LONGEST_TTL = 3600

_TTL = Struct(">I")
_MOST_JUMPS = 32
_POINTER = 0xC0
_DATA_BEFORE_NAME = {wire.CNAME: 0, wire.NS: 0, wire.PTR: 0, wire.SOA: 0, 15: 2, wire.SRV: 6, 39: 0}
"""Bytes in front of the name in the data of types whose names may be compressed (MX is 15, DNAME 39)."""
_FIXED = {wire.A: 4, wire.AAAA: 16}


class Malformed(ValueError):
    """Bytes that are no response."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A response that has been read."""

    packet: bytes
    """Without an OPT record; its id means nothing."""
    flags: int
    rcode: int
    """With the upper bits of the OPT record, if it had one."""
    kind: Kind
    truncated: bool
    question_end: int
    ttl: int
    """The least of all records, and of a denial also the SOA's minimum; `DEFAULT_TTL` without records."""
    ttls: tuple[int, ...]
    """Offsets of the records' times to live."""
    owners: tuple[int, ...]
    """Offsets of uncompressed owner names that are the question's name."""
    addresses: tuple[tuple[int, tuple[int, ...]], ...]
    """Where addresses of one name and type stand that may change places: their size and offsets."""

    @property
    def question(self) -> bytes:
        """The question section: name, type, class."""
        return self.packet[wire.HEADER.size : self.question_end]

    def to(self, query: Query, ttl: int | None = None, shuffle: Shuffle | None = None) -> bytes:
        """The message for a client that asked the same, whatever the case. `ttl` for all records; None: as they are."""
        message = bytearray(self.packet)
        flags = self.flags & ~(wire.RD | wire.CD) | query.flags & (wire.RD | wire.CD)
        if not (query.flags & AD or dnssec_ok(query)):
            flags &= ~AD
        message[0:4] = query.id.to_bytes(2, "big") + flags.to_bytes(2, "big")
        end = len(query.qname)
        message[wire.HEADER.size : wire.HEADER.size + end] = query.qname
        for at in self.owners:
            message[at : at + end] = query.qname
        if ttl is not None:
            for at in self.ttls:
                _TTL.pack_into(message, at, ttl)
        if shuffle is not None:
            for size, places in self.addresses:
                values = [self.packet[at : at + size] for at in places]
                shuffle(values)
                for at, value in zip(places, values, strict=True):
                    message[at : at + size] = value
        if query.edns_size is not None:
            count = int.from_bytes(message[10:12], "big") + 1
            message[10:12] = count.to_bytes(2, "big")
            message += options(self.rcode >> 4, dnssec_ok(query))
        return bytes(message)


def read(packet: bytes) -> Answer:
    """Read a response. Raises Malformed for everything that a client might stumble over: records that run out of the
    message, names that go in circles or are too long, anything but one question."""
    if len(packet) < wire.HEADER.size:
        raise Malformed("is shorter than a header")
    _, flags, questions, *counts = wire.HEADER.unpack_from(packet)
    if not flags & wire.QR or flags & wire.OPCODE:
        raise Malformed("is no response to a question")
    if questions != 1:
        raise Malformed(f"has {questions} questions")
    names = _Names(packet)
    at, qname = names.read(wire.HEADER.size)
    if at != wire.HEADER.size + len(qname) or at + wire.QUESTION_TAIL.size > len(packet):
        raise Malformed("has a question that is none")
    reading = _Reading(packet, names, qname.lower())
    question_end = at = at + wire.QUESTION_TAIL.size
    for section, count in enumerate(counts):
        for _ in range(count):
            at = reading.record(at, section)
    return reading.answer(flags, question_end, at, counts)


def dnssec_ok(query: Query) -> bool:
    """The DO bit of a question's OPT record (RFC 3225)."""
    if query.edns_size is None:
        return False
    packet, at = query.packet, query.question_end
    if packet[at : at + 3] == b"\0\0\x29":  # nearly always it is the first record, and the only one
        return bool(packet[at + 7] & 0x80)
    names = _Names(packet)
    while at < len(packet):
        try:
            at, _ = names.read(at)
        except Malformed:
            # Nobody has followed the pointers in a client's message so far.
            return False
        type_, _, ttl, length = wire.RECORD_TAIL.unpack_from(packet, at)
        if type_ == wire.OPT:
            return bool(ttl & 0x8000)
        at += wire.RECORD_TAIL.size + length
    return False


def options(extended: int, dnssec: bool, size: int = ADVERTISED) -> bytes:
    """An OPT record. `extended`: the upper eight bits of the response code."""
    return b"\0" + wire.RECORD_TAIL.pack(wire.OPT, size, extended << 24 | (0x8000 if dnssec else 0), 0)


def made(
    query: Query,
    rcode: int,
    records: Iterable[tuple[int, int, bytes]] = (),
    *,
    authoritative: bool = False,
    recursion: bool = True,
) -> bytes:
    """A response of our own. `records`: type, TTL and data of answers at the question's name."""
    flags = wire.QR | query.flags & (wire.RD | wire.CD) | rcode & 15
    flags |= (wire.AA if authoritative else 0) | (wire.RA if recursion else 0)
    body = b""
    count = 0
    for type_, ttl, data in records:
        body += b"\xc0\x0c" + wire.RECORD_TAIL.pack(type_, wire.IN, ttl, len(data)) + data
        count += 1
    extra = b"" if query.edns_size is None else options(rcode >> 4, dnssec_ok(query))
    header = wire.HEADER.pack(query.id, flags, 1, count, 0, bool(extra))
    return header + query.packet[wire.HEADER.size : query.question_end] + body + extra


class _Names:
    """Reads names of one message, each place once."""

    def __init__(self, packet: bytes) -> None:
        self._packet = packet
        self._known: dict[int, bytes] = {}

    def read(self, at: int) -> tuple[int, bytes]:
        """Where a name ends, and its whole wire form. Pointers must lead back, at most so many in a row."""
        packet, known = self._packet, self._known
        start, end, found = at, 0, b""
        for _ in range(_MOST_JUMPS):
            labels, behind = self._labels(at)
            found += packet[at:labels]
            if len(found) > LONGEST:
                raise Malformed("has a name that is too long")
            if packet[labels] < _POINTER:
                end = end or behind
                found += b"\0"
                break
            end = end or behind
            target = int.from_bytes(packet[labels:behind], "big") & 0x3FFF
            if target >= at:
                raise Malformed("has a name that does not lead back")
            if target in known:
                found += known[target]
                break
            at = target
        else:
            raise Malformed("has a name of too many pointers")
        if len(found) > LONGEST:
            raise Malformed("has a name that is too long")
        known[start] = found
        return end, found

    def _labels(self, at: int) -> tuple[int, int]:
        """Where a row of labels ends, and where what ends it does."""
        packet, start = self._packet, at
        try:
            while True:
                length = packet[at]
                if length == 0:
                    return at, at + 1
                if length >= _POINTER:
                    packet[at + 1]  # it must be there
                    return at, at + 2
                if length > LONGEST_LABEL:
                    raise Malformed("has a label of an unknown kind")
                at += 1 + length
                if at - start > LONGEST:
                    raise Malformed("has a name that is too long")
        except IndexError:
            raise Malformed("ends within a name") from None


class _Reading:
    """What is gathered on the way through a message's records."""

    def __init__(self, packet: bytes, names: _Names, name: bytes) -> None:
        self._packet = packet
        self._names = names
        self._name = name
        self._ttls: list[int] = []
        self._owners: list[int] = []
        self._addresses: dict[tuple[bytes, int], list[int]] = {}
        self._least = LONGEST_TTL
        self._minimum: int | None = None
        self._delegates = False
        self._extended = 0
        self._cut: tuple[int, int] | None = None
        """Where the OPT record begins, and how many additional records are before it."""
        self._additional = 0

    def record(self, at: int, section: int) -> int:
        """Read one record; where it ends."""
        packet, start = self._packet, at
        at, owner = self._names.read(at)
        if at + wire.RECORD_TAIL.size > len(packet):
            raise Malformed("ends within a record")
        type_, _, ttl, length = wire.RECORD_TAIL.unpack_from(packet, at)
        data = at + wire.RECORD_TAIL.size
        end: int = data + length
        if end > len(packet):
            raise Malformed("ends within a record's data")
        if section == 2 and self._cut is not None:
            return end
        if type_ == wire.OPT:
            if section != 2:
                raise Malformed("has an OPT record among its answers")
            self._cut = start, self._additional
            self._extended = ttl >> 24
            return end
        self._additional += section == 2
        self._check(type_, data, end)
        self._ttls.append(at + 4)
        # RFC 2181 8: what has the first bit set counts as 0.
        self._least = min(self._least, 0 if ttl >> 31 else ttl)
        if at - start == len(owner) and owner.lower() == self._name:
            self._owners.append(start)
        if section == 0 and type_ in _FIXED:
            self._addresses.setdefault((owner.lower(), type_), []).append(data)
        if section == 1 and type_ == wire.SOA:
            self._minimum = int.from_bytes(packet[end - 4 : end], "big")
        self._delegates = self._delegates or (section == 1 and type_ == wire.NS)
        return end

    def _check(self, type_: int, data: int, end: int) -> None:
        """Names in data must be whole, and addresses of the right size."""
        if type_ in _FIXED and end - data != _FIXED[type_]:
            raise Malformed("has an address of a wrong size")
        before = _DATA_BEFORE_NAME.get(type_)
        if before is None:
            return
        at, _ = self._names.read(data + before)
        if type_ == wire.SOA:
            at = self._names.read(at)[0] + 20
        if at != end:
            raise Malformed("has a record whose data is of a wrong size")

    def answer(self, flags: int, question_end: int, end: int, counts: list[int]) -> Answer:
        """The whole."""
        packet = self._packet[:end]
        if self._cut is not None:
            at, before = self._cut
            packet = packet[:10] + before.to_bytes(2, "big") + packet[12:at]
        rcode = self._extended << 4 | flags & 15
        kind = self._kind(rcode, counts[0])
        least = self._least if self._ttls else DEFAULT_TTL
        if kind in ("nodata", "nxdomain") and self._minimum is not None:
            least = min(least, self._minimum)
        return Answer(
            packet=packet,
            flags=flags,
            rcode=rcode,
            kind=kind,
            truncated=bool(flags & wire.TC),
            question_end=question_end,
            ttl=least,
            ttls=tuple(self._ttls),
            owners=tuple(self._owners),
            addresses=tuple(
                (_FIXED[type_], tuple(places)) for (_, type_), places in self._addresses.items() if len(places) > 1
            ),
        )

    def _kind(self, rcode: int, answers: int) -> Kind:
        """Without an SOA nothing says how long something does not exist, so such a denial is not one (RFC 2308 5)."""
        if rcode == wire.SERVFAIL:
            return "servfail"
        if rcode == wire.NXDOMAIN:
            return "other" if self._minimum is None else "nxdomain"
        if rcode != wire.NOERROR:
            return "other"
        if answers or self._delegates:
            return "success"
        return "other" if self._minimum is None else "nodata"
