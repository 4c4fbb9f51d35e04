"""Output of all commands, as JSON or as text, and the exit status of comparisons."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import click
import msgspec


def print_document(document: object, format: str, text: Callable[[], str]) -> None:
    """Print a document in a format: `json`, or `text`, which `text()` returns with its final newline."""
    click.echo(json_text(document) if format == "json" else text(), nl=False)


def json_text(document: object) -> str:
    """Return a document as indented JSON that ends with a newline. Fractions become text: "1/3"."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain)).decode() + "\n"


def _plain(value: object) -> object:
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


CANNOT_TELL = 2
"""Exit status if the result cannot be determined."""


class _CannotTell(click.ClickException):
    exit_code = CANNOT_TELL


class AnswersByStatus(click.Command):
    """A command whose exit status is its result: errors end with CANNOT_TELL instead of 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except click.UsageError:
            # The exit status is 2 already, and the message shows the usage.
            raise
        except click.ClickException as error:
            raise _CannotTell(error.format_message()) from error
