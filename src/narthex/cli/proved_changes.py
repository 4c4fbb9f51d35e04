"""What `narthex diff --prove` and `narthex migrate --prove` print."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from narthex.cli.output import print_document
from narthex.model import visible
from narthex.trace.program.reports import status
from narthex.trace.proof.changes import ChangeReport, ChangesDocument
from narthex.trace.proof.text import change_lines

prove_option = click.option(
    "--prove",
    "proving",
    is_flag=True,
    help="Find all packets whose outcome changes, and prove that there are no others.",
)


def print_changes(reports: tuple[ChangeReport, ...], output: str, *, different: int = 1) -> NoReturn:
    """Print reports, and end the command: with status 0, `different` if something changes, or 2 if it can't be decided."""
    found = status(reports)
    found = different if found == 1 else found
    print_document(ChangesDocument(status=found, reports=reports), output, lambda: _text(reports))
    sys.exit(found)


def _text(reports: tuple[ChangeReport, ...]) -> str:
    return "".join(f"{visible(line)}\n" for report in reports for line in change_lines(report))
