"""One port's questions: read, given to the server block that they belong to, answered or handed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from narthex.dns.interfaces import Query, Resolver, Transport, limit
from narthex.dns.message import names, wire
from narthex.dns.message.answer import Cluster, Outside
from narthex.dns.plugins.external import ExternalZone
from narthex.dns.zone.compiled import Compiled, bad_version, response
from narthex.dns.zone.zone import Unknown

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
EXTERNAL = "k8s_external"
_CODES = ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED")


class Searcher(Resolver, Protocol):
    """Knows what else a name may stand for that does not exist."""

    def takes(self, query: Query) -> bool:
        """Whether the question may stand for another one at all."""


class Block(NamedTuple):
    """A server block, as far as answering goes."""

    zones: tuple[str, ...]
    cluster: Cluster | None
    resolver: Resolver | None
    searcher: Searcher | None = None
    """Is asked about names that the cluster does not have (plugin autopath)."""
    external: ExternalZone | None = None


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
    alone: Compiled | None = None
    """What those get for whom nobody else is asked; None: they are refused."""


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

    __slots__ = ("behind", "counter", "head")

    def __init__(self, head: bytes, behind: bytes, counter: list[int]) -> None:
        self.head = head
        self.behind = behind
        self.counter = counter


class _Below:
    """What is known of names with one label in front of others, asked in one way."""

    __slots__ = ("extra", "kind", "services", "shapes", "tail")

    def __init__(self, tail: bytes, kind: Unknown, services: Mapping[bytes, object], extra: int) -> None:
        self.tail = tail
        self.kind = kind
        self.services = services
        self.extra = extra
        """Bytes behind the question."""
        self.shapes: dict[int, Shape] = {}
        """By the length of the label."""


_MOST_SUFFIXES = 2048
_HEAD = wire.HEADER.size - 2
"""Of a header, behind the id."""


class Desk:
    """All blocks of one port."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._by_zone = {names.wire(zone).lower(): (block, zone) for block in blocks for zone in block.zones}
        self.main_zone = blocks[0].zones[0] if blocks and blocks[0].zones else DROPPED
        """Where times are counted that many answers have in common."""
        self._closed = {
            zone: block.cluster
            for block in blocks
            if block.cluster is not None
            for zone in block.cluster.closed_zones()
            if self._block(zone)[0] is block
            and not any(names.within(other, zone) for other in self._by_zone if other != zone)
            and not (block.external and any(names.within(other, zone) for other in block.external.zones))
        }
        """Zones whose unknown names are answered here, whatever they are."""
        self._below: dict[bytes, dict[bytes, _Below]] = {}
        """By the header behind the id, then by all that follows the first label."""
        self._suffixes = 0

    def changed(self) -> None:
        """A zone is another one now, or counters are taken away."""
        self._below.clear()
        self._suffixes = 0

    def unknown(self, key: bytes) -> tuple[bytes, Shape] | None:
        """The short way for names that do not exist, over UDP: a packet behind its id in, the response behind its id
        out, as `handle` would make it. None: go the long way, and `learn` from it.

        In many clusters most questions are such, by search lists, and there is no end of them.
        """
        rests = self._below.get(key[:_HEAD])
        if rests is None or len(key) == _HEAD:
            return None
        length = key[_HEAD]
        at = _HEAD + 1 + length
        below = rests.get(key[at:])
        if below is None:
            return None
        shape = below.shapes.get(length)
        if shape is None or (below.kind == "unless a service" and key[_HEAD:at].lower() + below.tail in below.services):
            return None
        return shape.head + key[_HEAD : len(key) - below.extra] + shape.behind, shape

    def learn(self, key: bytes, made: Made, counter: list[int]) -> None:
        """Remember what can be told from a name that does not exist about its like. `counter` counts them all."""
        if made.labels.plugin != KUBERNETES or made.compiled.code != wire.NXDOMAIN:
            return
        length = key[_HEAD]
        at = _HEAD + 1 + length
        end = at
        while key[end]:
            end += 1 + key[end]
        end += 1
        name = key[at:end].lower()
        zone = next((suffix for suffix in names.suffixes(name) if suffix in self._closed), None)
        if zone is None:
            return
        cluster = self._closed[zone].zone
        tail = name[: -len(zone)]
        kind = cluster.unknown_below(tail)
        if kind is None:
            return
        if self._suffixes >= _MOST_SUFFIXES:
            self.changed()
        rests = self._below.setdefault(key[:_HEAD], {})
        question_end = end + wire.QUESTION_TAIL.size
        below = rests.get(key[at:])
        if below is None:
            below = rests[key[at:]] = _Below(tail, kind, cluster.services, len(key) - question_end)
            self._suffixes += 1
        answer = made.compiled.tail
        below.shapes[length] = Shape(answer[:_HEAD], answer[question_end:], counter)

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
        if block.external is not None:
            made = self._external(query, block.external, most)
            if made is not None:
                return _counted(made, query, zone, EXTERNAL)
        if block.cluster is not None:
            ours = block.cluster.zone_of(query.name)
            if ours is not None:
                found = block.cluster.answer(query, ours, most)
                if isinstance(found, Compiled):
                    searcher = block.searcher
                    if found.code == wire.NXDOMAIN and searcher is not None and searcher.takes(query):
                        return Ask(query, searcher, zone, outside, found)
                    return _counted(found, query, zone, KUBERNETES)
                outside = found
        if block.resolver is not None:
            return Ask(query, block.resolver, zone, outside)
        if outside.links and block.cluster is not None:
            return _counted(block.cluster.alone(query, outside, most), query, zone, KUBERNETES)
        return _counted(response(query, wire.REFUSED, most), query, zone)

    def _external(self, query: Query, external: ExternalZone, most: int) -> Compiled | None:
        theirs = external.zone_of(query.name)
        return None if theirs is None else external.answer(query, theirs, most)

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
