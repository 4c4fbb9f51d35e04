"""Plugin `k8s_external`: external addresses of Services as `SERVICE.NAMESPACE.ZONE` (row S20)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from narthex.dns.corefile.settings import K8sExternalSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import Query
from narthex.dns.message.response import (
    AT_QUESTION,
    EncodedResponse,
    Sections,
    build_response,
    negative_response,
    pointer,
    record,
    soa_record,
)
from narthex.dns.message.wire import NOERROR, NS, NXDOMAIN, REFUSED, SERVFAIL, SOA, SRV
from narthex.dns.zone.records import SRV_TARGET, Records, ServiceRecords, address_records
from narthex.dns.zone.zone import Zone

_SVC = b"\x03svc"
_SERVER, _CONTACT = b"\x03ns1", b"\x0ahostmaster"


class K8sExternalPlugin:
    """Builds the responses of one `k8s_external`, from the Services of plugin `kubernetes`."""

    def __init__(
        self, settings: K8sExternalSettings, zone: Zone, own: Sequence[str] = (), *, rotate: bool = True
    ) -> None:
        """Serve the Services of `zone`. `own` are the addresses of this server. `rotate` enables `loadbalance`."""
        self.zones = names.lower_zones(settings.zones)
        self._settings = settings
        self._zone = zone
        self._rotate = rotate
        self._own = tuple(ipaddress.ip_address(address).packed for address in own)
        self._apex = names.label(settings.apex)
        self._fallthrough = names.lower_zones(settings.fallthrough or ())

    def zone_of(self, name: bytes) -> bytes | None:
        """Return the longest of the plugin's zones that contains a name (in lower case)."""
        return next((suffix for suffix in names.suffixes(name) if suffix in self.zones), None)

    def answer(self, query: Query, zone: bytes, limit: int) -> EncodedResponse | None:
        """Build the response for a name in one of the zones, or return None if the next plugin is to answer."""
        if query.qtype in (wire.AXFR, wire.IXFR):
            return build_response(query, REFUSED, limit)
        at_zone = pointer(wire.HEADER.size + len(query.name) - len(zone))
        relative = query.name[: -len(zone)]
        found = self._find(relative)
        if found is None:
            if names.within_any(query.name, self._fallthrough):
                return None
            if not self._zone.synced:
                return build_response(query, SERVFAIL, limit)
            return negative_response(query, NXDOMAIN, self._soa(at_zone, negative=True), limit)
        values = dict(found).get(query.qtype, ())
        if not relative and query.qtype in (SOA, NS):
            sections = self._apex_records(query, at_zone)
        elif not values:
            return negative_response(query, NOERROR, self._soa(at_zone, negative=True), limit)
        elif query.qtype == SRV:
            sections = self._services(relative, zone, values)
        else:
            answers = [record(AT_QUESTION, query.qtype, self._settings.ttl, data) for data in values]
            sections = Sections(rotating=answers) if self._rotate else Sections(answers)
        return build_response(query, NOERROR, limit, sections, authoritative=True)

    def _find(self, relative: bytes) -> Records | None:
        """Return the records of a name relative to the zone, or None if it does not exist.

        The data of SRV records ends with the labels of the target before the Service's name.
        """
        labels = _wire_labels(relative)
        if not labels or labels == [self._apex]:
            return ()
        if labels[-1] == self._apex:
            return address_records(self._own) if labels[:-1] == [_SERVER] else None
        if len(labels) == 1:
            return None if self._zone.find(relative + _SVC) is None else ()
        service = self._zone.services.get(labels[-2] + labels[-1] + _SVC)
        return None if service is None else self._records_of(service, b"".join(labels[:-2]))

    def _records_of(self, service: ServiceRecords, before: bytes) -> Records | None:
        """Return the records of a Service; `before` are the labels before its name."""
        records = service.own if not before else service.children().get(before)
        if service.external:
            if before and (records is None or any(type_ in wire.ADDRESS_SIZES for type_, _ in records)):
                return None
            services = [data[:SRV_TARGET] for type_, values in records or () if type_ == SRV for data in values]
            own = () if before else address_records(service.external)
            return (*own, (SRV, tuple(dict.fromkeys(services)))) if services else own
        return records if service.headless and self._settings.headless else None

    def _services(self, relative: bytes, zone: bytes, values: Sequence[bytes]) -> Sections:
        ttl = self._settings.ttl
        service = b"".join(_wire_labels(relative)[-2:])
        targets = [data[SRV_TARGET:] + service for data in values]
        answers = [
            record(AT_QUESTION, SRV, ttl, data[:SRV_TARGET] + target + zone)
            for data, target in zip(values, targets, strict=True)
        ]
        additional = [
            record(target + zone, type_, ttl, data)
            for target in dict.fromkeys(targets)
            for type_, addresses in self._find(target) or ()
            if type_ in wire.ADDRESS_SIZES
            for data in addresses
        ]
        return Sections(answers, additional=additional)

    def _apex_records(self, query: Query, at_zone: bytes) -> Sections:
        if query.qtype == SOA:
            return Sections([self._soa(at_zone, negative=False)])
        ttl = self._settings.ttl
        server = _SERVER + self._apex + at_zone
        own = [record(server, type_, ttl, data) for type_, values in address_records(self._own) for data in values]
        return Sections([record(AT_QUESTION, NS, ttl, server)], additional=own)

    def _soa(self, at_zone: bytes, *, negative: bool) -> bytes:
        server, contact = _SERVER + self._apex + at_zone, _CONTACT + self._apex + at_zone
        return soa_record(at_zone, server, contact, self._zone.serial, self._settings.ttl, negative=negative)


def _wire_labels(relative: bytes) -> list[bytes]:
    """Return the labels of a relative name, each after its length byte."""
    return [bytes((len(label),)) + label for label in names.labels(relative + b"\0")]
