"""Write docs/reference/commands.md from the commands themselves: `python scripts/commands_page.py`.

With `-` the page is printed instead. In a process of its own: click keeps a command's help option from its first use.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from narthex.cli import kubectl, main

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"
HEAD = """# Commands

Made from the commands' own help by `scripts/commands_page.py`; a test holds it to them.
"""


def text() -> str:
    """Return the page as text."""
    context = click.Context(main, info_name="narthex", terminal_width=100, **main.context_settings)
    plugin = click.Context(
        kubectl.main, info_name="kubectl narthex", terminal_width=100, **kubectl.main.context_settings
    )
    return HEAD + "".join((*_section(main, context), *_section(kubectl.main, plugin)))


def _section(command: click.Command, context: click.Context) -> list[str]:
    """One command and those below it."""
    help_text = command.get_help(context)
    parts = [f"\n## {context.command_path}\n\n```\n{help_text}\n```\n"]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                parts += _section(below, click.Context(below, info_name=name, parent=context, terminal_width=100))
    return parts


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        print(text(), end="")
    else:
        PAGE.write_text(text())
