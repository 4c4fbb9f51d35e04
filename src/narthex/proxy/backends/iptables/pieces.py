"""A load of many chains in pieces, for iptables on nf_tables.

iptables-restore 1.8 looks for the target of each jump among all chains of its input, one after the other, so one input
for everything takes time that grows with the square of the endpoints: 43 s for 2,000 Services with 10 endpoints each,
against 3 s in pieces. A piece holds only chains that nothing leads to but later pieces: first what is jumped to, then what
jumps. Whoever is led through rewritten chains meanwhile meets whole ones. What packets come in by (KUBE-SERVICES and its
like) is in no piece and comes last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narthex.netfilter.ast import Rule
from narthex.proxy.backends.iptables.names import MARK_MASQ, MARK_STRANGERS

MOST_CHAINS = 200
"""In one piece. 100 to 400 take about the same time."""

_RANKS = {MARK_MASQ: 0, MARK_STRANGERS: 0}
_PREFIX_RANKS = {"KUBE-SEP-": 1, "KUBE-SVC-": 2, "KUBE-SVL-": 2, "KUBE-EXT-": 3, "KUBE-FW-": 4}
"""A chain jumps to chains of lower rank only."""


def pieces(chains: Mapping[str, Sequence[Rule]]) -> list[dict[str, Sequence[Rule]]]:
    """Chains of table nat to write before the others, in pieces and in order; none when there are few."""
    ranks = {chain: rank for chain in chains if (rank := _rank(chain)) is not None}
    if len(ranks) <= MOST_CHAINS:
        return []
    ordered = sorted(ranks, key=ranks.__getitem__)
    starts = range(0, len(ordered), MOST_CHAINS)
    return [{chain: chains[chain] for chain in ordered[start : start + MOST_CHAINS]} for start in starts]


def _rank(chain: str) -> int | None:
    if chain in _RANKS:
        return _RANKS[chain]
    return next((rank for prefix, rank in _PREFIX_RANKS.items() if chain.startswith(prefix)), None)
