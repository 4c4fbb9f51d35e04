"""Responses: building our own within the size limit of the client, and reading those of upstreams.

Responses built from sections (`build_response`) lack the ID: the same bytes serve every client that sends the same query.
Owner names are compression pointers into the question, so they keep the client's spelling (row S2).

A response of an upstream is validated once and kept as received (`UpstreamResponse`). What differs between two clients is
patched: ID, case of the question, flags, TTLs, order of addresses, and an OPT record of our own. The upstream's OPT record,
which is hop-by-hop (RFC 6891 section 6.1.1), is removed with everything after it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from narthex.dns.message import wire
from narthex.dns.message.names import MAX_LABEL, MAX_NAME
from narthex.dns.message.query import MAX_UDP_SIZE, Query, opt_record

ResponseKind = Literal["success", "nodata", "nxdomain", "servfail", "other"]
Shuffle = Callable[[list[bytes]], None]
"""Puts a list in random order."""

AT_QUESTION = b"\xc0\x0c"
"""Compression pointer to the question name."""
DEFAULT_TTL = 5
"""TTL in seconds of an upstream's response without records."""
MAX_TTL = 3600
MAX_NEGATIVE_TTL = 300
"""Limit of the TTL of an SOA record in a negative response, in seconds."""

_TTL = struct.Struct(">I")
_POINTER = struct.Struct(">H")
_MAX_POINTER_TARGET = 0x3FFF
_HEADER_AFTER_ID = struct.Struct(">HHHHH")
SOA_NUMBERS = struct.Struct(">IIIII")
_MAX_POINTERS = 32
_MAX_ANSWERS = 256
BYTES_BEFORE_NAME = {wire.CNAME: 0, wire.NS: 0, wire.PTR: 0, wire.SOA: 0, wire.MX: 2, wire.SRV: 6, wire.DNAME: 0}
"""Bytes before the name in the data of record types whose names may be compressed."""


class AnswerRotation:
    """A response whose address records start with the next one each time (plugin `loadbalance`, row S8)."""

    __slots__ = ("_after", "_at", "_before", "_doubled", "_kept", "_round", "_step")

    def __init__(self, before: bytes, records: Sequence[bytes], kept: int, after: bytes) -> None:
        """Create the rotation of records of equal length, of which the first `kept` fit into the response."""
        block = b"".join(records)
        self._before, self._after = before, after
        self._doubled = block + block
        self._step = len(records[0])
        self._kept = kept * self._step
        self._round = len(block)
        self._at = 0

    def turned(self, number: int) -> bytes:
        """Return the response after its ID, with a rotation by any number: for one that is built for one client only."""
        self._at = number * self._step % self._round
        return self.next()

    def next(self) -> bytes:
        """Return the response after its ID, with the next rotation."""
        at = self._at
        self._at = (at + self._step) % self._round
        return self._before + self._doubled[at : at + self._kept] + self._after


class EncodedResponse(msgspec.Struct, frozen=True):
    """A response without its ID."""

    tail: bytes
    rcode: int
    rotation: AnswerRotation | None = None
    """Set if each response has an order of its own; `tail` is the first one."""


class Sections(msgspec.Struct, frozen=True):
    """Encoded records of a response."""

    answers: Sequence[bytes] = ()
    authorities: Sequence[bytes] = ()
    additional: Sequence[bytes] = ()
    rotating: Sequence[bytes] = ()
    """Last part of the answer section: addresses of one name, whose order may change."""


_NO_RECORDS = Sections()


def pointer(offset: int) -> bytes:
    """Return a compression pointer to an offset of at most 16,383."""
    return _POINTER.pack(0xC000 | offset)


def owner_name(offset: int, name: bytes) -> bytes:
    """Return a compression pointer to an earlier occurrence of a name, or the name if the offset is too large."""
    return pointer(offset) if offset <= _MAX_POINTER_TARGET else name


def record(name: bytes, type_: int, ttl: int, data: bytes) -> bytes:
    """Encode a record of class IN."""
    return name + wire.RECORD_TAIL.pack(type_, wire.IN, ttl, len(data)) + data


def soa_record(at_zone: bytes, server: bytes, contact: bytes, serial: int, ttl: int, *, negative: bool) -> bytes:
    """Encode the SOA record of a zone (row D29). `ttl` is also the negative TTL; `negative` bounds the record's own."""
    data = server + contact + SOA_NUMBERS.pack(serial & 0xFFFFFFFF, 7200, 1800, 86_400, ttl)
    return record(at_zone, wire.SOA, min(ttl, MAX_NEGATIVE_TTL) if negative else ttl, data)


