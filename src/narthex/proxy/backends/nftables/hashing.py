"""Chains and maps of Service ports with consistent hashing: one map for each pool, from slot to endpoint.

The rule of a pool hashes the client's address to a slot, so all frontends of the Service port share the map. A change of one
endpoint changes few elements of the map. `narthex.proxy.plan.maglev` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from narthex.netfilter.ast import Chain, Compare, DnatMap, Field, HashedFields, Rule, Set
from narthex.netfilter.netlink.slot_map import SlotMap, Slots
from narthex.proxy.backends.nftables.affinity import label
from narthex.proxy.backends.nftables.frame import ANY_SLOT, NftSettings
from narthex.proxy.backends.nftables.rows import NOT_SENT, Cells, chain_name, marking_chain, sender_chain
from narthex.proxy.plan.ir import Pool, Scope, ServicePlan
from narthex.proxy.plan.maglev import SEED, lookup_table

_LETTERS = {Scope.CLUSTER: "c", Scope.LOCAL: "l"}


def hashing_chain(service: ServicePlan, cells: Cells) -> str:
    """Return the name of the chain for frontends with these cells: `c`, `cm`, `l`, `lm`, or `x`."""
    return chain_name(_prefix(service), cells)


def hashing_map(service: ServicePlan, scope: Scope) -> str:
    """Return the name of the map of a pool."""
    return f"{_prefix(service)}-{_LETTERS[scope]}"


def hashing_chains(service: ServicePlan, rows: frozenset[Cells], settings: NftSettings) -> Iterator[Chain]:
    """Yield the chains of the rows that the frontends use, and all chains that these call."""
    prefix = _prefix(service)
    for cells in rows:
        yield from sender_chain(prefix, cells, settings)
    used = {cell for cells in rows for cell in cells} - {NOT_SENT}
    for cell in sorted({cell[0] for cell in used} | used):
        if cell.endswith("m"):
            yield marking_chain(prefix, cell, settings)
        else:
            scope = Scope.CLUSTER if cell == "c" else Scope.LOCAL
            yield Chain(name=f"{prefix}-{cell}", rules=(_draw(service, scope),))


def declared_map(service: ServicePlan, scope: Scope) -> Set:
    """Return the declaration of the map of a pool, without elements."""
    return Set(name=hashing_map(service, scope), key=(ANY_SLOT,), data="endpoint", counter=True)


def hashing_maps(service: ServicePlan, slots: dict[Scope, Slots]) -> Iterator[Set]:
    """Yield the maps of the pools with their elements."""
    for scope, run in slots.items():
        elements = SlotMap()
        elements.runs[()] = run
        declared = declared_map(service, scope)
        yield Set(name=declared.name, key=declared.key, data=declared.data, counter=declared.counter, elements=elements)


def hashed_slots(pool: Pool | None) -> Slots:
    """Return the endpoint of each slot."""
    if pool is None:
        return ()
    known = {each: (each.address, each.port) for each in pool.endpoints}
    return tuple([known[each] for each in lookup_table(pool.endpoints)])


def _draw(service: ServicePlan, scope: Scope) -> Rule:
    count = len(lookup_table(service.pool(scope).endpoints))
    number = HashedFields((Field.SADDR,), count, SEED)
    # A rewritten port requires that the rule names the protocol.
    protocol = Compare(Field.L4PROTO, (service.name.protocol.lower,))
    return Rule((protocol, DnatMap((number,), hashing_map(service, scope))))


def _prefix(service: ServicePlan) -> str:
    return f"maglev-{label(service.name)}"
