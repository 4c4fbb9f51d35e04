"""A reading of a node's connection counters, from its tools or a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from narthex.model.store import Snapshot
from narthex.trace.node.layout import CNI_FILE, PARTS
from narthex.trace.node.network import ConntrackListing
from narthex.trace.program.bundle_file import read_bundle
from narthex.trace.program.gather import gather
from narthex.trace.reports.counting import ConnectionLike, CounterReading, Names, count

_RULES = tuple(part.path for part in PARTS if part.path.startswith("rules/ip") and "tables" in part.path)
_NFT, _IPVS, _CONNECTIONS = "rules/nft.txt", "rules/ipvs-stats.txt", ("net/conntrack-4.txt", "net/conntrack-6.txt")
_WANTED = (*_RULES, _NFT, _IPVS)


def names_of(snapshot: Snapshot) -> Names:
    """Return the Service ports by address, protocol, and port of their frontends."""
    found: dict[tuple[str, str, int], str] = {}
    for service in snapshot.services.values():
        balancers = tuple(entry.ip for entry in service.ingress)
        for port in service.ports:
            name = f"{service.key}" + (f":{port.name}" if port.name else "")
            for address in (*service.cluster_ips, *service.external_ips, *balancers):
                found[address, port.protocol.lower, port.port] = name
            if port.node_port:
                found["", port.protocol.lower, port.node_port] = name
    return found


def look(names: Names, namespace: str | None = None) -> CounterReading:
    """Read the counters of this node, and the connection table only if there are none."""
    every = frozenset(part.path for part in PARTS) | {CNI_FILE}
    parts = gather("", namespace, without=every - set(_WANTED)).parts
    return _counted(parts, names, lambda: gather("", namespace, without=every - set(_CONNECTIONS)).parts)


def look_at_bundle(path: Path, names: Names) -> CounterReading:
    """Read the counters of a bundle. Raises BundleError."""
    parts = read_bundle(path).parts
    return _counted(parts, names, lambda: parts)


def _counted(parts: Mapping[str, str], names: Names, more: Callable[[], Mapping[str, str]]) -> CounterReading:
    texts = [parts[path] for path in _RULES if path in parts]
    first = count(texts, parts.get(_NFT, ""), parts.get(_IPVS, ""), None, names)
    if first.counts:
        return first
    held = more()
    known = [held[path] for path in _CONNECTIONS if path in held]
    if not known:
        return first
    return count((), "", "", lambda: _connections("\n".join(known)), names)


def _connections(text: str) -> Iterator[ConnectionLike]:
    for one in ConntrackListing(text).all():
        yield ConnectionLike(
            one.protocol,
            one.source,
            one.source_port,
            one.destination,
            one.port,
            one.reply_source,
            one.reply_source_port,
        )