def build_response(
    query: Query, rcode: int, limit: int, sections: Sections = _NO_RECORDS, *, authoritative: bool = False
) -> EncodedResponse:
    """Build a response of at most `limit` bytes, ID included.

    Additional records that do not fit are left out; if others do not fit, TC is set (row S3, RFC 2181 section 9).
    """
    question = query.packet[wire.HEADER.size : query.question_end]
    extra = b"" if query.edns_size is None else opt_record(rcode >> 4, False, MAX_UDP_SIZE)
    room = limit - wire.HEADER.size - len(question) - len(extra)
    answers, room, cut = _fitting((*sections.answers, *sections.rotating), room)
    authorities, room, cut = ((), room, True) if cut else _fitting(sections.authorities, room)
    additional = () if cut else _fitting(sections.additional, room)[0]
    flags = wire.QR | query.flags & (wire.RD | wire.CD) | rcode & 0xF
    flags |= (wire.AA if authoritative else 0) | (wire.TC if cut else 0)
    counts = len(answers), len(authorities), len(additional) + bool(extra)
    head = _HEADER_AFTER_ID.pack(flags, 1, *counts) + question
    after = b"".join((*authorities, *additional, extra))
    tail = head + b"".join(answers) + after
    fixed = len(sections.answers)
    rotating = len(answers) - fixed
    if rotating < 1 or len(sections.rotating) < 2:
        return EncodedResponse(tail, rcode)
    rotation = AnswerRotation(head + b"".join(answers[:fixed]), sections.rotating, rotating, after)
    return EncodedResponse(tail, rcode, rotation)


def negative_response(query: Query, rcode: int, soa: bytes, limit: int) -> EncodedResponse:
    """Build a NODATA (`rcode` NOERROR) or NXDOMAIN response with the SOA record of the zone (RFC 2308)."""
    return build_response(query, rcode, limit, Sections(authorities=(soa,)), authoritative=True)


def header_response(packet: bytes, rcode: int) -> bytes:
    """Build an error response without a question, for a packet of at least a header."""
    id_, flags = wire.HEADER.unpack_from(packet)[:2]
    return wire.HEADER.pack(id_, wire.QR | flags & (wire.OPCODE | wire.RD) | rcode, 0, 0, 0, 0)


def truncate(message: bytes, query: Query, limit: int) -> bytes:
    """Return a whole message unchanged if the client takes its size, otherwise only its question, with TC set."""
    if len(message) <= limit:
        return message
    id_, flags = wire.HEADER.unpack_from(message)[:2]
    return wire.HEADER.pack(id_, flags | wire.TC, 1, 0, 0, 0) + query.packet[wire.HEADER.size : query.question_end]


def local_response(
    query: Query, rcode: int, records: Iterable[tuple[int, int, bytes]] = (), *, authoritative: bool = False
) -> bytes:
    """Build a whole message of any size. `records` are type, TTL, and data of answers at the question name."""
    flags = wire.QR | query.flags & (wire.RD | wire.CD) | rcode & 15
    flags |= wire.RA | (wire.AA if authoritative else 0)
    answers = [record(AT_QUESTION, *each) for each in records]
    extra = b"" if query.edns_size is None else opt_record(rcode >> 4, query.dnssec_ok)
    header = wire.HEADER.pack(query.id, flags, 1, len(answers), 0, bool(extra))
    return header + query.packet[wire.HEADER.size : query.question_end] + b"".join(answers) + extra


def _fitting(records: Sequence[bytes], room: int) -> tuple[Sequence[bytes], int, bool]:
    """Return the records that fit, the room left, and whether one did not fit."""
    for index, each in enumerate(records):
        if len(each) > room:
            return records[:index], room, True
        room -= len(each)
    return records, room, False


class MalformedResponseError(ValueError):
    """Bytes that are not a valid response."""


class UpstreamResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A validated response of an upstream."""

    packet: bytes
    """The message without an OPT record; its ID has no meaning."""
    flags: int
    rcode: int
    """Includes the upper bits that the OPT record carried."""
    kind: ResponseKind
    truncated: bool
    question_end: int
    ttl: int
    """Least TTL of all records, and of a denial also the SOA's minimum; `DEFAULT_TTL` without records."""
    ttls: tuple[int, ...]
    """Offsets of the records' TTLs."""
    owners: tuple[int, ...]
    """Offsets of uncompressed owner names that equal the question name."""
    addresses: tuple[tuple[int, tuple[int, ...]], ...]
    """Size and offsets of the addresses of one name and type, whose order may change."""

    def for_client(self, query: Query, ttl: int | None = None, shuffle: Shuffle | None = None) -> bytes:
        """Return the message for a client that asked the same question in any case.

        `ttl` replaces the TTL of all records unless it is None.
        """
        message = bytearray(self.packet)
        flags = self.flags & ~(wire.RD | wire.CD) | query.flags & (wire.RD | wire.CD)
        if not (query.flags & wire.AD or query.dnssec_ok):
            flags &= ~wire.AD
        message[0:4] = query.id.to_bytes(2, "big") + flags.to_bytes(2, "big")
        end = len(query.qname)
        message[wire.HEADER.size : wire.HEADER.size + end] = query.qname
        for at in self.owners:
            message[at : at + end] = query.qname
        if ttl is not None:
            for at in self.ttls:
                _TTL.pack_into(message, at, ttl)
        if shuffle is not None:
            for size, offsets in self.addresses:
                values = [self.packet[at : at + size] for at in offsets]
                shuffle(values)
                for at, value in zip(offsets, values, strict=True):
                    message[at : at + size] = value
        if query.edns_size is not None:
            count = int.from_bytes(message[10:12], "big") + 1
            message[10:12] = count.to_bytes(2, "big")
            message += opt_record(self.rcode >> 4, query.dnssec_ok)
        return bytes(message)


