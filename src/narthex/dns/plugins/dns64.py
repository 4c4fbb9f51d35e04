"""Plugin `dns64`: AAAA records from A records, for clients that have IPv6 only (RFC 6147, RFC 6052)."""

from __future__ import annotations

import ipaddress

import msgspec

from narthex.dns.corefile.settings import Dns64Settings
from narthex.dns.message import wire
from narthex.dns.message.query import DnsClient, Query
from narthex.dns.message.records import Message, Record

_NO_SOA_TTL = 600
_RESERVED_BYTE = 8
"""Byte of an address that is zero, whatever the length of the prefix (RFC 6052 section 2.2)."""


class Dns64Plugin:
    """The settings of one server block."""

    def __init__(self, settings: Dns64Settings) -> None:
        self._settings = settings
        network = ipaddress.IPv6Network(settings.prefix)
        self._prefix = network.network_address.packed[: network.prefixlen // 8]

    def concerns(self, query: Query) -> bool:
        """Return True for a question that may get other records."""
        return query.qtype == wire.AAAA and query.qclass == wire.IN

    def applies(self, query: Query, client: DnsClient) -> bool:
        """Return True for a question of a client that gets other records."""
        return self.concerns(query) and (self._settings.allow_ipv4 or ":" in client.address)

    def needs_ipv4(self, message: Message) -> bool:
        """Return True if a response to an AAAA question lacks addresses, so that the A records are needed."""
        if message.rcode == wire.NXDOMAIN:
            return False
        return self._settings.translate_all or all(each.type != wire.AAAA for each in message.answers)

    def synthesize(self, original: Message, ipv4: Message) -> Message:
        """Return the response to the AAAA question, from that to the A question."""
        limit = min((each.ttl for each in original.authorities if each.type == wire.SOA), default=_NO_SOA_TTL)
        answers = [self._translated(each, limit) if each.type == wire.A else each for each in ipv4.answers]
        return msgspec.structs.replace(ipv4, question=original.question, answers=answers)

    def _translated(self, record: Record, limit: int) -> Record:
        packed = self._prefix + record.data
        if len(self._prefix) <= _RESERVED_BYTE:
            packed = packed[:_RESERVED_BYTE] + b"\0" + packed[_RESERVED_BYTE:]
        return msgspec.structs.replace(
            record, type=wire.AAAA, ttl=min(record.ttl, limit), data=packed.ljust(16, b"\0")[:16]
        )
