"""Lines of styled text that fit a width. Pure: a terminal's escape sequences are made where lines are printed."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from narthex.model import visible

_LEAST_ROOM = 24
"""Characters that a line has at least, however deep its indentation."""


class Style(enum.Enum):
    """The role of a text; the terminal decides on its color."""

    PLAIN = "plain"
    STRONG = "strong"
    DIM = "dim"
    GOOD = "good"
    BAD = "bad"
    DOUBT = "doubt"


class Span(NamedTuple):
    """A text of one style."""

    text: str
    style: Style = Style.PLAIN


StyledLine = tuple[Span, ...]


def paragraph(
    text: str, width: int, *, style: Style = Style.PLAIN, first: Iterable[Span] = (), further: str | None = None
) -> Iterator[StyledLine]:
    """Yield a text as lines of at most `width` characters.

    Args:
        text: Words; control characters are made visible.
        width: Characters of a line.
        style: The style of the text.
        first: What precedes the text in the first line.
        further: What precedes it in all other lines. Default: spaces that are as wide as `first`.
    """
    prefix = tuple(first)
    taken = sum(len(span.text) for span in prefix)
    indent = " " * taken if further is None else further
    shown = visible(" ".join(text.split()))
    for line in _filled(shown, max(width - taken, _LEAST_ROOM), max(width - len(indent), _LEAST_ROOM)):
        yield (*prefix, Span(line, style))
        prefix = (Span(indent),)


def _filled(text: str, first: int, room: int) -> Iterator[str]:
    """Yield the lines of a text; only a word that is longer than a line is broken."""
    left, line = first, ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > left:
            yield line
            left, line = room, ""
        while len(word) > left:
            yield word[:left]
            word, left = word[left:], room
        line = f"{line} {word}" if line else word
    yield line


def plain(lines: Iterable[StyledLine]) -> str:
    """Return lines without their styles, each with a final newline."""
    return "".join(f"{''.join(span.text for span in line).rstrip()}\n" for line in lines)
