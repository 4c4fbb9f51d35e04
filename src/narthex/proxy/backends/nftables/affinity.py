"""Chains and sets of Service ports with ClientIP affinity: one dynamic set of clients per endpoint.

All frontends of a Service port share the record of a client (row 14.2), so it is kept by endpoint, not by frontend. The
chain of a pool queries only the sets of the pool's endpoints (row 14.5), in the pool's order. The set of an endpoint is
removed with the endpoint, so that no client stays bound to it (row 14.3).

Names consist of characters that nft can read; a hash of the Service port's identity makes them unique.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from narthex.model import ServicePortName
from narthex.netfilter.ast import Chain, Compare, Dnat, Field, Goto, InSet, RandomGoto, Rule, Set, UpdateSet
from narthex.proxy.backends.nftables.frame import NftSettings
from narthex.proxy.backends.nftables.rows import NOT_SENT, Cells, chain_name, marking_chain, sender_chain
from narthex.proxy.plan.ir import Scope, ServicePlan

MOST_CLIENTS = 65535
"""Maximum number of clients in the set of one endpoint. Further clients are forwarded without being remembered."""

_SLUG_LENGTH = 40
_OTHER_LETTERS = re.compile(r"[^a-z0-9-]+")
_SOURCE = (Field.SADDR,)


def label(name: ServicePortName) -> str:
    """Return a readable and unique name part: `shop/web/http-0123456789ab`."""
    parts = (name.service.namespace, name.service.name, name.port or name.protocol.lower)
    slug = "/".join(_OTHER_LETTERS.sub("-", part) for part in parts)[:_SLUG_LENGTH]
    identity = "\0".join((*name.service, name.port, name.protocol.value))
    return f"{slug}-{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def affinity_chain(service: ServicePlan, cells: Cells) -> str:
    """Return the name of the chain for frontends with these cells: `c`, `cm`, `l`, `lm`, or `x`."""
    return chain_name(f"sticky-{label(service.name)}", cells)  # codespell:ignore sticky


def affinity_sets(service: ServicePlan) -> Iterator[Set]:
    """Yield one set of clients per endpoint of either pool."""
    timeout = service.affinity_seconds or 0
    for _, _, clients in _endpoints(service, None):
        yield Set(name=clients, key=_SOURCE, dynamic=True, timeout=timeout, size=MOST_CLIENTS)


def affinity_chains(service: ServicePlan, rows: frozenset[Cells], settings: NftSettings) -> Iterator[Chain]:
    """Yield the chains of the rows that the Service's frontends use, and all chains that these call."""
    name = label(service.name)
    prefix = f"sticky-{name}"  # codespell:ignore sticky
    for cells in rows:
        yield from sender_chain(prefix, cells, settings)
    used = {cell for cells in rows for cell in cells} - {NOT_SENT}
    for cell in sorted({cell[0] for cell in used} | used):
        if cell.endswith("m"):
            yield marking_chain(prefix, cell, settings)
        else:
            scope = Scope.CLUSTER if cell == "c" else Scope.LOCAL
            yield Chain(name=f"{prefix}-{cell}", rules=_draw(service, scope))
    for endpoint, chain, clients in _endpoints(service, None):
        send = Dnat(*endpoint)
        known = Rule((UpdateSet(_SOURCE, clients),))
        yield Chain(name=chain, rules=(known, Rule((Compare(Field.L4PROTO, (service.name.protocol.lower,)), send))))


def _draw(service: ServicePlan, scope: Scope) -> tuple[Rule, ...]:
    ways = list(_endpoints(service, scope))
    if len(ways) == 1:
        return (Rule((Goto(ways[0][1]),)),)
    known = [Rule((InSet(_SOURCE, clients), Goto(chain))) for _, chain, clients in ways]
    return (*known, Rule((RandomGoto(tuple(chain for _, chain, _ in ways)),)))


def _endpoints(service: ServicePlan, scope: Scope | None) -> Iterator[tuple[tuple[str, int], str, str]]:
    """Yield address and port, chain, and set of each endpoint of one pool, or of both."""
    name = label(service.name)
    pools = service.pools.values() if scope is None else (service.pool(scope),)
    seen = {(one.address, one.port): None for pool in pools for one in pool.endpoints}
    for endpoint in seen:
        yield endpoint, _at(f"stick-{name}", *endpoint), _at(f"affinity-{name}", *endpoint)


def _at(prefix: str, address: str, port: int) -> str:
    return f"{prefix}-{address.replace(':', '.')}/{port}"
