"""Chains, sets, and rules that are built only when they are accessed.

Parsing a dump of 200,000 rules takes seconds, but a packet meets only a few hundred of them. When rules are written, a
large cluster has a hundred thousand rules of the same few forms, which nothing reads again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, overload

from narthex.model import IPFamily
from narthex.netfilter.ast import Chain, Rule, Table

Item = TypeVar("Item")

LineProblem = tuple[int, str]
"""A line number, starting at 1, and the problem in that line. Line 0 is the text as a whole."""


class IndexedTable(NamedTuple):
    """A table found in a dump. Its chains and sets are parsed when they are accessed."""

    table: Table | None
    """None for an nft table of a family that carries no IP packets."""
    rules: int
    """Number of rules."""
    next: int
    """Index of the line after the table."""
    problems: list[LineProblem]
    omitted: int = 0
    """Problems that were not kept."""


class LazyMapping(Mapping[str, Item], Generic[Item]):
    """A mapping that builds each value at its first access."""

    def __init__(self, names: Iterable[str], build: Callable[[str], Item]) -> None:
        self._built: dict[str, Item | None] = dict.fromkeys(names)
        self._build = build

    def refine(self, change: Callable[[Item], Item]) -> None:
        """Change every value that is built from now on."""
        build = self._build
        self._build = lambda name: change(build(name))

    def __getitem__(self, name: str) -> Item:
        item = self._built[name]
        if item is None:
            item = self._built[name] = self._build(name)
        return item

    def __iter__(self) -> Iterator[str]:
        return iter(self._built)

    def __len__(self) -> int:
        return len(self._built)

    def __contains__(self, name: object) -> bool:
        return name in self._built


class LazyChains(LazyMapping[Chain]):
    """The chains of a table, and the positions of their rules in the dump.

    Args:
        names: The chains of the table.
        build: Parses a chain.
        bases: The names of the base chains.
        lines: Returns the line numbers of the rules of a chain.
        text: Returns the text of a line.
    """

    def __init__(
        self,
        names: Iterable[str],
        build: Callable[[str], Chain],
        bases: tuple[str, ...],
        lines: Callable[[str], list[int]],
        text: Callable[[int], str],
    ) -> None:
        super().__init__(names, build)
        self.bases = bases
        self._lines = lines
        self._located: tuple[str, list[int]] | None = None
        """The chain of the last `locate` and its line numbers: callers ask for one rule after the other."""
        self._text = text

    def locate(self, chain: str, rule: int) -> tuple[int, str]:
        """Return the line number, starting at 1, and the text of a rule, or (0, "") if they are not known."""
        if self._located is None or self._located[0] != chain:
            self._located = chain, self._lines(chain) if chain in self else []
        lines = self._located[1]
        return (lines[rule], self._text(lines[rule])) if rule < len(lines) else (0, "")


def base_chains(chains: Mapping[str, Chain]) -> Iterator[Chain]:
    """Iterate over the base chains without parsing the others."""
    if isinstance(chains, LazyChains):
        yield from (chains[name] for name in chains.bases)
    else:
        yield from (chain for chain in chains.values() if chain.hook is not None)


class LazyRules(Sequence[Rule]):
    """The rules of a chain, equal to any sequence of the same rules.

    A subclass defines the rules as typed values (`build`) and, as a faster path to the same text, as lines (`lines`). Tests
    verify that both agree.
    """

    __slots__ = ()

    @abstractmethod
    def build(self) -> tuple[Rule, ...]:
        """Return the rules."""

    @abstractmethod
    def lines(self, chain: str, family: IPFamily) -> list[str]:
        """Return the `-A` lines as `xtables.print.chain_lines` does. `chain` is valid. Raises Unprintable."""

    @overload
    def __getitem__(self, index: int) -> Rule: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Rule, ...]: ...
    def __getitem__(self, index: int | slice) -> Rule | tuple[Rule, ...]:
        return self.build()[index]

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.build())

    def __len__(self) -> int:
        return len(self.build())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyRules | tuple):
            return self is other or self.build() == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.build())
