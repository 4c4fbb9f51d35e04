"""Write a manual page for each command, from its declaration: `python scripts/man_pages.py DIRECTORY`.

Pages of section 1: `narthex.1`, `narthex-trace.1`, `narthex-lab-up.1`. To read one: `man -l DIRECTORY/narthex-trace.1`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from command_tree import commands

import narthex


def page(command: click.Command, context: click.Context) -> str:
    """Return the manual page of a command as troff input."""
    path = context.command_path
    name = path.replace(" ", "-")
    lines = [
        f'.TH "{_text(name.upper())}" 1 "" "narthex {narthex.__version__}" "Narthex"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(command.get_short_help_str(500).rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(path)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(command.help or ""),
        *_options(command, context),
        *_subcommands(command, context),
        *_see_also(command, context),
    ]
    return "\n".join(lines) + "\n"


def _paragraphs(help_text: str) -> Iterator[str]:
    """Yield the lines of a help text. A paragraph after the character \\b keeps its lines, as click shows it."""
    for number, paragraph in enumerate(inspect.cleandoc(help_text.partition("\f")[0]).split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *map(_text, paragraph.splitlines()[1:]), ".fi")
        else:
            yield _text(" ".join(paragraph.split()))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [
        found
        for each in command.get_params(context)
        if isinstance(each, click.Option) and (found := each.get_help_record(context))
    ]
    if records:
        yield ".SH OPTIONS"
    for names, text in records:
        yield from (".TP", f"\\fB{_text(names)}\\fR", _text(" ".join(text.split())) or "\\&")


def _subcommands(command: click.Command, context: click.Context) -> Iterator[str]:
    if not isinstance(command, click.Group):
        return
    yield ".SH COMMANDS"
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        if below is not None and not below.hidden:
            yield from (".TP", f"\\fB{_text(name)}\\fR", _text(below.get_short_help_str(500)))


def _see_also(command: click.Command, context: click.Context) -> Iterator[str]:
    path = context.command_path
    names = [path.rpartition(" ")[0]] if " " in path else []
    if isinstance(command, click.Group):
        names += [f"{path} {name}" for name in command.list_commands(context)]
    if names:
        yield ".SH SEE ALSO"
        yield ",\n".join(f"\\fB{_text(name.replace(' ', '-'))}\\fR(1)" for name in names)


def _text(text: str) -> str:
    """Return text that troff prints as it is: no escapes, no requests, hyphens that can be copied."""
    escaped = text.replace("\\", "\\(rs").replace("-", "\\-")
    return re.sub(r"(?m)^([.'])", r"\\&\1", escaped)


def main(directory: Path) -> int:
    """Write all pages. Return an exit status."""
    directory.mkdir(parents=True, exist_ok=True)
    for command, context in commands():
        (directory / f"{context.command_path.replace(' ', '-')}.1").write_text(page(command, context))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
