"""Limits for foreign text: the length of a line, and the number of problems that a reader keeps.

A parser meets what other programs wrote and what a user pasted. A regular expression that is harmless in a line of a
rule takes minutes in a line of a megabyte, and a text in which every line is wrong must not cost a message per line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from narthex.model.problem import MAX_PROBLEMS

MAX_LINE = 16 * 1024
"""Longest line in characters that is parsed. The longest that iptables, ipset, ipvsadm, ip, ss, conntrack, or sysctl print has
some hundred characters, and that of a resolver's file a few thousand."""
P = TypeVar("P")


class BoundedProblems(Generic[P]):
    """The first problems of a text, and the number of all, where problems are other than `Problem` (see `ProblemList`).

    Args:
        summary: Makes the last problem, which says how many others were not kept.
        most: Number of problems to keep.
    """

    def __init__(self, summary: Callable[[int], P], most: int = MAX_PROBLEMS) -> None:
        self._summary = summary
        self._most = most
        self.kept: list[P] = []
        self.omitted = 0

    def append(self, problem: P) -> None:
        """Keep a problem, or count it."""
        if len(self.kept) < self._most:
            self.kept.append(problem)
        else:
            self.omitted += 1

    def extend(self, problems: Iterable[P]) -> None:
        """Keep several problems, or count them."""
        for problem in problems:
            self.append(problem)

    def __bool__(self) -> bool:
        """Return True if there is a problem."""
        return bool(self.kept)

    def __iter__(self) -> Iterator[P]:
        """Iterate over the kept problems, and the summary of the others if there are any."""
        yield from self.kept
        if self.omitted:
            yield self._summary(self.omitted)


def omitted_text(count: int) -> str:
    """Return the message about problems that were not kept."""
    return f"{count} more problems are not listed; repair those above first"


def without_long_lines(lines: Sequence[str], most: int = MAX_LINE) -> tuple[list[str], list[int]]:
    """Return the lines, with empty ones in place of lines that are too long, and the numbers of the latter, from 1."""
    if max(map(len, lines), default=0) <= most:
        return list(lines), []
    long = [number for number, line in enumerate(lines, 1) if len(line) > most]
    return [line if len(line) <= most else "" for line in lines], long


def without_long_lines_of(text: str, most: int = MAX_LINE) -> tuple[str, str]:
    """Return a text without its lines that are too long, and a message about them, empty if there is none."""
    if len(text) <= most:
        return text, ""
    lines, long = without_long_lines(text.split("\n"), most)
    return ("\n".join(lines), long_lines_text(long, most)) if long else (text, "")


def long_lines_text(numbers: Sequence[int], most: int = MAX_LINE) -> str:
    """Return the message about lines that were not read."""
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return f"line {numbers[0]}{more}: longer than {most} characters, not read"
