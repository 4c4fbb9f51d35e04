"""The limit of a line of foreign text.

A parser meets what other programs wrote and what a user pasted. A regular expression that is harmless in a line of a
rule takes minutes in a line of a megabyte. (For the limit of problems see `model.problem.BoundedProblems`.)
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_LINE = 16 * 1024
"""Longest line in characters that is parsed. The longest that iptables, ipset, ipvsadm, ip, ss, conntrack, or sysctl print has
some hundred characters, and that of a resolver's file a few thousand."""


def without_long_lines(lines: Sequence[str], most: int) -> tuple[list[str], list[int]]:
    """Return the lines, with empty ones in place of lines that are too long, and the numbers of the latter, from 1."""
    if max(map(len, lines), default=0) <= most:
        return list(lines), []
    long = [number for number, line in enumerate(lines, 1) if len(line) > most]
    return [line if len(line) <= most else "" for line in lines], long


def without_long_lines_of(text: str) -> tuple[str, str]:
    """Return a text without its lines that are too long, and a message about them, empty if there is none."""
    if len(text) <= MAX_LINE:
        return text, ""
    lines, long = without_long_lines(text.split("\n"), MAX_LINE)
    return ("\n".join(lines), long_lines_text(long, MAX_LINE)) if long else (text, "")


def long_lines_text(numbers: Sequence[int], most: int) -> str:
    """Return the message about lines that were not read."""
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return f"line {numbers[0]}{more}: longer than {most} characters, not read"
