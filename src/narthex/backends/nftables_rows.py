"""Chains that many Services share: one per distinct row of decisions, and one leaf per distinct way to send.

A row is what a frontend does with the three classes of sender, each as a cell: `c10` sends to the ten endpoints of the
cluster pool, `l2m` to the two of the local pool and masquerades, `x` does not send. `send-c10-c10m-c10m` tells the
classes apart, the leaf `send-c10m` marks and draws. `nodeport-…` is the same with the node port's keys and maps.
`refuse-a-a-d` stands in the filter hooks: `a` lets pass (it was sent), `d` drops, `r` rejects.

So the number of chains grows with distinct endpoint counts, never with Services.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from narthex.backends.nftables_frame import (
    ADDRESS_KEY,
    ENDPOINTS,
    ENDPOINTS_LOCAL,
    NODEPORT_ENDPOINTS,
    NODEPORT_ENDPOINTS_LOCAL,
    PORT_KEY,
    REJECT_CHAIN,
    Settings,
    by_sender,
)
from narthex.netfilter.ast import (
    Chain,
    DnatMap,
    DropPacket,
    Expression,
    Goto,
    MarkOr,
    Return,
    Rule,
    Slot,
    Verdict,
)
from narthex.plan.ir import Decision, Drop, Forward, Frontend, Scope

SEND, NODEPORT, REFUSE = "send", "nodeport", "refuse"
NOT_SENT = "x"

Cells = tuple[str, str, str]
"""For pods, this node, others."""

_CELL = re.compile(r"([cl])(\d+)(m?)")

ENDPOINT_MAPS = {
    (SEND, Scope.CLUSTER): ENDPOINTS,
    (SEND, Scope.LOCAL): ENDPOINTS_LOCAL,
    (NODEPORT, Scope.CLUSTER): NODEPORT_ENDPOINTS,
    (NODEPORT, Scope.LOCAL): NODEPORT_ENDPOINTS_LOCAL,
}
"""Where the endpoints of a pool stand, for frontends with an address and for node ports."""


class Row(NamedTuple):
    """A chain by what it does; equal rows are one chain."""

    kind: str
    cells: Cells

    @property
    def chain(self) -> str:
        """The chain's name. A row that does the same for all is its leaf."""
        return chain_name(self.kind, self.cells)


def chain_name(prefix: str, cells: Cells) -> str:
    """`prefix-c10-c10m-c10m`, or `prefix-c10` when all classes fare alike."""
    return f"{prefix}-{cells[0]}" if len(set(cells)) == 1 else "-".join((prefix, *cells))


def decisions(frontend: Frontend, settings: Settings) -> tuple[Decision, Decision, Decision]:
    """For pods, this node, others. Without pod detection nobody is a pod, and the cell must make no difference."""
    return frontend.pod if settings.pods.enabled else frontend.node, frontend.node, frontend.other


def send_cell(decision: Decision, counts: Mapping[Scope, int]) -> str:
    """`c10m` and the like; `counts` says how many endpoints each pool has, and without it the number is left out."""
    if not isinstance(decision, Forward):
        return NOT_SENT
    letter = "c" if decision.scope is Scope.CLUSTER else "l"
    return f"{letter}{counts.get(decision.scope, '')}{'m' if decision.masquerade else ''}"


def refuse_cell(decision: Decision) -> str:
    """`a`, `d` or `r`."""
    return "a" if isinstance(decision, Forward) else "d" if isinstance(decision, Drop) else "r"


def refuse_verdict(row: Row) -> Verdict:
    """What the maps of refused frontends hold for a row; the usual rows need no chain of their own."""
    if set(row.cells) == {"d"}:
        return DropPacket()
    return Goto(REJECT_CHAIN if set(row.cells) == {"r"} else row.chain)


def row_chains(row: Row, settings: Settings) -> Iterator[Chain]:
    """The chain of a row, and the leaves that it goes to."""
    if row.kind == REFUSE:
        if len(set(row.cells)) > 1:
            yield Chain(name=row.chain, rules=by_sender(settings, *map(_refusal, row.cells)))
        return
    if len(set(row.cells)) > 1:
        yield Chain(name=row.chain, rules=by_sender(settings, *(_towards(row.kind, cell) for cell in row.cells)))
    for cell in sorted(set(row.cells) - {NOT_SENT}):
        yield _leaf(row.kind, cell, settings)


def _refusal(cell: str) -> Expression:
    verdicts: dict[str, Expression] = {"a": Return(), "d": DropPacket(), "r": Goto(REJECT_CHAIN)}
    return verdicts[cell]


def _towards(kind: str, cell: str) -> Verdict:
    return Return() if cell == NOT_SENT else Goto(f"{kind}-{cell}")


def _leaf(kind: str, cell: str, settings: Settings) -> Chain:
    match = _CELL.fullmatch(cell)
    assert match is not None, f"{cell!r} is not a cell that sends"
    scope = Scope.CLUSTER if match[1] == "c" else Scope.LOCAL
    key = ADDRESS_KEY if kind == SEND else PORT_KEY
    mark = (MarkOr(settings.mark),) if match[3] else ()
    send = DnatMap((*key, Slot(int(match[2]))), ENDPOINT_MAPS[kind, scope])
    return Chain(name=f"{kind}-{cell}", rules=(Rule((*mark, send)),))
