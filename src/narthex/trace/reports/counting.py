"""New connections of any Service proxy, counted by the node's kernel.

A rule or map element in a nat chain counts the first packet of each connection. Where rules have no counters, the connection table
shows the connections; new ones are those that the reading before didn't have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from narthex.model.net import join_port, split_port

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
    """Where the figures come from."""
    counts: tuple[ConnectionCounter, ...] = ()
    sampled: bool = False
    """Read from the connection table: short connections between two readings are missing."""


Names = Mapping[tuple[str, str, int], str]
"""Service port by address, protocol in lower case and port of a frontend (address "" for node ports)."""

_NAT = re.compile(r"^\*nat\n(.*?)^COMMIT", re.MULTILINE | re.DOTALL)
_SENDS = re.compile(r"^\[(\d+):\d+\] -A (KUBE-SEP-\S+) (.*-j DNAT .*--to-destination (\S+).*)$", re.MULTILINE)
_LEADS = re.compile(r"^(?:\[\d+:\d+\] )?-A (KUBE-(?:SVC|SVL|XLB|FW|EXT)-\S+) (.*)-j (KUBE-SEP-\S+)", re.MULTILINE)
_INTO = re.compile(
    r"^(?:\[\d+:\d+\] )?-A KUBE-(?:SERVICES|NODEPORTS) (.*)-j (KUBE-(?:SVC|SVL|XLB|FW|EXT)-\S+)", re.MULTILINE
)
_COMMENT = re.compile(r'--comment (?:"([^"]*)"|(\S+))')
_SERVICE = re.compile(r"([a-z0-9.-]+/[a-z0-9.-]+(?::[a-z0-9-]*)?)(?: |$)")


def count(
    rules: Iterable[str], nft: str, ipvs: str, connections: Callable[[], Iterable[ConnectionLike]] | None, names: Names
) -> CounterReading:
    """Read the best available source: iptables rules, nftables elements, IPVS, or the connection table."""
    found = [one for text in rules for one in of_iptables(text)]
    if found:
        return CounterReading(source="counters of iptables rules", counts=tuple(found))
    found = list(of_nft(nft, names))
    if found:
        return CounterReading(source="counters of nftables elements", counts=tuple(found))
    found = list(of_ipvs(ipvs, names))
    if found:
        return CounterReading(source="counters of IPVS", counts=tuple(found))
    if connections is None:
        return CounterReading(source="nothing: no rule with counters is there, and the connection table is not known")
    return CounterReading(
        source="the connection table: connections that begin and end between two looks are not seen",
        counts=tuple(of_connections(connections(), names)),
        sampled=True,
    )


def of_iptables(text: str) -> Iterator[ConnectionCounter]:
    """Read `iptables-save -c`: the rule in each endpoint's chain that rewrites the destination."""
    for table in _NAT.finditer(text):
        body = table[1]
        owner = {match[2]: name for match in _INTO.finditer(body) if (name := _service(match[1]))}
        of_endpoint: dict[str, str] = {}
        for match in _LEADS.finditer(body):
            name = owner.get(match[1]) or _service(match[2])
            if name:
                of_endpoint.setdefault(match[3], name)
        for match in _SENDS.finditer(body):
            name = _service(match[3]) or of_endpoint.get(match[2], "")
            yield ConnectionCounter(match[2], name, match[4], int(match[1]))


def _service(words: str) -> str:
    """Return the Service port at the start of a rule's comment."""
    comment = _COMMENT.search(words)
    found = _SERVICE.match(comment[1] or comment[2] or "") if comment else None
    return found[1].rstrip(":") if found else ""