def parse_response(packet: bytes) -> UpstreamResponse:
    """Validate a response.

    Raises MalformedResponseError for anything that could break a client: records that exceed the message, names with
    pointer loops or that are too long, and anything but one question.
    """
    if len(packet) < wire.HEADER.size:
        raise MalformedResponseError("is shorter than a header")
    _, flags, questions, *counts = wire.HEADER.unpack_from(packet)
    if not flags & wire.QR or flags & wire.OPCODE:
        raise MalformedResponseError("is not a response to a query")
    if questions != 1:
        raise MalformedResponseError(f"has {questions} questions")
    names = NameReader(packet)
    at, qname = names.read(wire.HEADER.size)
    if at != wire.HEADER.size + len(qname) or at + wire.QUESTION_TAIL.size > len(packet):
        raise MalformedResponseError("has an invalid question")
    parser = _RecordParser(packet, names, qname.lower())
    question_end = at = at + wire.QUESTION_TAIL.size
    for section, count in enumerate(counts):
        for _ in range(count):
            at = parser.read(at, section)
    return parser.response(flags, question_end, at, counts)


def parse_answers(message: bytes) -> tuple[int, list[bytes]]:
    """Return the response code, and CNAME and address records of the answer section with uncompressed names.

    Raises MalformedResponseError.
    """
    if len(message) < wire.HEADER.size:
        raise MalformedResponseError("is shorter than a header")
    _, flags, questions, count, *_ = wire.HEADER.unpack_from(message)
    names = NameReader(message)
    at = wire.HEADER.size
    for _ in range(questions):
        at = names.read(at)[0] + wire.QUESTION_TAIL.size
    answers = []
    for _ in range(min(count, _MAX_ANSWERS)):
        at, owner = names.read(at)
        data = at + wire.RECORD_TAIL.size
        if data > len(message):
            raise MalformedResponseError("ends within a record")
        type_, class_, ttl, length = wire.RECORD_TAIL.unpack_from(message, at)
        at = data + length
        if at > len(message):
            raise MalformedResponseError("ends within the data of a record")
        if type_ == wire.CNAME:
            value = names.read(data)[1]
        elif wire.ADDRESS_SIZES.get(type_) == length:
            value = message[data:at]
        else:
            continue
        if class_ == wire.IN:
            answers.append(record(owner, type_, ttl, value))
    return flags & 0xF, answers


class NameReader:
    """Expands the names of one message, each offset once."""

    def __init__(self, packet: bytes) -> None:
        self._packet = packet
        self._known: dict[int, bytes] = {}

    def read(self, at: int) -> tuple[int, bytes]:
        """Return the offset after a name and its wire form. Pointers must lead back; their number is limited."""
        packet, known = self._packet, self._known
        start, end, found = at, 0, b""
        for _ in range(_MAX_POINTERS):
            labels, after = self._labels(at)
            found += packet[at:labels]
            if len(found) > MAX_NAME:
                raise MalformedResponseError("has a name that is too long")
            end = end or after
            if packet[labels] < 0xC0:
                found += b"\0"
                break
            target = int.from_bytes(packet[labels:after], "big") & _MAX_POINTER_TARGET
            if target >= at:
                raise MalformedResponseError("has a compression pointer that does not lead back")
            if target in known:
                found += known[target]
                break
            at = target
        else:
            raise MalformedResponseError("has a name of too many compression pointers")
        if len(found) > MAX_NAME:
            raise MalformedResponseError("has a name that is too long")
        known[start] = found
        return end, found

    def _labels(self, at: int) -> tuple[int, int]:
        """Return the offset after a sequence of labels, and that after the root or pointer that ends it."""
        packet, start = self._packet, at
        try:
            while True:
                length = packet[at]
                if length == 0:
                    return at, at + 1
                if length >= 0xC0:
                    packet[at + 1]  # raises IndexError if it is missing
                    return at, at + 2
                if length > MAX_LABEL:
                    raise MalformedResponseError("has a label of an unknown kind")
                at += 1 + length
                if at - start > MAX_NAME:
                    raise MalformedResponseError("has a name that is too long")
        except IndexError:
            raise MalformedResponseError("ends within a name") from None


