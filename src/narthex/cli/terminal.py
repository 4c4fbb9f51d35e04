"""Styled lines on a terminal: their width and their colors."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

import click

from narthex.trace.render.styled import Span, Style, StyledLine, paragraph, plain
from narthex.trace.render.text import WIDTH

_LOOKS: dict[Style, dict[str, Any]] = {
    Style.STRONG: {"bold": True},
    Style.DIM: {"dim": True},
    Style.GOOD: {"fg": "green", "bold": True},
    Style.BAD: {"fg": "red", "bold": True},
    Style.DOUBT: {"fg": "yellow"},
}

color_option = click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Color of the text; auto: on a terminal, unless NO_COLOR is set.",
)


def line_width() -> int:
    """Return the width of lines: that of the terminal, or of COLUMNS; WIDTH if the output goes elsewhere."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size((WIDTH, 24)).columns
    return WIDTH


def print_lines(lines: Iterable[StyledLine], color: str) -> None:
    """Print lines. `color` is `always`, `never`, or `auto`: on a terminal that has colors, without NO_COLOR."""
    colored = color == "always"
    if color == "auto":
        colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if not colored:
        click.echo(plain(lines), nl=False)
        return
    for line in lines:
        click.echo("".join(map(_colored, line)), color=True)


def print_labelled(lines: Iterable[tuple[str, Style]], color: str) -> None:
    """Print lines of the form `label: text`, whose labels have a style.

    On a terminal, long lines wrap, and continue below their text. Elsewhere each line stays one, so that programs can search them.
    """
    width = line_width() if sys.stdout.isatty() else sys.maxsize
    shown: list[StyledLine] = []
    for line, style in lines:
        label, colon, text = line.partition(": ")
        first = (Span(label + colon, style),) if colon else ()
        shown += paragraph(text if colon else line, width, first=first, further="  ")
    print_lines(shown, color)


def _colored(span: Span) -> str:
    look = _LOOKS.get(span.style)
    return click.style(span.text, **look) if look and span.text.strip() else span.text
