"""Commands whose exit status is an answer: 1 says that something differs, so what goes wrong must not end with 1."""

from __future__ import annotations

from typing import Any

import click

CANNOT_TELL = 2


class _CannotTell(click.ClickException):
    exit_code = CANNOT_TELL


class AnswersByStatus(click.Command):
    """Ends with CANNOT_TELL where another command would end with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """As usual, but for the status of errors."""
        try:
            return super().invoke(ctx)
        except click.UsageError:
            # That is 2 already, and shows how the command is called.
            raise
        except click.ClickException as error:
            raise _CannotTell(error.format_message()) from error
