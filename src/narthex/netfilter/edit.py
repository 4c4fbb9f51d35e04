"""Changes of a table as typed data: what a kernel does to it, whichever tool carries the changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from narthex.model import IPFamily
from narthex.netfilter.ast import ElementData, ElementKey, Hook, Rule, Set


class UnfitEdit(ValueError):
    """Changes that a table does not take, such as the removal of what it does not have. The message says which."""


class TableEdit(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of one table. What is not mentioned stays."""

    family: IPFamily
    table: str
    replace: bool = False
    """The table is emptied first."""
    chains: Mapping[str, Sequence[Rule]] = {}
    """New chains, and chains with other rules, each with all its rules."""
    hooks: Mapping[str, Hook] = {}
    """The hooks of those of `chains` that are base chains, in the order in which they are registered."""
    removed_chains: tuple[str, ...] = ()
    sets: tuple[Set, ...] = ()
    """New sets, and sets with another declaration. A set that exists keeps its elements."""
    filled: frozenset[str] = frozenset()
    """Those of `sets` whose elements replace the ones before."""
    deletions: Mapping[str, Mapping[ElementKey, ElementData]] = {}
    """By set. They are deleted before others are added."""
    additions: Mapping[str, Mapping[ElementKey, ElementData]] = {}
    removed_sets: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.replace
            or self.chains
            or self.removed_chains
            or self.sets
            or self.deletions
            or self.additions
            or self.removed_sets
        )
