"""One port's questions: read, given to the server block that they belong to, answered or handed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from narthex.dns import names, wire
from narthex.dns.answer import Cluster, Outside
from narthex.dns.compiled import Compiled, bad_version, response
from narthex.dns.seam import Query, Resolver, Transport, limit

_TYPES = {
    1: "A",
    2: "NS",
    5: "CNAME",
    6: "SOA",
    12: "PTR",
    15: "MX",
    16: "TXT",
    28: "AAAA",
    33: "SRV",
    43: "DS",
    48: "DNSKEY",
    64: "SVCB",
    65: "HTTPS",
    255: "ANY",
    251: "IXFR",
    252: "AXFR",
}
OTHER = "other"
"""Types and codes without a row of their own in the metrics: no client can make new ones."""
DROPPED = "dropped"
"""The zone of questions that no server block takes, as CoreDNS calls it."""
KUBERNETES = "kubernetes"
_CODES = ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED")


class Block(NamedTuple):
    """A server block, as far as answering goes."""

    zones: tuple[str, ...]
    cluster: Cluster | None
    resolver: Resolver | None


class Labels(NamedTuple):
    """How a question and its answer are counted."""

    zone: str
    type: str
    code: str
    plugin: str


class Ask(NamedTuple):
    """A question for the block's resolver."""

    query: Query
    resolver: Resolver
    zone: str
    outside: Outside


class Made(NamedTuple):
    """A response, and how to count it."""

    compiled: Compiled
    labels: Labels


class Refused(NamedTuple):
    """A whole response to what is no question."""

    message: bytes
    labels: Labels


class Shape:
    """The answer to any name of one length that does not exist, asked in one way: all but the question."""

    __slots__ = ("behind", "counter", "head", "labels")

    def __init__(self, head: bytes, behind: bytes, labels: Labels) -> None:
        self.head = head
        self.behind = behind
        self.labels = labels
        self.counter: list[int] | None = None
        """For whoever counts: all answers of a shape are counted alike."""


_MOST_SHAPES = 2048
_NAME_AT = wire.HEADER.size


class Desk:
    """All blocks of one port."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._by_zone = {names.wire(zone).lower(): (block, zone) for block in blocks for zone in block.zones}
        self._quick = [
            (zone, block.cluster)
            for block in blocks
            if block.cluster is not None
            for zone in block.cluster.closed_zones()
            if self._block(zone)[0] is block
            and not any(names.within(other, zone) for other in self._by_zone if other != zone)
        ]
        """Zones whose unknown names are answered here, whatever they are."""
        self._shapes: dict[tuple[bytes, int, bytes, bytes, bool], Shape] = {}

    def changed(self) -> None:
        """A zone is another one now."""
        self._shapes.clear()

    def unknown(self, packet: bytes, transport: Transport) -> tuple[bytes, Shape] | None:
        """The short way for names that do not exist: the response behind its id, as `handle` would make it. None: go
        the long way. In some clusters most questions are such, by search lists."""
        at, last = _NAME_AT, len(packet) - 5
        while at < last and (length := packet[at]):
            if length > names.LONGEST_LABEL:
                return None
            at += 1 + length
        if at > last or at - _NAME_AT >= names.LONGEST:
            return None
        at += 1
        name = packet[_NAME_AT:at].lower()
        for zone, cluster in self._quick:
            if name.endswith(zone) and cluster.is_unknown(name, zone):
                break
        else:
            return None
        key = (packet[2:_NAME_AT], at, packet[at:], zone, transport == "udp")
        shape = self._shapes.get(key)
        end = at + wire.QUESTION_TAIL.size
        if shape is None:
            made = self.handle(packet, transport)
            if not isinstance(made, Made):
                return None
            tail = made.compiled.tail
            shape = Shape(tail[: _NAME_AT - 2], tail[end - 2 :], made.labels)
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = shape
        return shape.head + packet[_NAME_AT:end] + shape.behind, shape

    def handle(self, packet: bytes, transport: Transport) -> Made | Ask | Refused | None:
        """What to do about a packet; None: nothing. Never raises, whatever is in it."""
        query = wire.read(packet)
        if query is None:
            return None
        if isinstance(query, int):
            return Refused(wire.refusal(packet, query), Labels(DROPPED, OTHER, code_text(query), ""))
        most = limit(query, transport)
        if query.edns_version:
            return _counted(bad_version(query, most), query, DROPPED)
        block, zone = self._block(query.name)
        if block is None or query.qclass != wire.IN:
            return _counted(response(query, wire.REFUSED, most), query, zone)
        return self._answer(query, block, zone, most)

    def _answer(self, query: Query, block: Block, zone: str, most: int) -> Made | Ask:
        outside = Outside(query.qname)
        if block.cluster is not None:
            ours = block.cluster.zone_of(query.name)
            if ours is not None:
                found = block.cluster.answer(query, ours, most)
                if isinstance(found, Compiled):
                    return _counted(found, query, zone, KUBERNETES)
                outside = found
        if block.resolver is not None:
            return Ask(query, block.resolver, zone, outside)
        if outside.links and block.cluster is not None:
            return _counted(block.cluster.alone(query, outside, most), query, zone, KUBERNETES)
        return _counted(response(query, wire.REFUSED, most), query, zone)

    def _block(self, name: bytes) -> tuple[Block | None, str]:
        for suffix in names.suffixes(name):
            found = self._by_zone.get(suffix)
            if found is not None:
                return found
        return None, DROPPED


def code_text(code: int) -> str:
    """A response code's name in the metrics."""
    return _CODES[code] if code < len(_CODES) else "BADVERS" if code == wire.BADVERS else OTHER


def type_text(qtype: int) -> str:
    """A record type's name in the metrics."""
    return _TYPES.get(qtype, OTHER)


def _counted(made: Compiled, query: Query, zone: str, plugin: str = "") -> Made:
    return Made(made, Labels(zone, type_text(query.qtype), code_text(made.code), plugin))
