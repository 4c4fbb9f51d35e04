"""Plugin `kubernetes`: responses for names in the zones of a cluster (rows D1 to D31, S1 to S6).

An ExternalName whose target is outside these zones needs an answer of others: `external_query` builds the query for its
target, and `join_external` appends the answer to the CNAME records (row D17).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

import msgspec

from narthex.dns.corefile.settings import KubernetesSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import Query
from narthex.dns.message.records import Record
from narthex.dns.message.response import (
    AT_QUESTION,
    SOA_NUMBERS,
    EncodedResponse,
    MalformedResponseError,
    Sections,
    build_response,
    negative_response,
    owner_name,
    parse_answers,
    pointer,
    record,
    soa_record,
)
from narthex.dns.message.wire import CNAME, NS, PTR, SOA, SRV, A
from narthex.dns.zone.records import SRV_TARGET, Records, address_records
from narthex.dns.zone.zone import ExistingName, Zone

MAX_CNAME_CHAIN = 10
"""CNAME records that are followed inside the zones (row D18)."""
_ARPA = (names.wire("in-addr.arpa"), names.wire("ip6.arpa"))
_SERVER, _CONTACT = b"\x02ns\x03dns", b"\x0ahostmaster"


class ExternalTarget(msgspec.Struct, frozen=True):
    """The name outside the cluster's zones whose records complete an answer."""

    target: bytes
    """Wire form; the question name itself if no ExternalName leads there."""
    links: Sequence[bytes] = ()
    """CNAME records of the answer before those of the target (row D17)."""


