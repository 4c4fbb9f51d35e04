"""Ways as a tree: what they have in common is told once."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from narthex.trace.model import PathBranch, PathEnd, PathStep

Told = tuple[Fraction, tuple[PathStep, ...], PathEnd]


def tree(ways: Sequence[Told]) -> PathBranch:
    """The ways as one; their probabilities add up to what the packet's coming here is worth."""
    return _grown(list(ways), 0, sum((share for share, _, _ in ways), Fraction(0)))


def _grown(ways: list[Told], start: int, total: Fraction) -> PathBranch:
    mine = sum((share for share, _, _ in ways), Fraction(0))
    chance = mine / total if total else Fraction(0)
    if len(ways) == 1:
        return PathBranch(steps=ways[0][1][start:], chance=chance, end=ways[0][2])
    shared = start
    while all(shared < len(story) and _alike(story[shared], ways[0][1][shared]) for _, story, _ in ways):
        shared += 1
    groups: list[list[Told]] = []
    for way in ways:
        group = next((each for each in groups if _same(each[0], way, shared)), None)
        if group is None:
            groups.append([way])
        else:
            group.append(way)
    if len(groups) == 1:
        # The same steps with ends that differ, as for a packet that nobody can tell more of.
        parts = tuple(_grown([way], shared, mine) for way in ways)
    else:
        parts = tuple(_grown(group, shared, mine) for group in groups)
    return PathBranch(steps=ways[0][1][start:shared], chance=chance, ways=parts)


def _same(one: Told, other: Told, position: int) -> bool:
    if len(one[1]) <= position or len(other[1]) <= position:
        return False
    return _alike(one[1][position], other[1][position])


def _alike(one: PathStep, other: PathStep) -> bool:
    """Whether two steps are the same one, though its chance may be told by several."""
    return one is other or (
        one.stage is other.stage
        and (one.node, one.namespace, one.what, one.table, one.chain)
        == (other.node, other.namespace, other.what, other.table, other.chain)
        and one.before == other.before
        and one.after == other.after
    )
