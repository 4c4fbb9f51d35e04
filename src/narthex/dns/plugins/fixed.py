"""Plugins whose responses are fixed: `any`, `chaos`, `nsid`, `whoami`; and `header` and `minimal`, which trim others."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

import msgspec

from narthex.dns.corefile.settings import ChaosSettings, HeaderSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query
from narthex.dns.message.records import NSID, Message, Record, reply_to

_ANY_TTL = 8482
_MAX_STRING = 255
_SRV_OF_CLIENT = b"\0\0\0\0"
"""Priority and weight."""


def _string(text: str) -> bytes:
    data = text.encode()[:_MAX_STRING]
    return bytes((len(data),)) + data


def refuse_any(query: Query) -> bytes:
    """Return the response of plugin `any` to a query of type ANY (RFC 8482)."""
    message = reply_to(query)
    message.answers.append(
        Record(query.qname, wire.HINFO, _ANY_TTL, _string("ANY obsoleted") + _string("See RFC 8482"))
    )
    return message.encode()


def answer_chaos(
    query: Query, settings: ChaosSettings, host: str, shuffle: Callable[[list[str]], None]
) -> bytes | None:
    """Return the response of plugin `chaos`, or None if another plugin is to answer. `shuffle` orders the authors."""
    if query.qclass != wire.CH or query.qtype != wire.TXT:
        return None
    name = names.text(query.name)
    if name == "authors.bind.":
        texts = list(settings.authors)
        shuffle(texts)
    elif name in ("version.bind.", "version.server."):
        texts = [settings.version]
    elif name in ("hostname.bind.", "id.server."):
        texts = [host]
    else:
        return None
    message = reply_to(query)
    message.answers += [Record(query.qname, wire.TXT, 0, _string(text), wire.CH) for text in texts]
    return message.encode()


def who_am_i(query: Query, client: DnsClient) -> bytes:
    """Return the response of plugin `whoami`: address, port, and protocol of the client as additional records."""
    message = reply_to(query, authoritative=True)
    packed = ipaddress.ip_address(client.address).packed
    message.additional.append(Record(query.qname, wire.A if len(packed) == 4 else wire.AAAA, 0, packed, query.qclass))
    owner = names.label(f"_{client.transport}") + query.qname
    if len(owner) <= names.MAX_NAME:
        data = _SRV_OF_CLIENT + client.port.to_bytes(2, "big") + names.ROOT
        message.additional.append(Record(owner, wire.SRV, 0, data, query.qclass))
    return message.encode()


def asks_for_nsid(query: Query) -> bool:
    """Return True if the OPT record of a query contains the option NSID."""
    if query.edns_size is None:
        return False
    # The OPT record is mostly the only one after the question. Another one before it hides the option.
    at = query.question_end + 1
    packet = query.packet
    if packet[query.question_end : at + 2] != b"\0\0\x29":
        return False
    at += wire.RECORD_TAIL.size
    while at + 4 <= len(packet):
        if int.from_bytes(packet[at : at + 2], "big") == NSID:
            return True
        at += 4 + int.from_bytes(packet[at + 2 : at + 4], "big")
    return False


def clear_records(message: Message) -> None:
    """Drop the records that plugin `minimal` omits: all but the answer, unless they are the answer."""
    if message.rcode == wire.NOERROR and message.answers:
        message.authorities, message.additional = [], []


def change_query(query: Query, settings: HeaderSettings) -> Query:
    """Return the query with the bits that plugin `header` sets and clears."""
    flags = query.flags & ~settings.query_clear | settings.query_set
    return query if flags == query.flags else msgspec.structs.replace(query, flags=flags)


def change_header(message: Message, settings: HeaderSettings) -> None:
    """Set and clear the bits of a response that plugin `header` names."""
    message.flags = message.flags & ~settings.response_clear | settings.response_set
