"""The difference between two versions of a chain, found in time linear in their length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from narthex.netfilter import ast

Rules = Sequence[ast.Rule]


class RuleDifference(NamedTuple):
    """The difference between two versions of a chain whose other rules are equal and have the same order."""

    removed: list[ast.Rule]
    added: list[ast.Rule]
    swapped: list[tuple[ast.Rule, ast.Rule]]
    """Equal rules that are other objects."""

    def same(self, one: ast.Rule, other: ast.Rule) -> bool:
        """Return True if two rules are equal, and note if they are two objects."""
        if one is other:
            return True
        if one != other:
            return False
        self.swapped.append((one, other))
        return True


def rule_difference(have: Rules, want: Rules) -> RuleDifference | None:
    """Return the difference between two versions of a chain; None if rules that both have changed places."""
    old, new = tuple(have), tuple(want)
    difference = RuleDifference([], [], [])
    start, ends = 0, min(len(old), len(new))
    while start < ends and difference.same(old[start], new[start]):
        start += 1
    tail = 0
    while tail < ends - start and difference.same(old[-1 - tail], new[-1 - tail]):
        tail += 1
    old, new = old[start : len(old) - tail], new[start : len(new) - tail]
    old_ids, new_ids = list(map(id, old)), _same_ids(old, new)
    in_old, in_new = set(old_ids), set(new_ids)
    here = there = 0
    while here < len(old) and there < len(new):
        if old_ids[here] == new_ids[there]:
            if old[here] is not new[there]:
                difference.swapped.append((old[here], new[there]))
            here += 1
            there += 1
        elif old_ids[here] not in in_new:
            difference.removed.append(old[here])
            here += 1
        elif new_ids[there] not in in_old:
            difference.added.append(new[there])
            there += 1
        else:
            return None
    difference.removed.extend(old[here:])
    difference.added.extend(new[there:])
    return difference if in_new.isdisjoint(map(id, difference.removed)) else None


def _same_ids(old: Rules, new: Rules) -> list[int]:
    """Return a number for each new rule: that of an equal old rule, if there is one."""
    ids = set(map(id, old))
    fresh = [rule for rule in new if id(rule) not in ids]
    ids = set(map(id, new))
    equal = {rule: id(rule) for rule in old if id(rule) not in ids} if fresh else {}
    numbers = {id(rule): equal.get(rule, id(rule)) for rule in fresh}
    return [numbers.get(id(rule), id(rule)) for rule in new]