class _RecordParser:
    """Collects what `UpstreamResponse` needs while it validates the records of a message."""

    def __init__(self, packet: bytes, names: NameReader, qname: bytes) -> None:
        self._packet = packet
        self._names = names
        self._qname = qname
        self._ttls: list[int] = []
        self._owners: list[int] = []
        self._addresses: dict[tuple[bytes, int], list[int]] = {}
        self._min_ttl = MAX_TTL
        self._soa_minimum: int | None = None
        self._delegates = False
        self._extended_rcode = 0
        self._opt: tuple[int, int] | None = None
        """Offset of the OPT record, and the number of additional records before it."""
        self._additional = 0

    def read(self, at: int, section: int) -> int:
        """Validate one record and return the offset after it."""
        packet, start = self._packet, at
        at, owner = self._names.read(at)
        if at + wire.RECORD_TAIL.size > len(packet):
            raise MalformedResponseError("ends within a record")
        type_, _, ttl, length = wire.RECORD_TAIL.unpack_from(packet, at)
        data = at + wire.RECORD_TAIL.size
        end: int = data + length
        if end > len(packet):
            raise MalformedResponseError("ends within the data of a record")
        if section == 2 and self._opt is not None:
            return end
        if type_ == wire.OPT:
            if section != 2:
                raise MalformedResponseError("has an OPT record outside the additional section")
            self._opt = start, self._additional
            self._extended_rcode = ttl >> 24
            return end
        self._additional += section == 2
        self._check_data(type_, data, end)
        self._ttls.append(at + 4)
        # RFC 2181 section 8: a TTL with the most significant bit set counts as 0.
        self._min_ttl = min(self._min_ttl, 0 if ttl >> 31 else ttl)
        if at - start == len(owner) and owner.lower() == self._qname:
            self._owners.append(start)
        if section == 0 and type_ in wire.ADDRESS_SIZES:
            self._addresses.setdefault((owner.lower(), type_), []).append(data)
        if section == 1 and type_ == wire.SOA:
            self._soa_minimum = int.from_bytes(packet[end - 4 : end], "big")
        self._delegates = self._delegates or (section == 1 and type_ == wire.NS)
        return end

    def _check_data(self, type_: int, data: int, end: int) -> None:
        """Check that names in the data are whole and addresses have the right size."""
        if type_ in wire.ADDRESS_SIZES and end - data != wire.ADDRESS_SIZES[type_]:
            raise MalformedResponseError("has an address of a wrong size")
        before = BYTES_BEFORE_NAME.get(type_)
        if before is None:
            return
        at, _ = self._names.read(data + before)
        if type_ == wire.SOA:
            at = self._names.read(at)[0] + SOA_NUMBERS.size
        if at != end:
            raise MalformedResponseError("has a record whose data has a wrong size")

    def response(self, flags: int, question_end: int, end: int, counts: list[int]) -> UpstreamResponse:
        """Return the response, cut before its OPT record.

        `end` is the offset after the last record, `counts` the numbers of records in the header.
        """
        packet = self._packet[:end]
        if self._opt is not None:
            at, before = self._opt
            packet = packet[:10] + before.to_bytes(2, "big") + packet[12:at]
        rcode = self._extended_rcode << 4 | flags & 15
        kind = self._kind(rcode, counts[0])
        ttl = self._min_ttl if self._ttls else DEFAULT_TTL
        if kind in ("nodata", "nxdomain") and self._soa_minimum is not None:
            ttl = min(ttl, self._soa_minimum)
        return UpstreamResponse(
            packet=packet,
            flags=flags,
            rcode=rcode,
            kind=kind,
            truncated=bool(flags & wire.TC),
            question_end=question_end,
            ttl=ttl,
            ttls=tuple(self._ttls),
            owners=tuple(self._owners),
            addresses=tuple(
                (wire.ADDRESS_SIZES[type_], tuple(offsets))
                for (_, type_), offsets in self._addresses.items()
                if len(offsets) > 1
            ),
        )

    def _kind(self, rcode: int, answers: int) -> ResponseKind:
        """Classify the response. A denial without an SOA has no negative TTL, so it is "other" (RFC 2308 section 5)."""
        if rcode == wire.SERVFAIL:
            return "servfail"
        if rcode == wire.NXDOMAIN:
            return "other" if self._soa_minimum is None else "nxdomain"
        if rcode != wire.NOERROR:
            return "other"
        if answers or self._delegates:
            return "success"
        return "other" if self._soa_minimum is None else "nodata"
