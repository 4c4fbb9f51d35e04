"""Plugin `k8s_external`: Services' external addresses as `SERVICE.NAMESPACE.ZONE` (row S20)."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence

from narthex.dns.corefile.settings import External
from narthex.dns.interfaces import Query
from narthex.dns.message import names
from narthex.dns.message.wire import (
    AAAA,
    AXFR,
    HEADER,
    IXFR,
    NOERROR,
    NS,
    NXDOMAIN,
    REFUSED,
    SERVFAIL,
    SOA,
    SRV,
    A,
)
from narthex.dns.zone.compiled import AT_QUESTION, Compiled, Sections, pointer, record, response
from narthex.dns.zone.records import Entry, Records, label
from narthex.dns.zone.zone import Zone

_SVC = b"\x03svc"
_SRV_HEAD = 6
_TIMES = struct.Struct(">IIIII")
_MOST_NEGATIVE_TTL = 300
_ADDRESSES = (A, AAAA)


class ExternalZone:
    """The zones of one `k8s_external`, out of the same Services as the cluster's."""

    def __init__(self, settings: External, zone: Zone, own: Sequence[str] = (), *, turn: bool = True) -> None:
        """`own` are the addresses at which this server is reached. `turn`: the order of addresses differs."""
        self.zones = tuple(names.wire(text).lower() for text in settings.zones)
        self._settings = settings
        self._zone = zone
        self._turn = turn
        self._own = tuple(ipaddress.ip_address(address).packed for address in own)
        self._apex = label(settings.apex)
        through = settings.fallthrough
        self._through = () if through is None else tuple(names.wire(text).lower() for text in through)

    def zone_of(self, name: bytes) -> bytes | None:
        """The longest of its zones that a name (lower case) is in."""
        return next((suffix for suffix in names.suffixes(name) if suffix in self.zones), None)

    def answer(self, query: Query, zone: bytes, limit: int) -> Compiled | None:
        """The response for a name in one of the zones; None: whoever comes next is asked."""
        if query.qtype in (AXFR, IXFR):
            return response(query, REFUSED, limit)
        at_zone = pointer(HEADER.size + len(query.name) - len(zone))
        relative = query.name[: -len(zone)]
        found = self._find(relative)
        if found is None:
            if any(names.within(query.name, through) for through in self._through):
                return None
            code = NXDOMAIN if self._zone.synced else SERVFAIL
            return self._nothing(query, code, at_zone, limit)
        if not relative and query.qtype in (SOA, NS):
            return self._top(query, at_zone, limit)
        held = dict(found).get(query.qtype, ())
        if not held:
            return self._nothing(query, NOERROR, at_zone, limit)
        if query.qtype == SRV:
            return self._services(query, relative, zone, held, limit)
        made = [record(AT_QUESTION, query.qtype, self._settings.ttl, data) for data in held]
        sections = Sections(turning=made) if self._turn else Sections(made)
        return response(query, NOERROR, limit, sections, authoritative=True)

    def _find(self, relative: bytes) -> Records | None:
        """What a name has, without the zone; None: it does not exist. SRV data ends with the target's labels in front of
        the Service's name."""
        labels = [label_bytes(each) for each in names.labels(relative + b"\0")]
        if not labels or labels == [self._apex]:
            return ()
        if labels[-1] == self._apex:
            return _by_family(self._own) if labels[:-1] == [b"\x03ns1"] else None
        if len(labels) == 1:
            return None if self._zone.find(relative + _SVC) is None else ()
        entry = self._zone.services.get(labels[-2] + labels[-1] + _SVC)
        return None if entry is None else self._of(entry, b"".join(labels[:-2]))

    def _of(self, entry: Entry, before: bytes) -> Records | None:
        """What a Service has; `before` stands in front of its name."""
        records = entry.own if not before else entry.children().get(before)
        if entry.external:
            if before and (records is None or any(type_ in _ADDRESSES for type_, _ in records)):
                return None
            services = [data[:_SRV_HEAD] for type_, held in records or () if type_ == SRV for data in held]
            own = () if before else _by_family(entry.external)
            return (*own, (SRV, tuple(dict.fromkeys(services)))) if services else own
        return records if entry.headless and self._settings.headless else None

    def _services(self, query: Query, relative: bytes, zone: bytes, held: Sequence[bytes], limit: int) -> Compiled:
        """SRV records, with the addresses of their targets."""
        ttl = self._settings.ttl
        labels = [label_bytes(each) for each in names.labels(relative + b"\0")]
        service = b"".join(labels[-2:])
        targets = [data[_SRV_HEAD:] + service for data in held]
        answers = [
            record(AT_QUESTION, SRV, ttl, data[:_SRV_HEAD] + target + zone)
            for data, target in zip(held, targets, strict=True)
        ]
        additional = [
            record(target + zone, type_, ttl, data)
            for target in dict.fromkeys(targets)
            for type_, values in self._find(target) or ()
            if type_ in _ADDRESSES
            for data in values
        ]
        return response(query, NOERROR, limit, Sections(answers, additional=additional), authoritative=True)

    def _top(self, query: Query, at_zone: bytes, limit: int) -> Compiled:
        ttl = self._settings.ttl
        if query.qtype == SOA:
            sections = Sections([self._soa(at_zone, ttl)])
        else:
            server = b"\x03ns1" + self._apex + at_zone
            own = [record(server, type_, ttl, data) for type_, held in _by_family(self._own) for data in held]
            sections = Sections([record(AT_QUESTION, NS, ttl, server)], additional=own)
        return response(query, NOERROR, limit, sections, authoritative=True)

    def _nothing(self, query: Query, code: int, at_zone: bytes, limit: int) -> Compiled:
        if code == SERVFAIL:
            return response(query, code, limit)
        beside = Sections(authorities=[self._soa(at_zone, min(self._settings.ttl, _MOST_NEGATIVE_TTL))])
        return response(query, code, limit, beside, authoritative=True)

    def _soa(self, at_zone: bytes, ttl: int) -> bytes:
        data = b"\x03ns1" + self._apex + at_zone + b"\x0ahostmaster" + self._apex + at_zone
        serial = self._zone.serial & 0xFFFFFFFF
        return record(at_zone, SOA, ttl, data + _TIMES.pack(serial, 7200, 1800, 86_400, self._settings.ttl))


def label_bytes(label: bytes) -> bytes:
    """A label with its length in front."""
    return bytes((len(label),)) + label


def _by_family(addresses: Sequence[bytes]) -> Records:
    found = (
        (A, tuple(each for each in addresses if len(each) == 4)),
        (AAAA, tuple(each for each in addresses if len(each) == 16)),
    )
    return tuple((type_, held) for type_, held in found if held)
