"""New connections of any Service proxy, counted by the node's kernel.

A rule or map element in a nat chain counts the first packet of each connection. Where rules have no counters, the connection table
shows the connections; new ones are those that the reading before didn't have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from narthex.model import IPFamily, join_port, split_port
from narthex.proxy.backends.sockets.document import SocketDocument
from narthex.trace.follow.views import TrackedConnection

Key = tuple[str, str]
"""Service port and endpoint (`address:port`), or "" for the Service port as a whole."""


class ConnectionCounter(NamedTuple):
    """One counter."""

    counter: str
    """Its identity across readings; a counter that is created again starts at 0."""
    service: str
    """Empty if not known."""
    endpoint: str
    """`address:port`; empty for the Service port as a whole, where endpoints have no counters of their own."""
    connections: int


class CounterReading(msgspec.Struct, frozen=True, kw_only=True):
    """All counters at one time."""

    source: str
    counts: tuple[ConnectionCounter, ...] = ()
    sampled: bool = False
    """Read from the connection table: short connections between two readings are missing."""
    ejected: frozenset[Key] = frozenset()
    """Endpoints that get no new connections from sockets of this node."""


Names = Mapping[tuple[str, str, int], str]
"""Service port by address, protocol in lower case and port of a frontend (address "" for node ports)."""

_SENDS = re.compile(r"^\[(\d+):\d+\] -A (KUBE-SEP-\S+) ((?>.*?-j DNAT ).*--to-destination (\S+).*)$", re.MULTILINE)
_LEADS = re.compile(r"^(?:\[\d+:\d+\] )?-A (KUBE-(?:SVC|SVL|XLB|FW|EXT)-\S+) (.*)-j (KUBE-SEP-\S+)", re.MULTILINE)
_INTO = re.compile(
    r"^(?:\[\d+:\d+\] )?-A KUBE-(?:SERVICES|NODEPORTS) (.*)-j (KUBE-(?:SVC|SVL|XLB|FW|EXT)-\S+)", re.MULTILINE
)
_COMMENT = re.compile(r'--comment (?:"([^"]*)"|(\S+))')
_SERVICE = re.compile(r"([a-z0-9.-]+/[a-z0-9.-]+(?::[a-z0-9-]*)?)(?: |$)")


def count(
    rules: Iterable[str],
    nft: str,
    ipvs: str,
    connections: Callable[[], Iterable[TrackedConnection]] | None,
    names: Names,
    sockets: SocketDocument | None = None,
) -> CounterReading:
    """Read the best available source: iptables rules, nftables elements, IPVS, or the connection table.

    Rules see no connection that socket load balancing sends to an endpoint, so its counters are added to theirs.
    """
    by_sockets = tuple(of_sockets(sockets, names)) if sockets is not None else ()
    ejected = _ejected(sockets, names) if sockets is not None else frozenset()
    for source, counters in (
        ("iptables rules", (one for text in rules for one in of_iptables(text))),
        ("nftables elements", of_nft(nft, names)),
        ("IPVS", of_ipvs(ipvs, names)),
    ):
        found = tuple(counters)
        if found:
            more = " and of socket load balancing" if by_sockets else ""
            return CounterReading(source=f"counters of {source}{more}", counts=(*found, *by_sockets), ejected=ejected)
    if by_sockets:
        return CounterReading(source="counters of socket load balancing", counts=by_sockets, ejected=ejected)
    if connections is None:
        return CounterReading(source="nothing: no rule with counters is there, and the connection table is unknown")
    return CounterReading(
        source="the connection table: connections that begin and end between two looks are not seen",
        counts=tuple(of_connections(connections(), names)),
        sampled=True,
    )


def of_iptables(text: str) -> Iterator[ConnectionCounter]:
    """Read `iptables-save -c`: the rule in each endpoint's chain that rewrites the destination."""
    for body in _blocks(text, "*nat\n", "COMMIT"):
        owner = {match[2]: name for match in _INTO.finditer(body) if (name := _service(match[1]))}
        of_endpoint: dict[str, str] = {}
        for match in _LEADS.finditer(body):
            name = owner.get(match[1]) or _service(match[2])
            if name:
                of_endpoint.setdefault(match[3], name)
        for match in _SENDS.finditer(body):
            name = _service(match[3]) or of_endpoint.get(match[2], "")
            yield ConnectionCounter(match[2], name, match[4], int(match[1]))


