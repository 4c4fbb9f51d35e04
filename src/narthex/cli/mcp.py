"""`narthex mcp`: a server for agents, on standard input and output."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click


@click.command()
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder whose files agents may name. Default: no files, only pasted text.",
)
@click.option(
    "--live", is_flag=True, help="Let agents have the rules of this node read, as `narthex trace --live` does."
)
def command(root: Path | None, live: bool) -> None:
    """Answer an agent's questions, in the Model Context Protocol on standard input and output.

    The agent starts this command. Its tools are trace, check, causes, plan, query, and evidence; all of them only read. An answer is short, and
    refers to the whole document (-o json), of which the agent reads the parts that it needs.
    """
    from narthex.trace.program.agent_server import serve

    with contextlib.suppress(KeyboardInterrupt):
        serve(root, live=live)
