"""Responses as bytes. Owner names are pointers into the question, so they keep the client's spelling (row S2).

What is made here lacks the id in front: the same bytes serve everybody who asks the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from narthex.dns.interfaces import UDP_MOST, Query
from narthex.dns.message.wire import AA, BADVERS, CD, HEADER, IN, OPT, QR, RD, RECORD_TAIL, SOA, TC

AT_QUESTION = b"\xc0\x0c"
"""The question's name."""
_POINTER = struct.Struct(">H")
_FURTHEST = 0x3FFF
_REST = struct.Struct(">HHHHH")
_SOA_TIMES = struct.Struct(">IIIII")
_MOST_NEGATIVE_TTL = 300
ID = 2
"""Bytes of the id, which is not here."""


class Turn:
    """A response whose addresses begin with another one each time (row S8)."""

    __slots__ = ("_at", "_before", "_behind", "_doubled", "_kept", "_round", "_step")

    def __init__(self, before: bytes, records: Sequence[bytes], kept: int, behind: bytes) -> None:
        """`records` are equally long; `kept` of them fit."""
        block = b"".join(records)
        self._before, self._behind = before, behind
        self._doubled = block + block
        self._step = len(records[0])
        self._kept = kept * self._step
        self._round = len(block)
        self._at = 0

    def next(self) -> bytes:
        """The next order."""
        at = self._at
        self._at = (at + self._step) % self._round
        return self._before + self._doubled[at : at + self._kept] + self._behind


class Compiled(NamedTuple):
    """A response but for its id."""

    tail: bytes
    code: int
    turn: Turn | None = None
    """Where each answer has an order of its own; `tail` is the first one."""


class Sections(NamedTuple):
    """Records behind a question, each whole."""

    answers: Sequence[bytes] = ()
    authorities: Sequence[bytes] = ()
    additional: Sequence[bytes] = ()
    turning: Sequence[bytes] = ()
    """The end of the answers: addresses of one name, in any order."""


_NO_RECORDS = Sections()


def pointer(offset: int) -> bytes:
    """A pointer to an offset of the message, at most 16,383."""
    return _POINTER.pack(0xC000 | offset)


def owner(offset: int, name: bytes) -> bytes:
    """A name that stands at an offset already, by a pointer where one reaches."""
    return pointer(offset) if offset <= _FURTHEST else name


def record(name: bytes, type_: int, ttl: int, data: bytes) -> bytes:
    """One record of class IN."""
    return name + RECORD_TAIL.pack(type_, IN, ttl, len(data)) + data


def soa(at_zone: bytes, serial: int, ttl: int, *, negative: bool) -> bytes:
    """The zone's SOA (row D29); `negative`: as it stands beside an empty answer (1.2)."""
    data = b"\x02ns\x03dns" + at_zone + b"\x0ahostmaster" + at_zone
    data += _SOA_TIMES.pack(serial & 0xFFFFFFFF, 7200, 1800, 86_400, ttl)
    return record(at_zone, SOA, min(ttl, _MOST_NEGATIVE_TTL) if negative else ttl, data)


def response(
    query: Query, code: int, limit: int, sections: Sections = _NO_RECORDS, *, authoritative: bool = False
) -> Compiled:
    """The response to a query, at most `limit` bytes long with its id. What is too much is cut: additional records
    silently, others with TC (row S3, RFC 2181 9)."""
    question = query.packet[HEADER.size : query.question_end]
    extra = b""
    if query.edns_size is not None:
        extra = record(b"\0", OPT, (code >> 4) << 24, b"")
        extra = extra[:3] + _POINTER.pack(UDP_MOST) + extra[5:]
    room = limit - HEADER.size - len(question) - len(extra)
    answers, room, cut = _fitting((*sections.answers, *sections.turning), room)
    authorities, room, cut = ((), room, True) if cut else _fitting(sections.authorities, room)
    additional = () if cut else _fitting(sections.additional, room)[0]
    flags = QR | query.flags & (RD | CD) | code & 0xF | (AA if authoritative else 0) | (TC if cut else 0)
    head = _REST.pack(flags, 1, len(answers), len(authorities), len(additional) + bool(extra)) + question
    behind = b"".join((*authorities, *additional, extra))
    tail = head + b"".join(answers) + behind
    fixed = len(sections.answers)
    turning = len(answers) - fixed
    if turning < 1 or len(sections.turning) < 2:
        return Compiled(tail, code)
    return Compiled(tail, code, Turn(head + b"".join(answers[:fixed]), sections.turning, turning, behind))


def bad_version(query: Query, limit: int) -> Compiled:
    """BADVERS, to an EDNS version that is not 0 (row S4)."""
    return response(query, BADVERS, limit)


def cut(message: bytes, query: Query, limit: int) -> bytes:
    """A response made elsewhere, whole when the client takes it, else its question with TC."""
    if len(message) <= limit:
        return message
    id_, flags = HEADER.unpack_from(message)[:2]
    return HEADER.pack(id_, flags | TC, 1, 0, 0, 0) + query.packet[HEADER.size : query.question_end]


def _fitting(records: Sequence[bytes], room: int) -> tuple[Sequence[bytes], int, bool]:
    """Those that fit, in order; what room is left; whether one did not fit."""
    for index, each in enumerate(records):
        if len(each) > room:
            return records[:index], room, True
        room -= len(each)
    return records, room, False
