"""Output of all commands: JSON or text, the exit status of comparisons, and progress on a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """End the command with the message of an input that cannot be used, or of a program that cannot start."""
    from narthex.model import InputError
    from narthex.runtime.logs import printable, printable_lines
    from narthex.runtime.process import StartError

    try:
        yield
    except InputError as error:
        # One line per error of a file.
        raise click.ClickException(printable_lines(str(error))) from error
    except StartError as error:
        raise click.ClickException(printable(str(error))) from error


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


PATIENCE = 1.0
"""Seconds after which the line appears, and between its updates."""
_CLEAR = "\r\x1b[2K"
_SECONDS_WIDTH = len(" ... 99999 s") + 1
_busy = threading.Lock()


@contextlib.contextmanager
def working(what: str | Callable[[], str]) -> Iterator[None]:
    """Show `what` and the elapsed seconds while the block runs, on stderr if it is a terminal. Nested blocks show nothing.

    If `what` is a function, each update shows what it returns then, cut to the terminal's width.
    """
    if not sys.stderr.isatty() or not _busy.acquire(blocking=False):
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(what, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _busy.release()


def _show(what: str | Callable[[], str], done: threading.Event) -> None:
    begin = time.monotonic()
    shown = False
    while not done.wait(PATIENCE):
        shown = True
        text = what if isinstance(what, str) else what()[: shutil.get_terminal_size().columns - _SECONDS_WIDTH]
        sys.stderr.write(f"{_CLEAR}{text} ... {time.monotonic() - begin:.0f} s")
        sys.stderr.flush()
    if shown:
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
