"""A question and a zone give a response (rows D1 to D31, S1 to S6)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from narthex.dns.corefile.settings import Kubernetes
from narthex.dns.interfaces import Query
from narthex.dns.message import names
from narthex.dns.message.wire import (
    AAAA,
    AXFR,
    CNAME,
    HEADER,
    IXFR,
    NOERROR,
    NS,
    NXDOMAIN,
    PTR,
    REFUSED,
    SERVFAIL,
    SOA,
    SRV,
    A,
)
from narthex.dns.zone.compiled import AT_QUESTION, Compiled, Sections, owner, pointer, record, response, soa
from narthex.dns.zone.records import Records
from narthex.dns.zone.zone import Found, Zone

MOST_LINKS = 10
"""Names behind an ExternalName that are followed inside the zone (row D18)."""
_SRV_HEAD = 6
"""Priority, weight and port in front of the target."""
_ARPA = (names.wire("in-addr.arpa"), names.wire("ip6.arpa"))
_ADDRESSES = (A, AAAA)


class Outside(NamedTuple):
    """Somebody else has to answer."""

    target: bytes
    """The name to ask for, in wire form; the question's own when nothing leads there."""
    links: Sequence[bytes] = ()
    """CNAME records to put in front (row D17)."""


class Cluster:
    """Answers for one `kubernetes` section."""

    def __init__(
        self, settings: Kubernetes, zone: Zone, own: Sequence[str] = (), *, turn: bool = True, most: int = 0
    ) -> None:
        """`own` are the addresses at which this server is reached (row D30). `turn` and `most` are those of
        `loadbalance`: whether orders differ, and addresses of an answer at most (0: all)."""
        self._settings = settings
        self.zone = zone
        self._own = tuple(ipaddress.ip_address(address).packed for address in own)
        self._turn = turn
        self._most = most
        self._zones = {names.wire(text).lower() for text in settings.zones}
        self._forward = [zone for zone in map(names.wire, settings.zones) if not zone.lower().endswith(_ARPA)]
        through = settings.fallthrough
        self._through = () if through is None else tuple(names.wire(text).lower() for text in through)

    def zone_of(self, name: bytes) -> bytes | None:
        """The longest zone of ours that a name (lower case) is in."""
        return next((suffix for suffix in names.suffixes(name) if suffix in self._zones), None)

    def closed_zones(self) -> list[bytes]:
        """Forward zones with nothing of ours below them, out of which no name falls through."""
        return [
            zone
            for zone in self._zones
            if not zone.endswith(_ARPA)
            and not any(names.within(other, zone) for other in self._zones if other != zone)
            and not any(names.within(zone, through) or names.within(through, zone) for through in self._through)
        ]

    def answer(self, query: Query, zone: bytes, limit: int) -> Compiled | Outside:
        """The response for a name in one of our zones. Never raises for what is in the question."""
        if query.qtype in (AXFR, IXFR):
            # No plugin here allows transfers (row S5).
            return response(query, REFUSED, limit)
        at_zone = pointer(HEADER.size + len(query.name) - len(zone))
        relative = query.name[: -len(zone)]
        if zone.endswith(_ARPA):
            found = self._reverse(query.name, relative)
        else:
            found = self.zone.find(relative)
        if found is None:
            return self._unknown(query, at_zone, limit)
        if not relative and query.qtype == SOA:
            answers = (soa(at_zone, self.zone.serial, self._settings.ttl, negative=False),)
            return response(query, NOERROR, limit, Sections(answers), authoritative=True)
        if not relative and query.qtype == NS and not zone.endswith(_ARPA):
            return response(query, NOERROR, limit, self._servers(at_zone), authoritative=True)
        return self._known(query, zone, at_zone, found, limit)

    def alone(self, query: Query, outside: Outside, limit: int) -> Compiled:
        """An ExternalName's CNAME records, where nobody can be asked for the rest."""
        return response(query, NOERROR, limit, Sections(outside.links), authoritative=True)

    def _known(self, query: Query, zone: bytes, at_zone: bytes, found: Found, limit: int) -> Compiled | Outside:
        records = dict(found.records)
        ttl = self._settings.ttl if found.ttl is None else found.ttl
        if CNAME in records and query.qtype in _ADDRESSES:
            return self._follow(query, at_zone, records[CNAME][0], limit)
        held = records.get(query.qtype, ())
        if not held:
            return self._empty(query, at_zone, limit)
        if query.qtype in _ADDRESSES:
            made = [record(AT_QUESTION, query.qtype, ttl, data) for data in held[: self._most or None]]
            sections = Sections(turning=made) if self._turn else Sections(made)
        elif query.qtype == SRV:
            sections = self._services(query, found, zone, held)
        elif query.qtype == PTR:
            sections = Sections([record(AT_QUESTION, PTR, ttl, data + self._forward[0]) for data in held])
        else:
            sections = Sections([record(AT_QUESTION, query.qtype, ttl, data) for data in held])
        return response(query, NOERROR, limit, sections, authoritative=True)

    def _reverse(self, name: bytes, relative: bytes) -> Found | None:
        if not relative:
            return Found(())
        targets = self.zone.targets(name) if self._forward else None
        return None if targets is None else Found(((PTR, targets),))

    def _unknown(self, query: Query, at_zone: bytes, limit: int) -> Compiled | Outside:
        if any(names.within(query.name, zone) for zone in self._through):
            return Outside(query.qname)
        if not self.zone.synced:
            return response(query, SERVFAIL, limit)
        return self._negative(query, NXDOMAIN, at_zone, limit)

    def _empty(self, query: Query, at_zone: bytes, limit: int) -> Compiled:
        return self._negative(query, NOERROR, at_zone, limit)

    def _negative(self, query: Query, code: int, at_zone: bytes, limit: int) -> Compiled:
        beside = (soa(at_zone, self.zone.serial, self._settings.ttl, negative=True),)
        return response(query, code, limit, Sections(authorities=beside), authoritative=True)

    def _follow(self, query: Query, at_zone: bytes, target: bytes, limit: int) -> Compiled | Outside:
        """An ExternalName's way, inside the zone as far as it goes (rows D17 to D19)."""
        ttl = self._settings.ttl
        links: list[bytes] = []
        name, holder = query.name, AT_QUESTION
        for _ in range(MOST_LINKS):
            links.append(record(holder, CNAME, ttl, target))
            name, holder = target.lower(), target
            zone = self.zone_of(name)
            if zone is None or zone.endswith(_ARPA):
                return Outside(target, links)
            found = self.zone.find(name[: -len(zone)])
            records: dict[int, tuple[bytes, ...]] = {} if found is None else dict(found.records)
            if CNAME not in records:
                held = records.get(query.qtype, ())
                if not held:
                    break
                made = [record(holder, query.qtype, ttl, data) for data in held[: self._most or None]]
                sections = Sections(links, turning=made) if self._turn else Sections([*links, *made])
                return response(query, NOERROR, limit, sections, authoritative=True)
            target = records[CNAME][0]
        return self._empty(query, at_zone, limit)

    def _services(self, query: Query, found: Found, zone: bytes, held: Sequence[bytes]) -> Sections:
        """SRV records, and the addresses of their targets behind them (rows D4, D10)."""
        ttl = self._settings.ttl
        answers, additional = [], []
        seen: set[bytes] = set()
        at = query.question_end
        for data in held:
            made = record(AT_QUESTION, SRV, ttl, data + found.service + zone)
            answers.append(made)
            host = data[_SRV_HEAD:]
            if host not in seen:
                seen.add(host)
                holder = owner(at + len(made) - len(host + found.service + zone), host + found.service + zone)
                additional += self._addresses(holder, host + found.service)
            at += len(made)
        return Sections(answers, additional=additional)

    def _addresses(self, holder: bytes, relative: bytes) -> list[bytes]:
        found = self.zone.find(relative)
        records: Records = () if found is None else found.records
        ttl = self._settings.ttl
        return [record(holder, type_, ttl, data) for type_, held in records if type_ in _ADDRESSES for data in held]

    def _servers(self, at_zone: bytes) -> Sections:
        """The apex's NS records, and their addresses (row D30)."""
        ttl = self._settings.ttl
        servers = self.zone.in_front_of(self._own)
        answers = [record(AT_QUESTION, NS, ttl, name + at_zone) for name in servers]
        additional = [made for name in servers for made in self._addresses(name + at_zone, name)]
        if not servers:
            name = b"\x02ns\x03dns" + at_zone
            answers = [record(AT_QUESTION, NS, ttl, name)]
            additional = [record(name, A if len(own) == 4 else AAAA, ttl, own) for own in self._own]
        return Sections(answers, additional=additional)