def _blocks(text: str, begin: str, end: str) -> Iterator[str]:
    """Yield what is between a line that starts with `begin` and one that starts with `end`."""
    text = f"\n{text}"
    at = text.find(f"\n{begin}")
    while at >= 0:
        at += 1 + len(begin)
        stop = text.find(f"\n{end}", at - 1)
        if stop < 0:
            return
        yield text[at : stop + 1]
        at = text.find(f"\n{begin}", stop)


def _service(words: str) -> str:
    """Return the Service port at the start of a rule's comment."""
    comment = _COMMENT.search(words)
    found = _SERVICE.match(comment[1] or comment[2] or "") if comment else None
    return found[1].rstrip(":") if found else ""


_MAP_NAME = re.compile(r"([a-z0-9-]+) \{\n")
# A word is tried from its begin only: from each letter, a long one costs the square of its length.
_ELEMENT = r"(?<!\S)(?:(?P<address>\S++) \. )?(?P<protocol>tcp|udp|sctp) \. (?P<port>\d+) "
_COUNTED = r"counter packets (?P<packets>\d+) bytes \d+ : "
_FRONTEND = re.compile(rf"{_ELEMENT}{_COUNTED}(?:goto|jump) ")
_ENDPOINT = re.compile(rf"{_ELEMENT}\. (?P<slot>\d+) {_COUNTED}(?P<to>\S+) \. (?P<to_port>\d+)")


def of_nft(text: str, names: Names) -> Iterator[ConnectionCounter]:
    """Read `nft list ruleset`: map elements with counters, as Narthex has them."""
    for held in _blocks(text, "\tmap ", "\t}"):
        named = _MAP_NAME.match(held)
        if named is None:
            continue
        for match in (*_ENDPOINT.finditer(held), *_FRONTEND.finditer(held)):
            address, protocol, port = match["address"] or "", match["protocol"], match["port"]
            title = names.get((address, protocol, int(port)), "") or f"{address or 'node'}:{port}/{protocol}"
            key, endpoint = f"{named[1]} {address} {protocol} {port}", ""
            if match.re is _ENDPOINT:
                key += f" {match['slot']} {match['to']} {match['to_port']}"
                endpoint = join_port(match["to"], int(match["to_port"]))
            yield ConnectionCounter(key, title, endpoint, int(match["packets"]))


def of_sockets(sockets: SocketDocument, names: Names) -> Iterator[ConnectionCounter]:
    """Read the counters of socket load balancing, which count connections to all frontends of a Service port together."""
    titles = _titles(sockets, names)
    for one in sockets.connections:
        if title := titles.get(one.service, ""):
            endpoint = join_port(one.address, one.port)
            key = f"sockets {one.number} {endpoint}"
            yield ConnectionCounter(key, title, endpoint, one.connections)
            yield ConnectionCounter(f"{key} of the Service", title, "", one.connections)


def _titles(sockets: SocketDocument, names: Names) -> dict[tuple[IPFamily, int], str]:
    """Return the names of Service ports by family and number; an address where no name is known."""
    titles: dict[tuple[IPFamily, int], str] = {}
    for front in sockets.frontends:
        protocol = front.protocol.lower()
        title = names.get((front.address, protocol, front.port), "")
        if title or front.service not in titles:
            titles[front.service] = title or f"{front.address}:{front.port}/{protocol}"
    return titles


def _ejected(sockets: SocketDocument, names: Names) -> frozenset[Key]:
    titles = _titles(sockets, names)
    return frozenset(
        (titles[front.service], join_port(*endpoint))
        for front in sockets.frontends
        for endpoint in sockets.ejected_of(front)
    )


_VIRTUAL = re.compile(r"^(TCP|UDP|SCTP)\s+(\S+)\s+(\d+)\b")
_REAL = re.compile(r"^\s+->\s+(\S+)\s+(\d+)\b")


