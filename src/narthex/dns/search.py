"""A name's way through a pod's search list: what is asked in which order, and what the cluster's DNS answers.

Pods get their resolv.conf from the kubelet (row S22), and a resolver in the pod works it off (resolv.conf(5)): `redis` and
`redis.default` have fewer dots than `ndots`, so each zone of the list is tried before the name as it stands.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from narthex.dns.corefile.settings import Kubernetes
from narthex.dns.interfaces import Query
from narthex.dns.message import names, wire
from narthex.dns.message.answer import Cluster, Outside
from narthex.dns.zone.changes import Recorder
from narthex.dns.zone.zone import Zone
from narthex.model.store import Snapshot

NDOTS = 5
"""What the kubelet writes."""
_LIMIT = 65_535


class Search(NamedTuple):
    """What of a resolv.conf decides which names are asked."""

    zones: tuple[str, ...]
    """With their dot at the end."""
    ndots: int = NDOTS


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One name that was asked, for IPv4 and IPv6 addresses."""

    name: str
    answer: str
    """`addresses`, `nothing` (the name exists, without an address), `no such name`, or `elsewhere` (not of the cluster)."""
    addresses: tuple[str, ...] = ()
    alias: str = ""
    """The name outside of the cluster that an ExternalName leads to."""


class NameWay(msgspec.Struct, frozen=True, kw_only=True):
    """How a name became addresses, or did not."""

    name: str
    ndots: int
    asked: tuple[Asked, ...]
    """In order; the last one ended the search."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """What the sender gets."""
        return self.asked[-1].addresses

    @property
    def musl_stops(self) -> str:
        """The name at which musl's resolver gives up, though it is not the last: it takes an empty answer for the end."""
        return next((each.name for each in self.asked[:-1] if each.answer == "nothing"), "")


def pod_search(namespace: str, domain: str) -> Search:
    """What the kubelet gives a pod whose dnsPolicy is ClusterFirst; the node's own zones come behind."""
    zone = names.text(names.wire(domain))
    return Search((f"{namespace}.svc.{zone}", f"svc.{zone}", zone))


def candidates(name: str, search: Search) -> tuple[str, ...]:
    """The names to ask for, in order. Raises ValueError for what is no name."""
    whole = names.text(names.wire(name))
    if name.endswith("."):
        return (whole,)
    longer = tuple(f"{whole}{zone}" for zone in search.zones if _is_name(f"{whole}{zone}"))
    return (whole, *longer) if name.count(".") >= search.ndots else (*longer, whole)


def look_up(name: str, search: Search, snapshot: Snapshot, domain: str) -> NameWay:
    """Ask as a pod's resolver (glibc's) does: until one answer has an address. Raises ValueError for what is no name."""
    asked: list[Asked] = []
    cluster = _cluster(snapshot, domain)
    for each in candidates(name, search):
        asked.append(_ask(cluster, each))
        if asked[-1].addresses or asked[-1].alias:
            break
    return NameWay(name=name, ndots=search.ndots, asked=tuple(asked))


def _cluster(snapshot: Snapshot, domain: str) -> Cluster:
    settings = Kubernetes(zones=(names.text(names.wire(domain)).lower(),))
    recorder, zone = Recorder(settings), Zone()
    zone.apply(recorder.update(snapshot, {*snapshot.services, *snapshot.slices}, (), 0))
    return Cluster(settings, zone, turn=False)


def _ask(cluster: Cluster, name: str) -> Asked:
    found: list[str] = []
    codes = set()
    for qtype in (wire.A, wire.AAAA):
        query = _query(name, qtype)
        zone = cluster.zone_of(query.name)
        made = Outside(query.qname) if zone is None else cluster.answer(query, zone, _LIMIT)
        if isinstance(made, Outside):
            alias = names.text(made.target) if made.links else ""
            return Asked(name=name, answer="elsewhere", alias=alias)
        codes.add(made.code)
        found += _addresses(b"\0\0" + made.tail)
    answer = "addresses" if found else "nothing" if wire.NOERROR in codes else "no such name"
    return Asked(name=name, answer=answer, addresses=tuple(found))


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


def _is_name(name: str) -> bool:
    try:
        names.wire(name)
    except ValueError:
        return False
    return True


def _query(name: str, qtype: int) -> Query:
    packet = wire.HEADER.pack(0, wire.RD, 1, 0, 0, 0) + names.wire(name) + wire.QUESTION_TAIL.pack(qtype, wire.IN)
    query = wire.read(packet)
    assert isinstance(query, Query), "a name in wire form makes a whole question"
    return query
