"""An ExternalName's way out of the cluster: what to ask others, and their answer behind ours (row D17)."""

from __future__ import annotations

import dataclasses

from narthex.dns.interfaces import Query
from narthex.dns.message import names, wire
from narthex.dns.message.answer import Outside
from narthex.dns.message.wire import CNAME, HEADER, IN, QUESTION_TAIL, RECORD_TAIL
from narthex.dns.zone.compiled import Sections, response

_MOST_RECORDS = 256
_ADDRESSES = {wire.A: 4, wire.AAAA: 16}


def asked_for(query: Query, outside: Outside) -> Query:
    """The question for the outside end, with the client's id, flags and options."""
    question = outside.target + QUESTION_TAIL.pack(query.qtype, query.qclass)
    packet = query.packet[: HEADER.size] + question + query.packet[query.question_end :]
    return dataclasses.replace(
        query,
        packet=packet,
        name=outside.target.lower(),
        qname=outside.target,
        question_end=HEADER.size + len(question),
    )


def joined(query: Query, outside: Outside, message: bytes, limit: int) -> bytes:
    """The answer to the client's own question: our CNAME, then what others said, with their TTL and code. SERVFAIL when
    their message cannot be read."""
    code = wire.SERVFAIL
    answers: list[bytes] = []
    if len(message) >= HEADER.size:
        code = HEADER.unpack_from(message)[1] & 0xF
        found = _answers(message)
        if found is None:
            code = wire.SERVFAIL
        else:
            answers = found
    if code not in (wire.NOERROR, wire.NXDOMAIN):
        return query.packet[:2] + response(query, code, limit).tail
    sections = Sections([*outside.links, *answers])
    return query.packet[:2] + response(query, code, limit, sections, authoritative=True).tail


def _answers(message: bytes) -> list[bytes] | None:
    """CNAME and address records of the answer, with whole names; None for a broken message."""
    questions, count = HEADER.unpack_from(message)[2:4]
    at = HEADER.size
    for _ in range(questions):
        name = expanded(message, at)
        if name is None:
            return None
        at = name[1] + QUESTION_TAIL.size
    made = []
    for _ in range(min(count, _MOST_RECORDS)):
        owner = expanded(message, at)
        if owner is None or owner[1] + RECORD_TAIL.size > len(message):
            return None
        type_, class_, ttl, length = RECORD_TAIL.unpack_from(message, owner[1])
        start = owner[1] + RECORD_TAIL.size
        at = start + length
        if at > len(message):
            return None
        data = message[start:at]
        if type_ == CNAME:
            target = expanded(message, start)
            if target is None:
                return None
            data = target[0]
        elif _ADDRESSES.get(type_) != length:
            continue
        if class_ == IN:
            made.append(owner[0] + RECORD_TAIL.pack(type_, IN, ttl, len(data)) + data)
    return made


def expanded(message: bytes, at: int) -> tuple[bytes, int] | None:
    """A name that may end in pointers, written out, and the offset behind it; None when it is none. Pointers lead
    backwards only, so there is an end."""
    made = bytearray()
    end = 0
    before = at
    while at < len(message):
        length = message[at]
        if length & 0xC0 == 0xC0:
            if at + 1 >= len(message):
                return None
            end = end or at + 2
            at = (length & 0x3F) << 8 | message[at + 1]
            if at >= before:
                return None
            before = at
            continue
        if length > names.LONGEST_LABEL or len(made) + 1 + length > names.LONGEST:
            return None
        made += message[at : at + 1 + length]
        at += 1 + length
        if length == 0:
            return bytes(made), end or at
    return None
