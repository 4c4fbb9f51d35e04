"""The search list of a pod: which names its stub resolver looks up, and what the cluster's DNS answers.

The kubelet writes the resolv.conf of pods (row S22), which their stub resolver follows (resolv.conf(5)): `redis` and
`redis.default` have fewer dots than `ndots`, so each zone of the list is tried before the name as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from narthex.dns.corefile.settings import KubernetesSettings
from narthex.dns.message import names, wire
from narthex.dns.message.query import Query, parse_query
from narthex.dns.plugins.kubernetes import ExternalTarget, KubernetesPlugin
from narthex.dns.zone.changes import ZoneTracker
from narthex.dns.zone.zone import Zone
from narthex.model import Snapshot

NDOTS = 5
"""The kubelet's value."""
_MAX_MESSAGE = 65_535


class SearchPath(NamedTuple):
    """The settings of a resolv.conf that decide which names are looked up."""

    zones: tuple[str, ...]
    """With their trailing dot."""
    ndots: int = NDOTS


class CandidateLookup(msgspec.Struct, frozen=True, kw_only=True):
    """The lookup of the A and AAAA records of one name."""

    name: str
    answer: str
    """`addresses`, `nothing` (NODATA), `no such name` (NXDOMAIN), or `elsewhere` (outside the cluster's zones)."""
    addresses: tuple[str, ...] = ()
    alias: str = ""
    """Name outside the cluster that an ExternalName leads to."""


class NameResolution(msgspec.Struct, frozen=True, kw_only=True):
    """The lookups of a name along the search list."""

    name: str
    ndots: int
    asked: tuple[CandidateLookup, ...]
    """In order; the last lookup ended the search."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that the pod gets."""
        return self.asked[-1].addresses

    @property
    def musl_stops(self) -> str:
        """Name before the last at which musl's resolver gives up, because it ends the search at NODATA; or empty."""
        return next((each.name for each in self.asked[:-1] if each.answer == "nothing"), "")


def pod_search(namespace: str, domain: str) -> SearchPath:
    """Return the search path of pods with dnsPolicy ClusterFirst, without the node's own zones, which follow."""
    zone = names.text(names.wire(domain))
    return SearchPath((f"{namespace}.svc.{zone}", f"svc.{zone}", zone))


def candidates(name: str, search: SearchPath) -> tuple[str, ...]:
    """Return the names to look up, in order. Raises ValueError for an invalid name."""
    whole = names.text(names.wire(name))
    if name.endswith("."):
        return (whole,)
    longer = tuple(f"{whole}{zone}" for zone in search.zones if names.wire_or_none(f"{whole}{zone}") is not None)
    return (whole, *longer) if name.count(".") >= search.ndots else (*longer, whole)


def look_up(name: str, search: SearchPath, snapshot: Snapshot, domain: str) -> NameResolution:
    """Look up a name as glibc does: until an answer has an address. Raises ValueError for an invalid name."""
    asked: list[CandidateLookup] = []
    plugin = _plugin(snapshot, domain)
    for each in candidates(name, search):
        asked.append(_look_up_one(plugin, each))
        if asked[-1].addresses or asked[-1].alias:
            break
    return NameResolution(name=name, ndots=search.ndots, asked=tuple(asked))


def _plugin(snapshot: Snapshot, domain: str) -> KubernetesPlugin:
    settings = KubernetesSettings(zones=(names.text(names.wire(domain)).lower(),))
    tracker, zone = ZoneTracker(settings), Zone()
    zone.apply(tracker.update(snapshot, {*snapshot.services, *snapshot.slices}, (), 0))
    return KubernetesPlugin(settings, zone, rotate=False)


def _look_up_one(plugin: KubernetesPlugin, name: str) -> CandidateLookup:
    found: list[str] = []
    codes = set()
    for qtype in (wire.A, wire.AAAA):
        query = _query(name, qtype)
        zone = plugin.zone_of(query.name)
        response = ExternalTarget(query.qname) if zone is None else plugin.answer(query, zone, _MAX_MESSAGE)
        if isinstance(response, ExternalTarget):
            alias = names.text(response.target) if response.links else ""
            return CandidateLookup(name=name, answer="elsewhere", alias=alias)
        codes.add(response.rcode)
        found += _addresses(b"\0\0" + response.tail)
    answer = "addresses" if found else "nothing" if wire.NOERROR in codes else "no such name"
    return CandidateLookup(name=name, answer=answer, addresses=tuple(found))


def _addresses(message: bytes) -> list[str]:
    import dns.message
    import dns.rdatatype

    answer = dns.message.from_wire(message).answer
    return [
        data.address
        for records in answer
        if records.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA)
        for data in records
    ]


def _query(name: str, qtype: int) -> Query:
    packet = wire.HEADER.pack(0, wire.RD, 1, 0, 0, 0) + names.wire(name) + wire.QUESTION_TAIL.pack(qtype, wire.IN)
    query = parse_query(packet)
    assert isinstance(query, Query), "the query is well-formed"
    return query
