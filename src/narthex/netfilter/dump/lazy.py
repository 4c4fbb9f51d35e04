"""Chains and sets of a dump that are read when somebody asks for them, and where each rule stands in its text.

A dump of 200,000 rules is a matter of seconds to read, and a packet meets a few hundred of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from narthex.netfilter.ast.nodes import Chain

Item = TypeVar("Item")


class Lazy(Mapping[str, Item], Generic[Item]):
    """A mapping whose values are made at the first look."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Item]) -> None:
        self._made: dict[str, Item | None] = dict.fromkeys(names)
        self._make = make

    def __getitem__(self, name: str) -> Item:
        item = self._made[name]
        if item is None:
            item = self._made[name] = self._make(name)
        return item

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __contains__(self, name: object) -> bool:
        return name in self._made


class LazyChains(Lazy[Chain]):
    """A table's chains, and where their rules stand."""

    def __init__(
        self,
        names: Iterable[str],
        make: Callable[[str], Chain],
        bases: tuple[str, ...],
        lines: Callable[[str], list[int]],
        text: Callable[[int], str],
    ) -> None:
        super().__init__(names, make)
        self.bases = bases
        """Names of the chains that have a hook."""
        self._lines = lines
        self._text = text

    def place(self, chain: str, rule: int) -> tuple[int, str]:
        """The line in the dump, from 1, and the text of a chain's rule; (0, "") when that is not known."""
        lines = self._lines(chain) if chain in self else []
        return (lines[rule], self._text(lines[rule])) if rule < len(lines) else (0, "")


def base_chains(chains: Mapping[str, Chain]) -> Iterator[Chain]:
    """Those that have a hook, without reading the others."""
    if isinstance(chains, LazyChains):
        yield from (chains[name] for name in chains.bases)
    else:
        yield from (chain for chain in chains.values() if chain.hook is not None)
