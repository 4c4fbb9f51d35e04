"""Chains and sets of a dump that are read when somebody asks for them, and where each rule stands in its text.

A dump of 200,000 rules is a matter of seconds to read, and a packet meets a few hundred of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Chain, Rule

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


class LazyRules(Sequence[Rule]):
    """All rules of a chain. Equal to whatever sequence holds the same rules."""

    __slots__ = ()

    @abstractmethod
    def made(self) -> tuple[Rule, ...]:
        """The rules."""

    @abstractmethod
    def lines(self, chain: str, family: IPFamily) -> list[str]:
        """The `-A` lines as `xtables_print.chain_lines` has them; `chain` is checked already. Raises Unprintable."""

    @overload
    def __getitem__(self, index: int) -> Rule: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Rule, ...]: ...
    def __getitem__(self, index: int | slice) -> Rule | tuple[Rule, ...]:
        return self.made()[index]

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.made())

    def __len__(self) -> int:
        return len(self.made())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyRules | tuple):
            return self is other or self.made() == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.made())