class KubernetesPlugin:
    """Builds the responses of one `kubernetes` section."""

    def __init__(
        self,
        settings: KubernetesSettings,
        zone: Zone,
        own: Sequence[str] = (),
        *,
        rotate: bool = True,
        max_answers: int = 0,
    ) -> None:
        """Serve `zone`. `own` are the addresses of this server (row D30).

        `rotate` and `max_answers` (0: no limit) are those of plugin `loadbalance`.
        """
        self._settings = settings
        self.zone = zone
        self._own = tuple(ipaddress.ip_address(address).packed for address in own)
        self._rotate = rotate
        self._max_answers = max_answers
        self._zones = set(names.lower_zones(settings.zones))
        self._forward = [zone for zone in map(names.wire, settings.zones) if not zone.lower().endswith(_ARPA)]
        self._fallthrough = names.lower_zones(settings.fallthrough or ())

    def zone_of(self, name: bytes) -> bytes | None:
        """Return the longest of the plugin's zones that contains a name (in lower case)."""
        return next((suffix for suffix in names.suffixes(name) if suffix in self._zones), None)

    def closed_zones(self) -> list[bytes]:
        """Return the forward zones without zones of the plugin below them and without fallthrough."""
        return [
            zone
            for zone in self._zones
            if not zone.endswith(_ARPA)
            and not any(names.within(other, zone) for other in self._zones if other != zone)
            and not any(names.within(zone, through) or names.within(through, zone) for through in self._fallthrough)
        ]

    def answer(self, query: Query, zone: bytes, limit: int) -> EncodedResponse | ExternalTarget:
        """Build the response for a name in one of the zones. Never raises, whatever the query contains."""
        if query.qtype in (wire.AXFR, wire.IXFR):
            # Plugin transfer answers those that it allows (row S5).
            return build_response(query, wire.REFUSED, limit)
        at_zone = pointer(wire.HEADER.size + len(query.name) - len(zone))
        relative = query.name[: -len(zone)]
        if zone.endswith(_ARPA):
            found = self._reverse(query.name, relative)
        else:
            found = self._name_server() if relative == _SERVER else self.zone.find(relative)
        if found is None:
            return self._no_such_name(query, at_zone, limit)
        if not relative and query.qtype == SOA:
            sections = Sections((self._soa(at_zone, negative=False),))
        elif not relative and query.qtype == NS and not zone.endswith(_ARPA):
            sections = self._name_servers(at_zone)
        else:
            return self._existing(query, zone, at_zone, found, limit)
        return build_response(query, wire.NOERROR, limit, sections, authoritative=True)

    def _existing(
        self, query: Query, zone: bytes, at_zone: bytes, found: ExistingName, limit: int
    ) -> EncodedResponse | ExternalTarget:
        records = dict(found.records)
        ttl = self._settings.ttl if found.ttl is None else found.ttl
        if CNAME in records and query.qtype in wire.ADDRESS_SIZES:
            return self._follow_cname(query, at_zone, records[CNAME][0], limit)
        values = records.get(query.qtype, ())
        if not values:
            return self._negative(query, wire.NOERROR, at_zone, limit)
        if query.qtype in wire.ADDRESS_SIZES:
            sections = self._addresses((), AT_QUESTION, query.qtype, ttl, values)
        elif query.qtype == SRV:
            sections = self._services(query, found, zone, values)
        elif query.qtype == PTR:
            sections = Sections([record(AT_QUESTION, PTR, ttl, data + self._forward[0]) for data in values])
        else:
            sections = Sections([record(AT_QUESTION, query.qtype, ttl, data) for data in values])
        return build_response(query, wire.NOERROR, limit, sections, authoritative=True)

    def _reverse(self, name: bytes, relative: bytes) -> ExistingName | None:
        if not relative:
            return ExistingName(())
        targets = self.zone.pointer_targets(name) if self._forward else None
        return None if targets is None else ExistingName(((PTR, targets),))

    def _no_such_name(self, query: Query, at_zone: bytes, limit: int) -> EncodedResponse | ExternalTarget:
        if names.within_any(query.name, self._fallthrough):
            return ExternalTarget(query.qname)
        if not self.zone.synced:
            return build_response(query, wire.SERVFAIL, limit)
        return self._negative(query, wire.NXDOMAIN, at_zone, limit)

    def _negative(self, query: Query, rcode: int, at_zone: bytes, limit: int) -> EncodedResponse:
        return negative_response(query, rcode, self._soa(at_zone, negative=True), limit)

    def _soa(self, at_zone: bytes, *, negative: bool) -> bytes:
        server, contact = _SERVER + at_zone, _CONTACT + at_zone
        return soa_record(at_zone, server, contact, self.zone.serial, self._settings.ttl, negative=negative)

    def _follow_cname(
        self, query: Query, at_zone: bytes, target: bytes, limit: int
    ) -> EncodedResponse | ExternalTarget:
        """Follow the chain of an ExternalName as far as it stays in the zones (rows D17 to D19)."""
        ttl = self._settings.ttl
        links: list[bytes] = []
        owner = AT_QUESTION
        for _ in range(MAX_CNAME_CHAIN):
            links.append(record(owner, CNAME, ttl, target))
            owner = target
            name = target.lower()
            zone = self.zone_of(name)
            if zone is None or zone.endswith(_ARPA):
                return ExternalTarget(target, links)
            found = self.zone.find(name[: -len(zone)])
            records = {} if found is None else dict(found.records)
            if CNAME not in records:
                values = records.get(query.qtype, ())
                if not values:
                    break
                sections = self._addresses(links, owner, query.qtype, ttl, values)
                return build_response(query, wire.NOERROR, limit, sections, authoritative=True)
            target = records[CNAME][0]
        return self._negative(query, wire.NOERROR, at_zone, limit)

    def _addresses(
        self, links: Sequence[bytes], owner: bytes, type_: int, ttl: int, values: Sequence[bytes]
    ) -> Sections:
        answers = [record(owner, type_, ttl, data) for data in values[: self._max_answers or None]]
        return Sections(links, rotating=answers) if self._rotate else Sections([*links, *answers])

    def _services(self, query: Query, found: ExistingName, zone: bytes, values: Sequence[bytes]) -> Sections:
        """Return SRV records, and the addresses of their targets as additional records (rows D4, D10)."""
        answers, additional = [], []
        seen: set[bytes] = set()
        at = query.question_end
        for data in values:
            target = data[SRV_TARGET:] + found.service
            answer = record(AT_QUESTION, SRV, self._settings.ttl, data + found.service + zone)
            answers.append(answer)
            if target not in seen:
                seen.add(target)
                whole = target + zone
                additional += self._additional(owner_name(at + len(answer) - len(whole), whole), target)
            at += len(answer)
        return Sections(answers, additional=additional)

    def _additional(self, owner: bytes, relative: bytes) -> list[bytes]:
        found = self.zone.find(relative)
        records: Records = () if found is None else found.records
        ttl = self._settings.ttl
        return [
            record(owner, type_, ttl, data)
            for type_, values in records
            if type_ in wire.ADDRESS_SIZES
            for data in values
        ]

    def _name_servers(self, at_zone: bytes) -> Sections:
        """Return the NS records of the zone apex, and their addresses (row D30)."""
        ttl = self._settings.ttl
        servers = self._services_in_front()
        answers = [record(AT_QUESTION, NS, ttl, name + at_zone) for name in servers]
        additional = [each for name in servers for each in self._additional(name + at_zone, name)]
        if not servers:
            name = _SERVER + at_zone
            answers = [record(AT_QUESTION, NS, ttl, name)]
            additional = [record(name, A if len(own) == 4 else wire.AAAA, ttl, own) for own in self._own]
        return Sections(answers, additional=additional)

    def transferred(self, zone: bytes) -> Iterator[Record] | None:
        """Return the records of a zone for a transfer, the SOA record first and last; None if there is no such zone.

        As in CoreDNS, names of pods and of endpoints of Services with a cluster IP are left out.
        """
        return None if zone not in self._zones or zone.endswith(_ARPA) else self._transferred(zone)

    def _transferred(self, zone: bytes) -> Iterator[Record]:
        ttl = self._settings.ttl
        # Workers apply changes while a transfer goes on; its records are those of one moment.
        services = dict(self.zone.services)
        numbers = SOA_NUMBERS.pack(self.zone.serial & 0xFFFFFFFF, 7200, 1800, 86_400, ttl)
        soa = Record(zone, SOA, ttl, _SERVER + zone + _CONTACT + zone + numbers)
        yield soa
        servers = self._services_in_front() or (_SERVER,)
        for name in servers:
            yield Record(zone, NS, ttl, name + zone)
        if servers == (_SERVER,):
            yield from (Record(_SERVER + zone, (len(own) == 4 and A) or wire.AAAA, ttl, own) for own in self._own)
        for name, records in services.items():
            found = {b"": records.own} | records.children()
            for before, here in found.items():
                for type_, values in here:
                    if (before and not records.headless and type_ in wire.ADDRESS_SIZES) or (
                        not before and records.headless and type_ == SRV
                    ):
                        continue
                    tail = name + zone if type_ == SRV else b""
                    yield from (Record(before + name + zone, type_, ttl, data + tail) for data in values)
        yield soa

    def _services_in_front(self) -> tuple[bytes, ...]:
        """Return the names of the Services in front of this server."""
        return self.zone.services_with_endpoints(self._own)

    def _name_server(self) -> ExistingName:
        """Return the addresses of `ns.dns.ZONE`: those of the Services in front of this server, or else its own."""
        found = [self.zone.find(name) for name in self._services_in_front()]
        addresses = [
            data
            for each in found
            if each is not None
            for type_, values in each.records
            if type_ in wire.ADDRESS_SIZES
            for data in values
        ]
        return ExistingName(address_records(addresses if found else self._own))


def external_query(query: Query, external: ExternalTarget) -> Query:
    """Return the query for an external target, with the client's ID, flags, and EDNS options."""
    question = external.target + wire.QUESTION_TAIL.pack(query.qtype, query.qclass)
    packet = query.packet[: wire.HEADER.size] + question + query.packet[query.question_end :]
    return msgspec.structs.replace(
        query,
        packet=packet,
        name=external.target.lower(),
        qname=external.target,
        question_end=wire.HEADER.size + len(question),
    )


def join_external(query: Query, external: ExternalTarget, message: bytes, limit: int) -> bytes:
    """Return the message for the client: the CNAME records, then the answers of `message`, with its response code.

    A message that is malformed gives SERVFAIL.
    """
    try:
        rcode, answers = parse_answers(message)
    except MalformedResponseError:
        rcode, answers = wire.SERVFAIL, []
    if rcode not in (wire.NOERROR, wire.NXDOMAIN):
        return query.packet[:2] + build_response(query, rcode, limit).tail
    sections = Sections([*external.links, *answers])
    return query.packet[:2] + build_response(query, rcode, limit, sections, authoritative=True).tail
