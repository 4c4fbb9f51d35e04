"""Service ports with ClientIP affinity: chains of their own, and one dynamic set of clients per endpoint.

The record of a client is shared by all frontends of a Service port (row 14.2), so it is kept by endpoint and not by
frontend. A chain for one pool asks the sets of that pool's endpoints only (row 14.5), in the pool's order; an endpoint
that leaves takes its set along, so that nobody stays pinned to it (row 14.3).

Names are built of letters that nft can read; what makes them unique is a hash of the Service port's identity.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from narthex.model.names import ServicePortName
from narthex.netfilter.ast import (
    Chain,
    Compare,
    Dnat,
    Field,
    Goto,
    InSet,
    MarkOr,
    RandomGoto,
    Return,
    Rule,
    Set,
    UpdateSet,
    Verdict,
)
from narthex.proxy.backends.nftables.frame import NftSettings, by_sender
from narthex.proxy.backends.nftables.rows import NOT_SENT, Cells, chain_name
from narthex.proxy.plan.ir import Scope, ServicePlan

MOST_CLIENTS = 65535
"""Clients that one endpoint's set remembers; beyond that a new client is sent on unremembered."""

_SLUG_LENGTH = 40
_OTHER_LETTERS = re.compile(r"[^a-z0-9-]+")
_SOURCE = (Field.SADDR,)


def label(name: ServicePortName) -> str:
    """`shop/web/http-0123456789ab`: for people the first part, unique by the second."""
    parts = (name.service.namespace, name.service.name, name.port or name.protocol.lower)
    slug = "/".join(_OTHER_LETTERS.sub("-", part) for part in parts)[:_SLUG_LENGTH]
    identity = "\0".join((*name.service, name.port, name.protocol.value))
    return f"{slug}-{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def sticky_row(service: ServicePlan, cells: Cells) -> str:
    """The chain that a frontend with these cells goes to. Cells are `c`, `cm`, `l`, `lm` or `x`."""
    return chain_name(f"sticky-{label(service.name)}", cells)


def sticky_sets(service: ServicePlan) -> Iterator[Set]:
    """One set of clients per endpoint of either pool."""
    timeout = service.affinity_seconds or 0
    for _, _, clients in _endpoints(service, None):
        yield Set(name=clients, key=_SOURCE, dynamic=True, timeout=timeout, size=MOST_CLIENTS)


def sticky_chains(service: ServicePlan, rows: frozenset[Cells], settings: NftSettings) -> Iterator[Chain]:
    """The chains of the rows that the Service's frontends have, and all below them."""
    name = label(service.name)
    prefix = f"sticky-{name}"

    def towards(cell: str) -> Verdict:
        return Return() if cell == NOT_SENT else Goto(f"{prefix}-{cell}")

    for cells in rows:
        if len(set(cells)) > 1:
            yield Chain(name=chain_name(prefix, cells), rules=by_sender(settings, *map(towards, cells)))
    used = {cell for cells in rows for cell in cells} - {NOT_SENT}
    for cell in sorted({cell[0] for cell in used} | used):
        if cell.endswith("m"):
            rules: tuple[Rule, ...] = (Rule((MarkOr(settings.mark), Goto(f"{prefix}-{cell[0]}"))),)
        else:
            rules = _draw(service, Scope.CLUSTER if cell == "c" else Scope.LOCAL)
        yield Chain(name=f"{prefix}-{cell}", rules=rules)
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
    """Address and port, chain and set of each endpoint of one pool, or of both."""
    name = label(service.name)
    pools = (service.cluster, service.local) if scope is None else (service.pool(scope),)
    seen = {(one.address, one.port): None for pool in pools if pool is not None for one in pool.endpoints}
    for endpoint in seen:
        yield endpoint, _at(f"stick-{name}", *endpoint), _at(f"affinity-{name}", *endpoint)


def _at(prefix: str, address: str, port: int) -> str:
    return f"{prefix}-{address.replace(':', '.')}/{port}"
