"""The rules of the iptables backend: own chains by table, and the jumps to them from built-in chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import TypeVar

import msgspec
from immutables import Map

from narthex.model import IPFamily
from narthex.netfilter.ast import Chain, Rule, Ruleset, Table
from narthex.netfilter.edit import TableEdit
from narthex.netfilter.xtables.values import builtin_chains, hook_of
from narthex.proxy.backends.iptables.names import MARK_MASQ, MARK_STRANGERS, OWN_TABLES

K = TypeVar("K")
Rules = Sequence[Rule]
"""A tuple, or rules that are created on access."""
Chains = Mapping[str, Rules]
Jumps = Mapping[tuple[str, str], Rules]
"""Table and built-in chain to our rules in it, in order. All other rules there belong to others."""
Sysctl = tuple[str, str]
"""Path below /proc/sys and value."""


class XtablesRules:
    """All of our rules for one family. Immutable; equal if chains and jumps are equal.

    `sysctls` are not compared: they are switched on and never off, because other programs may rely on them.
    """

    def __init__(
        self,
        family: IPFamily,
        chains: Mapping[str, Map[str, Rules]],
        jumps: Map[tuple[str, str], Rules],
        sysctls: tuple[Sysctl, ...] = (),
        rendering: object = None,
    ) -> None:
        self.family = family
        self.chains = {table: chains.get(table) or Map() for table in OWN_TABLES}
        self.jumps = jumps
        self.sysctls = sysctls
        self.rendering = rendering
        """The renderer's notes for the next time; None for rules read from a kernel."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, XtablesRules):
            return NotImplemented
        return self.family is other.family and self.chains == other.chains and self.jumps == other.jumps

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(chains)} chains in {table}" for table, chains in self.chains.items())
        return f"<iptables rules for {self.family.label}: {counts}>"

    @cached_property
    def ruleset(self) -> Ruleset:
        """The same as tables with their built-in chains, for printing and walking."""
        return Ruleset(tuple(self._table(table) for table in OWN_TABLES))

    def _table(self, table: str) -> Table:
        builtin = (
            Chain(name=name, rules=tuple(self.jumps.get((table, name), ())), hook=hook_of(table, name))
            for name in builtin_chains(table)
        )
        own = (Chain(name=name, rules=tuple(rules)) for name, rules in sorted(self.chains[table].items()))
        return Table(family=self.family, name=table, chains={chain.name: chain for chain in (*builtin, *own)})


class XtablesChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes to write. A chain is always written whole; chains without changes are not mentioned."""

    family: IPFamily
    replace: bool = False
    """The state is unknown: chains of ours that are not written here are removed."""
    written: Mapping[str, Chains] = {}
    removed: Mapping[str, tuple[str, ...]] = {}
    jumps: Jumps | None = None
    """None: they are correct already."""
    sysctls: tuple[Sysctl, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.replace
            or any(self.written.values())
            or any(self.removed.values())
            or self.jumps is not None
            or self.sysctls
        )

    @property
    def transactions(self) -> int:
        """Number of nf_tables transactions: one for each changed table, and one for each piece."""
        jumps = {table for table, _ in self.jumps} if self.jumps is not None else set()
        touched = {table for each in (self.written, self.removed) for table, chains in each.items() if chains}
        tables = len(OWN_TABLES) if self.replace else len(jumps | touched)
        return tables + len(pieces(self.written.get("nat", {})))

    @property
    def rules(self) -> int:
        """Number of rules to write, without jumps."""
        return sum(len(rules) for chains in self.written.values() for rules in chains.values())


def diff(have: XtablesRules | None, want: XtablesRules, touched: Set[tuple[str, str]] | None = None) -> XtablesChanges:
    """Return the changes from one to the other; None as `have` means that everything is replaced.

    `touched` names the chains (table and name) that may differ; None: any may.
    """
    if have is None:
        return XtablesChanges(
            family=want.family, replace=True, written=want.chains, jumps=want.jumps, sysctls=want.sysctls
        )
    written: dict[str, dict[str, Rules]] = {table: {} for table in OWN_TABLES}
    removed: dict[str, tuple[str, ...]] = dict.fromkeys(OWN_TABLES, ())
    for table in OWN_TABLES:
        old, new = have.chains[table], want.chains[table]
        for chain in sorted(differing(old, new) if touched is None else {name for at, name in touched if at == table}):
            rules = new.get(chain)
            if rules is None:
                removed[table] += (chain,) if chain in old else ()
            elif (held := old.get(chain)) is not rules and held != rules:
                written[table][chain] = rules
    return XtablesChanges(
        family=want.family,
        written={table: chains for table, chains in written.items() if chains},
        removed={table: chains for table, chains in removed.items() if chains},
        jumps=None if have.jumps == want.jumps else want.jumps,
        sysctls=tuple(sysctl for sysctl in want.sysctls if sysctl not in have.sysctls),
    )


def differing(old: Mapping[K, object], new: Mapping[K, object]) -> set[K]:
    """Return the keys whose values are not the identical object on both sides."""
    gone = {key for key in old if key not in new}
    return gone | {key for key, value in new.items() if old.get(key) is not value}


def patch(have: XtablesRules, changes: XtablesChanges) -> XtablesRules:
    """Return the rules after the changes."""
    if changes.replace:
        assert changes.jumps is not None
        whole = {table: Map(dict(chains)) for table, chains in changes.written.items()}
        return XtablesRules(changes.family, whole, _mapped(changes.jumps), changes.sysctls)
    chains = {}
    for table in OWN_TABLES:
        with have.chains[table].mutate() as mutation:
            for chain in changes.removed.get(table, ()):
                del mutation[chain]
            mutation.update(changes.written.get(table, {}))
            chains[table] = mutation.finish()
    jumps = have.jumps if changes.jumps is None else _mapped(changes.jumps)
    sysctls = (*have.sysctls, *(sysctl for sysctl in changes.sysctls if sysctl not in have.sysctls))
    return XtablesRules(changes.family, chains, jumps, sysctls)


def edits_of(changes: XtablesChanges) -> tuple[TableEdit, ...]:
    """Return the changes as those of tables with their built-in chains."""
    return tuple(edit for table in OWN_TABLES if (edit := _edit(table, changes)))


def _edit(table: str, changes: XtablesChanges) -> TableEdit:
    builtin = builtin_chains(table) if changes.jumps is not None else ()
    jumps = changes.jumps or {}
    return TableEdit(
        family=changes.family,
        table=table,
        replace=changes.replace,
        chains={**{name: jumps.get((table, name), ()) for name in builtin}, **changes.written.get(table, {})},
        hooks={name: hook for name in builtin if (hook := hook_of(table, name)) is not None},
        removed_chains=changes.removed.get(table, ()),
    )


def _mapped(jumps: Jumps) -> Map[tuple[str, str], Rules]:
    return jumps if isinstance(jumps, Map) else Map(dict(jumps))


MOST_CHAINS = 200
"""Chains in one piece. 100 to 400 take about the same time."""

_RANKS = {MARK_MASQ: 0, MARK_STRANGERS: 0}
_PREFIX_RANKS = {"KUBE-SEP-": 1, "KUBE-SVC-": 2, "KUBE-SVL-": 2, "KUBE-EXT-": 3, "KUBE-FW-": 4}
"""A chain jumps to chains of lower rank only."""


def pieces(chains: Mapping[str, Sequence[Rule]]) -> list[dict[str, Sequence[Rule]]]:
    """Return chains of table nat to write before the others, in pieces and in order; empty if there are few chains.

    iptables-restore 1.8 on nf_tables searches the target of each jump among all chains of its input, one by one, so the
    time for a single input grows with the square of the endpoints: 43 s for 2,000 Services with 10 endpoints each, 3 s
    in pieces. A piece contains only chains that no rule but those of later pieces refers to: first the targets of
    jumps, then the chains that jump. Packets that pass rewritten chains meanwhile see complete ones. The chains that
    packets enter by (KUBE-SERVICES and others) are in no piece and come last.
    """
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
