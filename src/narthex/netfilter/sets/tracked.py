"""Rules that are followed change by change: an immutable state of tables, and what each change touches.

A state shares with the state before it all that did not change, so that a change of one Service costs what it changes, however many
rules there are. Long chains and sets are indexed by the destination address, or else the destination port, that a packet needs to meet
a rule or an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from immutables import Map

from narthex.model import IPFamily
from narthex.netfilter import ast
from narthex.netfilter.edit import TableEdit, UnfitEdit
from narthex.netfilter.sets.conditions import NamedByRules, conditions, named_by
from narthex.netfilter.sets.long_chain import LONG, LongChain
from narthex.netfilter.sets.rule_difference import RuleDifference, Rules, rule_difference
from narthex.netfilter.sets.tracked_set import MISSING, Elements, TrackedSet, declaration


class TouchedRules:
    """What an edit touches: packets that meet none of this are treated as before."""

    def __init__(self) -> None:
        self.everything = False
        self.chains: dict[str, tuple[ast.Rule, ...] | None] = {}
        """By chain the rules that are added and removed; None: any."""
        self.elements: dict[str, list[ast.ElementKey]] = {}
        """By set the elements that are added, removed, or have other data."""
        self.sets: set[str] = set()
        """Sets that are declared anew."""

    def __bool__(self) -> bool:
        return bool(self.everything or self.chains or self.elements or self.sets)


def _effective(some: Iterable[ast.Rule], rules: Rules) -> Iterator[ast.Rule]:
    """Yield rules of a chain whose packets are those that some of its rules have an effect on.

    A rule that only returns has an effect on packets that meet a rule behind it, since the end of a chain returns as well.
    """
    for rule in some:
        if _only_returns(rule):
            held = tuple(rules)
            behind = held[next(at for at, each in enumerate(held) if each == rule) + 1 :]
            if len(behind) <= LONG:
                yield from behind
                continue
        yield rule


def _only_returns(rule: ast.Rule) -> bool:
    last = rule.expressions[-1] if rule.expressions else None
    return isinstance(last, ast.Return) and sum(1 for _ in conditions(rule)) == len(rule.expressions) - 1


_NOBODY: Map[str, None] = Map()
_Uses = Map[str, Map[str, None]]


def _added(uses: _Uses, name: str, user: str) -> _Uses:
    return uses.set(name, uses.get(name, _NOBODY).set(user, None))


def _removed(uses: _Uses, name: str, user: str) -> _Uses:
    left = uses[name].delete(user)
    return uses.set(name, left) if left else uses.delete(name)


class TrackedTable:
    """One version of a table."""

    def __init__(self, family: IPFamily, name: str) -> None:
        """Create an empty table."""
        self.family = family
        self.name = name
        self.hooks: dict[str, ast.Hook] = {}
        """The hooks of base chains, in the order of their registration."""
        self.chains: Map[str, Rules] = Map()
        self.long: Map[str, LongChain] = Map()
        """The indexes of long chains."""
        self.sets: Map[str, TrackedSet] = Map()
        self.callers: _Uses = Map()
        """For each chain those whose rules name it."""
        self.users: _Uses = Map()
        """For each set the chains whose rules name it."""
        self.through: _Uses = Map()
        """For each chain the verdict maps that name it."""

    def table(self) -> ast.Table:
        """Return the whole table."""
        chains = {
            name: ast.Chain(name=name, rules=tuple(rules), hook=self.hooks.get(name))
            for name, rules in self._in_order()
        }
        sets = {
            name: msgspec.structs.replace(held.declared, elements=held.elements()) for name, held in self.sets.items()
        }
        return ast.Table(family=self.family, name=self.name, chains=chains, sets=sets)

    def _in_order(self) -> Iterator[tuple[str, Rules]]:
        yield from ((name, self.chains[name]) for name in self.hooks)
        yield from ((name, rules) for name, rules in self.chains.items() if name not in self.hooks)

    def calling(self, caller: str, target: str) -> Sequence[ast.Rule]:
        """Return the rules of a chain that name another one."""
        if caller in self.long:
            return self.long[caller].calling(target)
        return [rule for rule in self.chains[caller] if target in named_by((rule,)).chains]

    def after(self, edit: TableEdit) -> tuple[TrackedTable, TouchedRules]:
        """Return the table after an edit, and what the edit touches. Raises UnfitEdit."""
        made, touched = TrackedTable(self.family, self.name), TouchedRules()
        touched.everything = edit.replace
        if not edit.replace:
            made.hooks, made.chains, made.long, made.sets = dict(self.hooks), self.chains, self.long, self.sets
            made.callers, made.users, made.through = self.callers, self.users, self.through
        for one in edit.sets:
            made._declare(one, edit.filled, touched)
        made._put(edit.chains, touched)
        for name, hook in edit.hooks.items():
            if made.hooks.get(name) != hook:
                made.hooks[name] = hook
                touched.everything = True
        for name in dict.fromkeys((*edit.deletions, *edit.additions)):
            made._change(name, edit.deletions.get(name, {}), edit.additions.get(name, {}), touched)
        for name in edit.removed_chains:
            made._remove_chain(name, touched)
        for name in edit.removed_sets:
            made._remove_set(name, touched)
        return made, touched

    def edit_to(self, want: TrackedTable) -> TableEdit:
        """Return the changes that lead to another version of the table, which need not have followed this one."""
        edit = TableEdit(family=want.family, table=want.name)
        if list(self.hooks.items()) != list(want.hooks.items()):
            chains, sets = dict(want._in_order()), tuple(want.table().sets.values())
            filled = frozenset(one.name for one in sets)
            return msgspec.structs.replace(
                edit, replace=True, chains=chains, hooks=want.hooks, sets=sets, filled=filled
            )
        deletions, additions = {}, {}
        for name, one in want.sets.items():
            have = self.sets.get(name)
            old, new = ({}, one.elements()) if have is None else have.difference(one)
            deletions[name], additions[name] = old, new
        return msgspec.structs.replace(
            edit,
            chains={
                name: rules
                for name, rules in want.chains.items()
                if (held := self.chains.get(name)) is None or tuple(held) != tuple(rules)
            },
            removed_chains=tuple(name for name in self.chains if name not in want.chains),
            sets=tuple(
                one.declared
                for name, one in want.sets.items()
                if name not in self.sets or self.sets[name].declared != one.declared
            ),
            deletions={name: elements for name, elements in deletions.items() if elements},
            additions={name: elements for name, elements in additions.items() if elements},
            removed_sets=tuple(name for name in self.sets if name not in want.sets),
        )

    def holds(self, edit: TableEdit) -> bool:
        """Return True if all that an edit writes is in the table already, and nothing that it removes."""
        if edit.replace or not self.hooks.items() >= edit.hooks.items():
            return False
        chains, sets = self.chains, self.sets
        if any(name in chains for name in edit.removed_chains) or any(name in sets for name in edit.removed_sets):
            return False
        if any(name not in chains or tuple(chains[name]) != tuple(rules) for name, rules in edit.chains.items()):
            return False
        if any(one.name not in sets or sets[one.name].declared != declaration(one) for one in edit.sets):
            return False
        filled = {one.name: one.elements for one in edit.sets if one.name in edit.filled}
        for name, elements in (*edit.additions.items(), *filled.items()):
            if name not in sets or any(not sets[name].has(key, data) for key, data in elements.items()):
                return False
        return not any(
            name in sets and sets[name].get(key, MISSING) is not MISSING and key not in edit.additions.get(name, {})
            for name, elements in edit.deletions.items()
            for key in elements
        )

    # ---- chains --------------------------------------------------------------------------------------------------------------

    def _put(self, chains: Mapping[str, Rules], touched: TouchedRules) -> None:
        held, long = self.chains.mutate(), self.long
        for name, rules in chains.items():
            before = held.get(name)
            difference = None if touched.everything or before is None else rule_difference(before, rules)
            known = long.get(name)
            index = None if known is None or difference is None else known.after(tuple(rules), difference)
            index = index or LongChain.of(rules)
            if difference is not None:
                touched.chains[name] = (
                    *_effective(difference.removed, before or ()),
                    *_effective(difference.added, rules),
                )
                self._name_again(name, difference, rules if index is None else index)
            else:
                touched.chains[name] = None
                self._name(name, named_by(before) if before is not None else _NOTHING, named_by(rules))
            if index is not None:
                long = long.set(name, index)
            elif known is not None:
                long = long.delete(name)
            held[name] = rules if index is None else index.rules
        self.chains, self.long = held.finish(), long

    def _name_again(self, chain: str, difference: RuleDifference, rules: Rules | LongChain) -> None:
        """Note what other rules of a chain name."""
        before, now = named_by(difference.removed), named_by(difference.added)
        gone = NamedByRules(before.chains - now.chains, before.sets - now.sets)
        if gone.sets or (gone.chains and not isinstance(rules, LongChain)):
            left = named_by(rules.rules if isinstance(rules, LongChain) else rules)
            gone = NamedByRules(gone.chains - left.chains, gone.sets - left.sets)
        elif isinstance(rules, LongChain):
            gone = NamedByRules(frozenset(name for name in gone.chains if not rules.calling(name)), gone.sets)
        self._name(chain, gone, now)

    def _name(self, chain: str, before: NamedByRules, now: NamedByRules) -> None:
        for name in before.chains - now.chains:
            self.callers = _removed(self.callers, name, chain)
        for name in before.sets - now.sets:
            self.users = _removed(self.users, name, chain)
        for name in now.chains:
            self.callers = _added(self.callers, name, chain)
        for name in now.sets:
            self.users = _added(self.users, name, chain)

    def _remove_chain(self, name: str, touched: TouchedRules) -> None:
        rules = self.chains.get(name)
        if rules is None:
            raise UnfitEdit(f"table {self.name} has no chain {name} to remove")
        if self.hooks.pop(name, None) is not None:
            touched.everything = True
        self._name(name, named_by(rules), _NOTHING)
        self.chains = self.chains.delete(name)
        if name in self.long:
            self.long = self.long.delete(name)
        touched.chains[name] = None

    # ---- sets ----------------------------------------------------------------------------------------------------------------

    def _declare(self, one: ast.Set, filled: frozenset[str], touched: TouchedRules) -> None:
        before = self.sets.get(one.name)
        keeps = before is not None and one.name not in filled
        self._replace_set(one.name, before, before.redeclared(one) if before and keeps else TrackedSet.of(one))
        if self.users.get(one.name):
            touched.sets.add(one.name)

    def _change(self, name: str, deletions: Elements, additions: Elements, touched: TouchedRules) -> None:
        before = self.sets.get(name)
        if before is None:
            raise UnfitEdit(f"table {self.name} has no set {name}")
        after = before.after(deletions, additions, touched.elements.setdefault(name, []))
        self._replace_set(name, before, after)

    def _remove_set(self, name: str, touched: TouchedRules) -> None:
        before = self.sets.get(name)
        if before is None:
            raise UnfitEdit(f"table {self.name} has no set {name} to remove")
        for chain in before.targets:
            self.through = _removed(self.through, chain, name)
        self.sets = self.sets.delete(name)
        touched.sets.add(name)

    def _replace_set(self, name: str, before: TrackedSet | None, after: TrackedSet) -> None:
        self.sets = self.sets.set(name, after)
        old = before.targets if before is not None else _NO_TARGETS
        if old is after.targets:
            return
        for chain in old:
            if chain not in after.targets:
                self.through = _removed(self.through, chain, name)
        for chain in after.targets:
            if chain not in old:
                self.through = _added(self.through, chain, name)


_NOTHING = NamedByRules(frozenset(), frozenset())
_NO_TARGETS: Map[str, Map[ast.ElementKey, None]] = Map()
