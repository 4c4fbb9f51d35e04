"""Long chains that are followed change by change: which of their rules packets for some addresses or ports can meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narthex.netfilter import ast
from narthex.netfilter.sets.conditions import named_by, rule_keys
from narthex.netfilter.sets.numbered import NumberedItems
from narthex.netfilter.sets.rule_difference import RuleDifference, Rules
from narthex.netfilter.sets.values import ValueSet

LONG = 64
"""Number of rules from which a chain is indexed."""


class LongChain:
    """The rules of a long chain by their keys."""

    __slots__ = ("_calling", "_positions", "by_address", "by_port", "rules", "unkeyed")

    def __init__(
        self,
        rules: tuple[ast.Rule, ...],
        by_address: NumberedItems[tuple[ast.Rule, ...]],
        by_port: NumberedItems[tuple[ast.Rule, ...]],
        unkeyed: tuple[ast.Rule, ...],
    ) -> None:
        self.rules = rules
        self.by_address, self.by_port, self.unkeyed = by_address, by_port, unkeyed
        self._positions: dict[int, int] | None = None
        self._calling: dict[str, list[ast.Rule]] | None = None

    @classmethod
    def of(cls, rules: Rules) -> LongChain | None:
        """Return the index of a chain; None for a short one, and for one that an index does not help."""
        if len(rules) < LONG:
            return None
        held = tuple(rules)
        by_address: dict[int, list[ast.Rule]] = {}
        by_port: dict[int, list[ast.Rule]] = {}
        unkeyed: list[ast.Rule] = []
        for rule in held:
            address, port = rule_keys(rule)
            if address is not None:
                by_address.setdefault(address, []).append(rule)
            elif port is not None:
                by_port.setdefault(port, []).append(rule)
            else:
                unkeyed.append(rule)
        if len(by_address) + len(by_port) < LONG // 2 or len(set(map(id, held))) != len(held):
            return None
        return cls(held, _frozen(by_address), _frozen(by_port), tuple(unkeyed))

    def after(self, rules: tuple[ast.Rule, ...], difference: RuleDifference) -> LongChain | None:
        """Return the index of the next version of the chain, given the difference."""
        swapped = difference.swapped
        fresh = [id(rule) for rule in (*difference.added, *(new for _, new in swapped))]
        if len(set(fresh)) != len(fresh) or not self._order.keys().isdisjoint(fresh):
            return None
        by_address, by_port, unkeyed = self.by_address, self.by_port, list(self.unkeyed)
        for rule in (*difference.removed, *(old for old, _ in swapped)):
            address, port = rule_keys(rule)
            if address is not None:
                by_address = _without(by_address, address, rule)
            elif port is not None:
                by_port = _without(by_port, port, rule)
            else:
                unkeyed = [each for each in unkeyed if each is not rule]
        for rule in (*difference.added, *(new for _, new in swapped)):
            address, port = rule_keys(rule)
            if address is not None:
                by_address = by_address.with_item(address, (*(by_address.get(address) or ()), rule))
            elif port is not None:
                by_port = by_port.with_item(port, (*(by_port.get(port) or ()), rule))
            else:
                unkeyed.append(rule)
        made = LongChain(rules, by_address, by_port, tuple(unkeyed))
        made._calling = self._called_after(difference) if self._calling is not None else None
        return made

    def _called_after(self, difference: RuleDifference) -> dict[str, list[ast.Rule]]:
        calling = dict(self._calling or {})
        for rule in (*difference.removed, *(old for old, _ in difference.swapped)):
            for name in named_by((rule,)).chains:
                left = [each for each in calling.get(name, ()) if each is not rule]
                calling[name] = left
                if not left:
                    del calling[name]
        for rule in (*difference.added, *(new for _, new in difference.swapped)):
            for name in named_by((rule,)).chains:
                calling[name] = [*calling.get(name, ()), rule]
        return calling

    @property
    def _order(self) -> dict[int, int]:
        """The positions of the rules."""
        if self._positions is None:
            self._positions = dict(zip(map(id, self.rules), range(len(self.rules)), strict=True))
        return self._positions

    def calling(self, chain: str) -> Sequence[ast.Rule]:
        """Return the rules that name a chain."""
        if self._calling is None:
            self._calling = {}
            for rule in self.rules:
                for name in named_by((rule,)).chains:
                    self._calling.setdefault(name, []).append(rule)
        return self._calling.get(chain, ())

    def some(self, addresses: ValueSet, ports: ValueSet) -> tuple[ast.Rule, ...]:
        """Return the rules that packets with these destinations and ports can meet, in order."""
        positions, found = self._order, [*self.unkeyed]
        for rules in (*self.by_address.chosen(addresses), *self.by_port.chosen(ports)):
            found += rules
        return tuple(sorted(found, key=lambda rule: positions[id(rule)]))


def _frozen(items: Mapping[int, list[ast.Rule]]) -> NumberedItems[tuple[ast.Rule, ...]]:
    return NumberedItems({key: tuple(rules) for key, rules in items.items()})


def _without(
    items: NumberedItems[tuple[ast.Rule, ...]], key: int, rule: ast.Rule
) -> NumberedItems[tuple[ast.Rule, ...]]:
    return items.with_item(key, tuple(each for each in items.get(key) or () if each is not rule) or None)
