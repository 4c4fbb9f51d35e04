"""Chains that many Services share: one per distinct row of decisions, one per endpoint map.

A row is what a frontend does with the three classes of sender, each as a cell: `c` forwards to the cluster pool, `lm`
to the local pool with masquerading, `x` does not forward. `send-c-c-cm` distinguishes the classes, `send-cm` sets the
mark, and `send-c` selects an endpoint: it has one rule per distinct number of endpoints, for the frontends in the set
of that number. `nodeport-...` is the same with the keys, sets, and maps of node ports. `refuse-a-a-d` is used in the
filter hooks: `a` accepts (the packet was forwarded), `d` drops, `r` rejects.

The number of chains and rules therefore grows with distinct rows and endpoint counts, not with Services. The count is
not part of the verdict, because adding a verdict that jumps to a chain makes the kernel traverse all verdict maps of
the table (ADR 0005).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from narthex.netfilter.ast import (
    Chain,
    DnatMap,
    DropPacket,
    Expression,
    Goto,
    InSet,
    Key,
    MarkOr,
    Return,
    Rule,
    Set,
    Slot,
    Verdict,
)
from narthex.proxy.backends.nftables.frame import (
    ADDRESS_KEY,
    ENDPOINTS,
    ENDPOINTS_LOCAL,
    NODEPORT_ENDPOINTS,
    NODEPORT_ENDPOINTS_LOCAL,
    PORT_KEY,
    REJECT_CHAIN,
    NftSettings,
    by_sender,
)
from narthex.proxy.plan.ir import Decision, Drop, Forward, Frontend, Scope

SEND, NODEPORT, REFUSE = "send", "nodeport", "refuse"
NOT_SENT = "x"

Cells = tuple[str, str, str]
"""Cells for pods, this node, and others."""

_LETTERS = {Scope.CLUSTER: "c", Scope.LOCAL: "l"}
_KEYS: Mapping[str, Key] = {SEND: ADDRESS_KEY, NODEPORT: PORT_KEY}

ENDPOINT_MAPS = {
    (SEND, Scope.CLUSTER): ENDPOINTS,
    (SEND, Scope.LOCAL): ENDPOINTS_LOCAL,
    (NODEPORT, Scope.CLUSTER): NODEPORT_ENDPOINTS,
    (NODEPORT, Scope.LOCAL): NODEPORT_ENDPOINTS_LOCAL,
}
"""Maps of the endpoints of a pool, for frontends with an address and for node ports."""


class DecisionRow(NamedTuple):
    """A chain, identified by what it does; equal rows share one chain."""

    kind: str
    cells: Cells

    @property
    def chain(self) -> str:
        """Name of the chain. If all cells are equal, this is the chain that marks or selects."""
        return chain_name(self.kind, self.cells)


class EndpointCount(NamedTuple):
    """A number of endpoints that some frontends have in one endpoint map."""

    kind: str
    scope: Scope
    number: int

    @property
    def frontends(self) -> str:
        """Name of the set of these frontends: `services-of-10`, `nodeports-of-2-local`."""
        local = "-local" if self.scope is Scope.LOCAL else ""
        return f"{'services' if self.kind == SEND else 'nodeports'}-of-{self.number}{local}"


def chain_name(prefix: str, cells: Cells) -> str:
    """Return `prefix-c-cm-cm`, or `prefix-c` if all cells are equal."""
    return f"{prefix}-{cells[0]}" if len(set(cells)) == 1 else "-".join((prefix, *cells))


def decisions(frontend: Frontend, settings: NftSettings) -> tuple[Decision, Decision, Decision]:
    """Return the decisions for pods, this node, and others; without pod detection the first is the node's."""
    return frontend.pod if settings.pods.enabled else frontend.node, frontend.node, frontend.other


def send_cell(decision: Decision) -> str:
    """Return the cell of a decision in the nat hooks: `c`, `lm`, and so on."""
    if not isinstance(decision, Forward):
        return NOT_SENT
    return f"{_LETTERS[decision.scope]}{'m' if decision.masquerade else ''}"


def refuse_cell(decision: Decision) -> str:
    """Return the cell of a decision in the filter hooks: `a`, `d`, or `r`."""
    return "a" if isinstance(decision, Forward) else "d" if isinstance(decision, Drop) else "r"


def refuse_verdict(row: DecisionRow) -> Verdict:
    """Return the verdict that the maps of refused frontends hold for a row. The usual rows need no chain of their own."""
    if set(row.cells) == {"d"}:
        return DropPacket()
    return Goto(REJECT_CHAIN if set(row.cells) == {"r"} else row.chain)


def row_chains(row: DecisionRow, settings: NftSettings) -> Iterator[Chain]:
    """Yield the chain of a row, and the chains that mark before an endpoint is selected."""
    if row.kind == REFUSE:
        if len(set(row.cells)) > 1:
            yield Chain(name=row.chain, rules=by_sender(settings, *map(_refusal, row.cells)))
        return
    yield from sender_chain(row.kind, row.cells, settings)
    for cell in sorted(set(row.cells)):
        if cell.endswith("m"):
            yield marking_chain(row.kind, cell, settings)


def sender_chain(prefix: str, cells: Cells, settings: NftSettings) -> Iterator[Chain]:
    """Yield the chain that distinguishes senders, unless all have the same cell."""
    if len(set(cells)) > 1:
        verdicts: list[Verdict] = [Return() if cell == NOT_SENT else Goto(f"{prefix}-{cell}") for cell in cells]
        yield Chain(name=chain_name(prefix, cells), rules=by_sender(settings, *verdicts))


def marking_chain(prefix: str, cell: str, settings: NftSettings) -> Chain:
    """Return the chain of a cell that masquerades: it sets the mark and goes to the chain of the plain cell."""
    draw = Goto(f"{prefix}-{cell.removesuffix('m')}")
    return Chain(name=f"{prefix}-{cell}", rules=(Rule((MarkOr(settings.mark), draw)),))


def draw_chains(counts: Iterable[EndpointCount]) -> Iterator[Chain]:
    """Return the chains that select an endpoint with equal probability: one rule per count."""
    rules: dict[str, list[Rule]] = {}
    for count in sorted(counts, key=lambda one: one.number):
        key = _KEYS[count.kind]
        send = DnatMap((*key, Slot(count.number)), ENDPOINT_MAPS[count.kind, count.scope])
        chain = f"{count.kind}-{_LETTERS[count.scope]}"
        rules.setdefault(chain, []).append(Rule((InSet(key, count.frontends), send)))
    return (Chain(name=name, rules=tuple(some)) for name, some in rules.items())


def count_sets(counts: frozenset[EndpointCount]) -> Mapping[str, Set]:
    """Return the declarations of the sets of frontends by count."""
    return {count.frontends: Set(name=count.frontends, key=_KEYS[count.kind]) for count in counts}


def _refusal(cell: str) -> Expression:
    verdicts: dict[str, Expression] = {"a": Return(), "d": DropPacket(), "r": Goto(REJECT_CHAIN)}
    return verdicts[cell]
