"""Messages as records, for plugins that change responses: reads any message, and writes it with compressed names."""

from __future__ import annotations

import struct

import msgspec

from narthex.dns.message import names, wire
from narthex.dns.message.query import Query, opt_record
from narthex.dns.message.response import BYTES_BEFORE_NAME, SOA_NUMBERS, MalformedResponseError, NameReader, owner_name

_COMPRESSED = (wire.CNAME, wire.NS, wire.PTR, wire.SOA, wire.MX)
"""Types whose data may contain compressed names (RFC 3597 section 4; SRV must not, RFC 2782)."""
_MAX_POINTER = 0x3FFF
_OPTION = struct.Struct(">HH")
NSID, EXTENDED_ERROR = 3, 15
"""Codes of EDNS options (RFC 5001, RFC 8914)."""


class Record(msgspec.Struct, frozen=True):
    """A resource record. Names, also those in its data, are in wire form without compression."""

    owner: bytes
    type: int
    ttl: int
    data: bytes
    class_: int = wire.IN

    @property
    def target(self) -> bytes:
        """The name in the data (of an SOA record the first one); empty if the type has none."""
        before = BYTES_BEFORE_NAME.get(self.type)
        return b"" if before is None else self.data[before : _name_end(self.data, before)]

    def with_target(self, name: bytes) -> Record:
        """Return the record with another name in its data."""
        before = BYTES_BEFORE_NAME[self.type]
        rest = self.data[_name_end(self.data, before) :]
        return msgspec.structs.replace(self, data=self.data[:before] + name + rest)


class Message(msgspec.Struct, kw_only=True):
    """A response that can be changed."""

    id: int
    flags: int
    """Without the response code."""
    rcode: int
    """Its lower four bits; those in an OPT record are kept with it."""
    question: bytes
    """Name, type, and class."""
    answers: list[Record] = []
    authorities: list[Record] = []
    additional: list[Record] = []
    """Without an OPT record."""
    opt: bytes = b""
    """The OPT record, without the length of its options and these."""
    options: bytes = b""
    """EDNS options."""

    @property
    def sections(self) -> tuple[list[Record], list[Record], list[Record]]:
        """The three sections, which can be changed."""
        return self.answers, self.authorities, self.additional

    def add_option(self, code: int, data: bytes) -> None:
        """Add an EDNS option, if the message has an OPT record: clients without EDNS understand none."""
        if self.opt:
            self.options += _OPTION.pack(code, len(data)) + data

    def encode(self) -> bytes:
        """Return the message as bytes of any length."""
        out = bytearray(12)
        known: dict[bytes, int] = {}
        _write_name(out, self.question[:-4], known)
        out += self.question[-4:]
        for section in self.sections:
            for record in section:
                _write(out, record, known)
        if self.opt:
            out += self.opt + struct.pack(">H", len(self.options)) + self.options
        counts = 1, len(self.answers), len(self.authorities), len(self.additional) + bool(self.opt)
        wire.HEADER.pack_into(out, 0, self.id, self.flags | self.rcode, *counts)
        return bytes(out)


def reply_to(query: Query, rcode: int = wire.NOERROR, *, authoritative: bool = False) -> Message:
    """Return an empty response to a query."""
    return Message(
        id=query.id,
        flags=wire.QR | query.flags & (wire.RD | wire.CD) | (wire.AA if authoritative else 0),
        rcode=rcode,
        question=query.qname + wire.QUESTION_TAIL.pack(query.qtype, query.qclass),
        opt=b"" if query.edns_size is None else opt_record(0, query.dnssec_ok)[:-2],
    )


def read_message(data: bytes) -> Message:
    """Read a message with one question. Raises MalformedResponseError."""
    try:
        return _read(data)
    except (struct.error, IndexError) as error:
        raise MalformedResponseError("ends within a record") from error


def _read(data: bytes) -> Message:
    id_, flags, questions, *counts = wire.HEADER.unpack_from(data)
    if questions != 1:
        raise MalformedResponseError(f"has {questions} questions")
    reader = NameReader(data)
    at, qname = reader.read(wire.HEADER.size)
    message = Message(
        id=id_, flags=flags & ~0xF, rcode=flags & 0xF, question=qname + data[at : at + wire.QUESTION_TAIL.size]
    )
    at += wire.QUESTION_TAIL.size
    found: tuple[list[Record], ...] = ([], [], [])
    for section, count in zip(found, counts, strict=True):
        for _ in range(count):
            start = at
            at, owner = reader.read(at)
            type_, class_, ttl, length = wire.RECORD_TAIL.unpack_from(data, at)
            body = at + wire.RECORD_TAIL.size
            at = body + length
            if at > len(data):
                raise MalformedResponseError("ends within the data of a record")
            if type_ == wire.OPT:
                message.opt, message.options = data[start : body - 2], data[body:at]
            else:
                section.append(Record(owner, type_, ttl, _expanded(reader, data, type_, body, at), class_))
    message.answers, message.authorities, message.additional = found
    return message


def _expanded(reader: NameReader, data: bytes, type_: int, at: int, end: int) -> bytes:
    before = BYTES_BEFORE_NAME.get(type_)
    if before is None:
        return data[at:end]
    after, name = reader.read(at + before)
    found = data[at : at + before] + name
    if type_ == wire.SOA:
        after, contact = reader.read(after)
        found += contact + data[after : after + SOA_NUMBERS.size]
        after += SOA_NUMBERS.size
    if after != end:
        raise MalformedResponseError("has a record whose data has a wrong size")
    return found


def _write(out: bytearray, record: Record, known: dict[bytes, int]) -> None:
    _write_name(out, record.owner, known)
    out += wire.RECORD_TAIL.pack(record.type, record.class_, record.ttl, 0)
    start = len(out)
    if record.type in _COMPRESSED:
        before = BYTES_BEFORE_NAME[record.type]
        end = _name_end(record.data, before)
        out += record.data[:before]
        _write_name(out, record.data[before:end], known)
        if record.type == wire.SOA:
            contact = _name_end(record.data, end)
            _write_name(out, record.data[end:contact], known)
            end = contact
        out += record.data[end:]
    else:
        out += record.data
    out[start - 2 : start] = (len(out) - start).to_bytes(2, "big")


def _write_name(out: bytearray, name: bytes, known: dict[bytes, int]) -> None:
    """Write a name; a suffix that was written before, in the same case, is a pointer to it."""
    for suffix in names.suffixes(name):
        if suffix == names.ROOT:
            out += suffix
            return
        before = known.get(suffix)
        if before is not None:
            out += owner_name(before, suffix)
            return
        if len(out) <= _MAX_POINTER:
            known[suffix] = len(out)
        out += suffix[: 1 + suffix[0]]


def _name_end(data: bytes, at: int) -> int:
    while data[at]:
        at += 1 + data[at]
    return at + 1