def of_ipvs(text: str, names: Names) -> Iterator[ConnectionCounter]:
    """Read `ipvsadm -L -n --stats --exact`: connections of each real server."""
    title, key = "", ""
    for line in text.splitlines():
        virtual = _VIRTUAL.match(line)
        real = _REAL.match(line)
        try:
            if virtual:
                address, port = split_port(virtual[2])
                protocol = virtual[1].lower()
                key = f"{address} {protocol} {port}"
                title = (
                    names.get((address, protocol, port))
                    or names.get(("", protocol, port))
                    or f"{virtual[2]}/{protocol}"
                )
            elif real and key:
                address, port = split_port(real[1])
                yield ConnectionCounter(f"{key} {address} {port}", title, join_port(address, port), int(real[2]))
        except ValueError:
            key = ""


def of_connections(connections: Iterable[TrackedConnection], names: Names) -> Iterator[ConnectionCounter]:
    """Yield a counter of 1 for each connection to a Service."""
    for one in connections:
        name = names.get((one.destination, one.protocol, one.port)) or ""
        if (one.reply_source, one.reply_source_port) == (one.destination, one.port):
            continue
        to = join_port(one.reply_source, one.reply_source_port)
        key = f"{one.protocol} {one.source} {one.source_port} {one.destination} {one.port} {to}"
        name = name or names.get(("", one.protocol, one.port), "")
        yield ConnectionCounter(key, name or f"{join_port(one.destination, one.port)}/{one.protocol}", to, 1)


# ---- a table -------------------------------------------------------------------------------------------------------


class TopDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="top"):
    """What `narthex top -o json` prints."""

    version: Literal[1] = 1
    source: str
    sampled: bool
    rows: tuple[TopRow, ...]


class TopRow(msgspec.Struct, frozen=True, kw_only=True):
    """A Service port, or one of its endpoints."""

    service: str
    endpoint: str = ""
    connections: int = 0
    """Since the rules were created; in the connection table: those that exist now."""
    per_second: float | None = None
    """New connections between two readings; None after a single reading."""
    name: str = ""
    """The object that owns the endpoint's address."""
    ejected: bool = False
    """Connections to the endpoint failed, so that sockets of this node get others for a limited time."""


def rows(now: CounterReading, before: CounterReading | None, seconds: float) -> tuple[TopRow, ...]:
    """Return a row for each Service port, followed by one for each of its endpoints."""
    earlier = {one.counter: one.connections for one in before.counts} if before is not None else {}
    total: dict[Key, int] = {}
    fresh: dict[Key, int] = {}
    for one in now.counts:
        was = earlier.get(one.counter, 0)
        # A counter that has gone back was made anew since.
        new = one.connections - was if one.connections >= was else one.connections
        key = one.service, one.endpoint
        total[key] = total.get(key, 0) + one.connections
        fresh[key] = fresh.get(key, 0) + new

    def row(service: str, endpoint: str, keys: list[Key]) -> TopRow:
        """Return the row with the sum of the keys' connections, and their rate if there is an earlier reading."""
        rate = sum(fresh[key] for key in keys) / seconds if before is not None and seconds > 0 else None
        connections = sum(total[key] for key in keys)
        return TopRow(
            service=service,
            endpoint=endpoint,
            connections=connections,
            per_second=rate,
            ejected=(service, endpoint) in now.ejected,
        )

    made: list[TopRow] = []
    for service in dict.fromkeys(service for service, _ in total):
        parts = [key for key in total if key[0] == service and key[1]]
        whole = (service, "")
        # Frontends count what their endpoints count, too, but for Service ports with chains of their own.
        made.append(row(service, "", [whole] if whole in total else parts))
        made += [row(service, key[1], [key]) for key in parts]
    return tuple(made)


def ordered(found: tuple[TopRow, ...], by: str) -> tuple[TopRow, ...]:
    """Sort Service ports by `rate`, `total` or `name`, each with its endpoints in the same order."""
    groups: dict[str, list[TopRow]] = {}
    for row in found:
        groups.setdefault(row.service, []).append(row)

    def key(row: TopRow) -> tuple[float, float, str]:
        """Return the sort key: highest rate or total first, then names."""
        rate = -(row.per_second or 0.0) if by == "rate" else 0.0
        most = -row.connections if by in ("rate", "total") else 0
        return rate, most, row.endpoint or row.service

    heads = sorted((group[0] for group in groups.values()), key=key)
    return tuple(row for head in heads for row in (head, *sorted(groups[head.service][1:], key=key)))
