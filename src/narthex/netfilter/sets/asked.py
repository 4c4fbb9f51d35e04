"""What the rules of a chain ask for, with those of all chains that they lead to: whether results hold elsewhere depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from narthex.netfilter import ast

ORIGINAL = frozenset((ast.Field.ORIG_DADDR, ast.Field.ORIG_DPORT, ast.Field.ORIG_SADDR, ast.Field.ORIG_SPORT))
_LINK_FIELDS = frozenset((ast.Field.IIFNAME, ast.Field.OIFNAME))
_LINK_TYPES = (ast.UndecidableMatch, ast.Redirect, ast.RedirectRange)
_LIST_TYPES = (ast.RecentCheck, ast.RecentSet, ast.UpdateSet)
_MOST_JUMPS = 100
"""Jumps that are followed: neither nftables (16) nor iptables allows more."""


LINKS = 1
"""A bit of what is asked for: links, or the hook."""
LISTS = 2
"""A bit: affinity lists, which rules read or write."""
TRACKED = 4
"""A bit: what conntrack knows of the packet as it was sent."""
_EVERYTHING = LINKS | LISTS | TRACKED
_BY_FIELD = {**dict.fromkeys(_LINK_FIELDS, LINKS), **dict.fromkeys(ORIGINAL, TRACKED)}


class AskedByChains:
    """What chains ask for. Each chain is read once, however many hooks and chains lead to it."""

    def __init__(self, rules_of: Callable[[ast.Table, ast.Chain], Sequence[ast.Rule]]) -> None:
        self._rules_of = rules_of
        self._known: dict[tuple[int, str], int] = {}

    def of(self, table: ast.Table, chain: ast.Chain, depth: int = 0) -> int:
        """Return the bits of a chain: all of them for a chain that calls itself."""
        key = id(table), chain.name
        known = self._known.get(key)
        if known is None:
            if depth > _MOST_JUMPS:
                return _EVERYTHING
            self._known[key] = _EVERYTHING
            names: set[str] = set()
            known = 0
            for rule in self._rules_of(table, chain):
                for each in rule.expressions:
                    known |= _asked(each, table)
                    names.update(called(each, table))
            for name in names:
                if name in table.chains:
                    known |= self.of(table, table.chains[name], depth + 1)
            self._known[key] = known
        return known


def _asked(e: ast.Expression, table: ast.Table) -> int:
    """Return what an expression itself asks for."""
    kind = type(e)
    if kind in _NOTHING:
        return 0
    if isinstance(e, _LINK_TYPES):
        return LINKS
    nested: Iterable[ast.Expression] = ()
    asked = 0
    if isinstance(e, _LIST_TYPES):
        asked = LISTS
    elif isinstance(e, ast.InSet):
        held = table.sets.get(e.name)
        asked = LISTS if held is not None and held.dynamic else 0
    elif isinstance(e, ast.AnyOf):
        nested = (each for alternative in e.alternatives for each in alternative)
    elif isinstance(e, ast.InlineVerdictMap):
        nested = (each for matches, _ in e.arms for each in matches)
    for each in nested:
        asked |= _asked(each, table)
    fields: tuple[Any, ...] = getattr(e, "key", ()) or (getattr(e, "field", None),)
    for field in fields:
        asked |= _BY_FIELD.get(field, 0)
    return asked


_NOTHING = frozenset(
    (ast.Jump, ast.Goto, ast.RandomMatch, ast.MarkOr, ast.Dnat, ast.Counter, ast.CtState, ast.RandomGoto)
)
"""The most frequent types, which ask for nothing of this."""


def called(e: ast.Expression, table: ast.Table) -> Iterator[str]:
    """Yield the chains that a statement may lead to."""
    if isinstance(e, (ast.Jump, ast.Goto)):
        yield e.chain
    elif isinstance(e, ast.RandomGoto):
        yield from e.chains
    elif isinstance(e, ast.RandomMap):
        yield from (what.chain for _, _, what in e.arms if isinstance(what, (ast.Jump, ast.Goto)))
    elif isinstance(e, ast.InlineVerdictMap):
        yield from (what.chain for _, what in e.arms if isinstance(what, (ast.Jump, ast.Goto)))
    elif isinstance(e, ast.VerdictMap):
        held = table.sets.get(e.map)
        yield from (
            data.chain for data in (held.elements.values() if held else ()) if isinstance(data, (ast.Jump, ast.Goto))
        )
