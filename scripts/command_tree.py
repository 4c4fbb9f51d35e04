"""All commands of the program and of the kubectl plugin, for the pages that are made from their declarations."""

from __future__ import annotations

from collections.abc import Iterator

import click

from narthex.cli import kubectl, main

WIDTH = 100
"""Columns of help texts on pages."""


def commands() -> Iterator[tuple[click.Command, click.Context]]:
    """Yield each command that is not hidden, with a context that knows its path: those of `narthex` first, in order of names."""
    for top, name in ((main, "narthex"), (kubectl.main, "kubectl narthex")):
        yield from _below(top, click.Context(top, info_name=name, terminal_width=WIDTH, **top.context_settings))


def _below(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _below(below, click.Context(below, info_name=name, parent=context, terminal_width=WIDTH))
