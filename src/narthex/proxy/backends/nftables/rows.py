"""Chains that many Services share: one per distinct row of decisions, one per endpoint map that draws.

A row is what a frontend does with the three classes of sender, each as a cell: `c` sends to the cluster pool, `lm` to the
local one and masquerades, `x` does not send. `send-c-c-cm` tells the classes apart, `send-cm` marks, and `send-c` draws:
it has one rule per distinct number of endpoints, for the frontends in the set of that number. `nodeport-…` is the same
with the node port's keys, sets and maps. `refuse-a-a-d` stands in the filter hooks: `a` lets pass (it was sent), `d`
drops, `r` rejects.

So the number of chains and rules grows with distinct rows and endpoint counts, never with Services. The count is not part
of the verdict: whenever a verdict that leads to a chain is added, the kernel looks through all verdict maps of the table
(ADR 0005).
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
"""For pods, this node, others."""

_LETTERS = {Scope.CLUSTER: "c", Scope.LOCAL: "l"}
_KEYS: Mapping[str, Key] = {SEND: ADDRESS_KEY, NODEPORT: PORT_KEY}

ENDPOINT_MAPS = {
    (SEND, Scope.CLUSTER): ENDPOINTS,
    (SEND, Scope.LOCAL): ENDPOINTS_LOCAL,
    (NODEPORT, Scope.CLUSTER): NODEPORT_ENDPOINTS,
    (NODEPORT, Scope.LOCAL): NODEPORT_ENDPOINTS_LOCAL,
}
"""Where the endpoints of a pool stand, for frontends with an address and for node ports."""


class DecisionRow(NamedTuple):
    """A chain by what it does; equal rows are one chain."""

    kind: str
    cells: Cells

    @property
    def chain(self) -> str:
        """The chain's name. A row that does the same for all is the chain that marks or draws."""
        return chain_name(self.kind, self.cells)


class EndpointCount(NamedTuple):
    """A number of endpoints that some frontends have in one endpoint map."""

    kind: str
    scope: Scope
    number: int

    @property
    def frontends(self) -> str:
        """The set of those frontends: `services-of-10`, `nodeports-of-2-local`."""
        local = "-local" if self.scope is Scope.LOCAL else ""
        return f"{'services' if self.kind == SEND else 'nodeports'}-of-{self.number}{local}"


def chain_name(prefix: str, cells: Cells) -> str:
    """`prefix-c-cm-cm`, or `prefix-c` when all classes fare alike."""
    return f"{prefix}-{cells[0]}" if len(set(cells)) == 1 else "-".join((prefix, *cells))


def decisions(frontend: Frontend, settings: NftSettings) -> tuple[Decision, Decision, Decision]:
    """For pods, this node, others. Without pod detection nobody is a pod, and the cell must make no difference."""
    return frontend.pod if settings.pods.enabled else frontend.node, frontend.node, frontend.other


def send_cell(decision: Decision) -> str:
    """`c`, `lm` and the like."""
    if not isinstance(decision, Forward):
        return NOT_SENT
    return f"{_LETTERS[decision.scope]}{'m' if decision.masquerade else ''}"


def refuse_cell(decision: Decision) -> str:
    """`a`, `d` or `r`."""
    return "a" if isinstance(decision, Forward) else "d" if isinstance(decision, Drop) else "r"


def refuse_verdict(row: DecisionRow) -> Verdict:
    """What the maps of refused frontends hold for a row; the usual rows need no chain of their own."""
    if set(row.cells) == {"d"}:
        return DropPacket()
    return Goto(REJECT_CHAIN if set(row.cells) == {"r"} else row.chain)


def row_chains(row: DecisionRow, settings: NftSettings) -> Iterator[Chain]:
    """The chain of a row, and those that mark before the draw."""
    if row.kind == REFUSE:
        if len(set(row.cells)) > 1:
            yield Chain(name=row.chain, rules=by_sender(settings, *map(_refusal, row.cells)))
        return
    if len(set(row.cells)) > 1:
        yield Chain(name=row.chain, rules=by_sender(settings, *(_towards(row.kind, cell) for cell in row.cells)))
    for cell in sorted(set(row.cells)):
        if cell.endswith("m"):
            draw = Goto(f"{row.kind}-{cell.removesuffix('m')}")
            yield Chain(name=f"{row.kind}-{cell}", rules=(Rule((MarkOr(settings.mark), draw)),))


def draw_chains(counts: Iterable[EndpointCount]) -> Iterator[Chain]:
    """The chains that send to one of the endpoints, each equally likely: a rule per count."""
    rules: dict[str, list[Rule]] = {}
    for count in sorted(counts, key=lambda one: one.number):
        key = _KEYS[count.kind]
        send = DnatMap((*key, Slot(count.number)), ENDPOINT_MAPS[count.kind, count.scope])
        chain = f"{count.kind}-{_LETTERS[count.scope]}"
        rules.setdefault(chain, []).append(Rule((InSet(key, count.frontends), send)))
    return (Chain(name=name, rules=tuple(some)) for name, some in rules.items())


def count_sets(counts: frozenset[EndpointCount]) -> Mapping[str, Set]:
    """The sets of frontends by count, declared."""
    return {count.frontends: Set(name=count.frontends, key=_KEYS[count.kind]) for count in counts}


def _refusal(cell: str) -> Expression:
    verdicts: dict[str, Expression] = {"a": Return(), "d": DropPacket(), "r": Goto(REJECT_CHAIN)}
    return verdicts[cell]


def _towards(kind: str, cell: str) -> Verdict:
    return Return() if cell == NOT_SENT else Goto(f"{kind}-{cell}")
