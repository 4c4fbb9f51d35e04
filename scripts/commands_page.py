"""Write docs/reference/commands.md from the commands themselves: `python scripts/commands_page.py`.

With `-` the page is printed instead. In a process of its own: click keeps a command's help option from its first use.
"""

from __future__ import annotations

import sys
from pathlib import Path

from command_tree import commands

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"
HEAD = """# Commands

Made from the commands' own help by `scripts/commands_page.py`; a test holds it to them.
"""


def text() -> str:
    """Return the page as text."""
    return HEAD + "".join(
        f"\n## {context.command_path}\n\n```\n{command.get_help(context)}\n```\n" for command, context in commands()
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        print(text(), end="")
    else:
        PAGE.write_text(text())