_MAP = re.compile(r"^\tmap ([a-z0-9-]+) \{\n(.*?)^\t\}", re.MULTILINE | re.DOTALL)
_FRONTEND = re.compile(r"(?:(\S+) \. )?(tcp|udp|sctp) \. (\d+) counter packets (\d+) bytes \d+ : (?:goto|jump) ")
_ENDPOINT = re.compile(
    r"(?:(\S+) \. )?(tcp|udp|sctp) \. (\d+) \. (\d+) counter packets (\d+) bytes \d+ : (\S+) \. (\d+)"
)


def of_nft(text: str, names: Names) -> Iterator[ConnectionCounter]:
    """Read `nft list ruleset`: map elements with counters, as Narthex has them."""
    for held in _MAP.finditer(text):
        endpoints = {match.span()[0]: match for match in _ENDPOINT.finditer(held[2])}
        for match in endpoints.values():
            address, protocol, port, slot, packets, to, to_port = match.groups()
            name = names.get((address or "", protocol, int(port)), "")
            key = f"{held[1]} {address or ''} {protocol} {port} {slot} {to} {to_port}"
            yield ConnectionCounter(
                key, name or f"{address or 'node'}:{port}/{protocol}", join_port(to, int(to_port)), int(packets)
            )
        for match in _FRONTEND.finditer(held[2]):
            address, protocol, port, packets = match.groups()
            name = names.get((address or "", protocol, int(port)), "")
            title = name or f"{address or 'node'}:{port}/{protocol}"
            yield ConnectionCounter(f"{held[1]} {address or ''} {protocol} {port}", title, "", int(packets))


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


class ConnectionLike(NamedTuple):
    """The fields of a connection that counting needs."""

    protocol: str
    source: str
    source_port: int
    destination: str
    port: int
    reply_source: str
    reply_port: int


def of_connections(connections: Iterable[ConnectionLike], names: Names) -> Iterator[ConnectionCounter]:
    """Yield a counter of 1 for each connection to a Service."""
    for one in connections:
        name = names.get((one.destination, one.protocol, one.port)) or ""
        rewritten = (one.reply_source, one.reply_port) != (one.destination, one.port)
        if not name and rewritten:
            name = names.get(("", one.protocol, one.port), "")
        if not (name or rewritten) or not rewritten:
            continue
        key = " ".join(map(str, one))
        title = name or f"{join_port(one.destination, one.port)}/{one.protocol}"
        yield ConnectionCounter(key, title, join_port(one.reply_source, one.reply_port), 1)


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
    services = list(dict.fromkeys(service for service, _ in total))
    made: list[TopRow] = []
    for service in services:
        parts = [key for key in total if key[0] == service and key[1]]
        whole = (service, "")
        # Frontends count what their endpoints count, too, but for Service ports with chains of their own.
        figures = [whole] if whole in total else parts
        made.append(_row(service, "", figures, total, fresh, before is not None, seconds))
        made += [_row(service, key[1], [key], total, fresh, before is not None, seconds) for key in parts]
    return tuple(made)


def _row(
    service: str,
    endpoint: str,
    keys: list[Key],
    total: dict[Key, int],
    fresh: dict[Key, int],
    two: bool,
    seconds: float,
) -> TopRow:
    rate = sum(fresh[key] for key in keys) / seconds if two and seconds > 0 else None
    return TopRow(service=service, endpoint=endpoint, connections=sum(total[key] for key in keys), per_second=rate)


def ordered(found: tuple[TopRow, ...], by: str) -> tuple[TopRow, ...]:
    """Sort Service ports by `rate`, `total` or `name`, each with its endpoints in the same order."""
    groups: dict[str, list[TopRow]] = {}
    for row in found:
        groups.setdefault(row.service, []).append(row)

    def key(row: TopRow) -> tuple[float, float, str]:
        rate = -(row.per_second or 0.0) if by == "rate" else 0.0
        most = -row.connections if by in ("rate", "total") else 0
        return rate, most, row.endpoint or row.service

    heads = sorted((group[0] for group in groups.values()), key=key)
    return tuple(row for head in heads for row in (head, *sorted(groups[head.service][1:], key=key)))
