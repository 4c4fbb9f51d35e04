"""Rules that are only typed values when somebody looks at them.

A big cluster has a hundred thousand of the same two or three forms, that are written once and never looked at again. What
such rules are is still said once and in types (`made`); `lines` is a shorter way to the same text, and a law of the tests
holds the two together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

from narthex.model.net import IPFamily
from narthex.netfilter.ast.nodes import Rule


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
