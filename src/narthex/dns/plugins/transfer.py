"""Plugin `transfer`: zone transfers of the cluster's zones over TCP (RFC 5936). IXFR gets the whole zone or one SOA record."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from narthex.dns.corefile.settings import TransferSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import DnsClient, Query
from narthex.dns.message.records import Record, read_message, reply_to
from narthex.dns.message.response import MalformedResponseError
from narthex.dns.plugins.kubernetes import KubernetesPlugin

MAX_MESSAGE_RECORDS = 200
"""Records in one message of a transfer, each of at most some hundred bytes."""
_SERIAL = struct.Struct(">IIIII")


class TransferPlugin:
    """The rules of one server block."""

    def __init__(self, rules: Sequence[TransferSettings], kubernetes: KubernetesPlugin) -> None:
        self._rules = [(zone, rule.to) for rule in rules for zone in names.lower_zones(rule.zones)]
        self._kubernetes = kubernetes

    def transfer(self, query: Query, client: DnsClient) -> Iterator[bytes]:
        """Return the messages of the response; one message that refuses if the client may not have the zone."""
        rules = [(zone, to) for zone, to in self._rules if names.within(query.name, zone)]
        _, to = max(rules, key=lambda rule: len(rule[0]), default=(b"", ()))
        records = self._kubernetes.transferred(query.name) if "*" in to or client.address in to else None
        if records is None or query.qclass != wire.IN:
            return iter((reply_to(query, wire.REFUSED).encode(),))
        if not self._kubernetes.zone.synced:
            return iter((reply_to(query, wire.SERVFAIL).encode(),))
        first = next(records)
        serial = _known_serial(query)
        if serial is not None and serial == _SERIAL.unpack(first.data[-_SERIAL.size :])[0]:
            return _messages(query, (first,))
        return _messages(query, _chained(first, records))


def _chained(first: Record, others: Iterable[Record]) -> Iterator[Record]:
    yield first
    yield from others


def _messages(query: Query, records: Iterable[Record]) -> Iterator[bytes]:
    message = reply_to(query, authoritative=True)
    for record in records:
        if len(message.answers) >= MAX_MESSAGE_RECORDS:
            yield message.encode()
            message = reply_to(query, authoritative=True)
        message.answers.append(record)
    yield message.encode()


def _known_serial(query: Query) -> int | None:
    """Return the serial that the client of an IXFR has; None for AXFR."""
    if query.qtype != wire.IXFR:
        return None
    try:
        known = read_message(query.packet).authorities
    except MalformedResponseError:
        return None
    soa = next((record for record in known if record.type == wire.SOA), None)
    return None if soa is None else int(_SERIAL.unpack(soa.data[-_SERIAL.size :])[0])
