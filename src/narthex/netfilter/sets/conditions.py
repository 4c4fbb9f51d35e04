"""What a packet has to meet before a rule acts on it, and what rules name: to follow rules, and to split chains by addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from narthex.model import address_key
from narthex.netfilter import ast

_MATCHES = (
    ast.Compare, ast.PortRange, ast.IsLocal, ast.AddressType, ast.TcpReset, ast.TcpFlags, ast.IcmpType, ast.CtState, ast.CtStatus,
    ast.CtDirection, ast.MarkIs, ast.ConnMarkIs, ast.InSet, ast.RandomMatch, ast.EveryNth, ast.RecentCheck, ast.Counter,
)  # fmt: skip


def conditions(rule: ast.Rule) -> Iterator[ast.Expression]:
    """Yield the matches of a rule that a packet has to meet before the rule acts on it."""
    for each in rule.expressions:
        if not isinstance(each, _MATCHES):
            return
        yield each


class RuleKeys(NamedTuple):
    """The single destination address or port that a packet needs to match a rule; an address comes first."""

    address: int | None
    port: int | None


def rule_keys(rule: ast.Rule) -> RuleKeys:
    """Return the keys of a rule."""
    port = None
    for each in conditions(rule):
        if isinstance(each, ast.Compare) and not each.negate and len(each.values) == 1:
            value = each.values[0]
            if each.field is ast.Field.DADDR and (address := single_address(value)) is not None:
                return RuleKeys(address, None)
            if each.field is ast.Field.DPORT and isinstance(value, int):
                port = value
    return RuleKeys(None, port)


def single_address(atom: ast.Atom) -> int | None:
    """Return the number of an address; None for a network or a range."""
    if not isinstance(atom, str) or "/" in atom or "-" in atom:
        return None
    return address_key(atom)[1]


class NamedByRules(NamedTuple):
    """The chains and sets that the rules of a chain name."""

    chains: frozenset[str]
    sets: frozenset[str]


def named_by(rules: Iterable[ast.Rule]) -> NamedByRules:
    """Return the chains and sets that rules name."""
    chains: set[str] = set()
    sets: set[str] = set()
    for rule in rules:
        for each in rule.expressions:
            _collect(each, chains, sets)
    return NamedByRules(frozenset(chains), frozenset(sets))


def _collect(e: ast.Expression, chains: set[str], sets: set[str]) -> None:
    if isinstance(e, (ast.Jump, ast.Goto)):
        chains.add(e.chain)
    elif isinstance(e, ast.InSet):
        sets.add(e.name)
    elif isinstance(e, (ast.VerdictMap, ast.DnatMap)):
        sets.add(e.map)
    elif isinstance(e, ast.UpdateSet):
        sets.add(e.set)
    elif isinstance(e, ast.RandomGoto):
        chains.update(e.chains)
    elif isinstance(e, ast.RandomMap):
        chains.update(what.chain for _, _, what in e.arms if isinstance(what, (ast.Jump, ast.Goto)))
    elif isinstance(e, ast.InlineVerdictMap):
        chains.update(what.chain for _, what in e.arms if isinstance(what, (ast.Jump, ast.Goto)))
        for matches, _ in e.arms:
            for each in matches:
                _collect(each, chains, sets)
    elif isinstance(e, ast.AnyOf):
        for matches in e.alternatives:
            for each in matches:
                _collect(each, chains, sets)
