"""The playground's side of Python: sort what was pasted, trace as `narthex trace` does, and return every form of the answer.

It runs in the page's worker. Only the folder that it is given exists there, so files are written and read as on a node.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from narthex.cli.trace import NOT_KNOWN, TraceResult, command, show, trace_result
from narthex.trace.program.pasted_files import store_pasted

FORMATS = ("json", "html", "text")


def arguments(request: dict[str, Any], folder: Path) -> list[str]:
    """Write the files of a request below `folder`, and return the arguments that `narthex trace` would get there.

    Args:
        request: `source`, `destination`, `options` (names of options with their values), and `files`, pairs of a name and
            the content as text or bytes.
        folder: An empty folder.
    """
    sources = store_pasted(request["files"], folder)
    options = [
        word for name, value in sorted(request["options"].items()) if value for word in (f"--{name}", str(value))
    ]
    return [*sources, *options, "--", request["source"], request["destination"]]


def answer(request: dict[str, Any], folder: Path, formats: Sequence[str] = FORMATS) -> dict[str, Any]:
    """Trace a packet; return the arguments of the command, its output in each format, its messages, and its exit status.

    `folder` is emptied first. An error has neither output nor a path, and its message is the last one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    messages = io.StringIO()
    answered: dict[str, Any] = {"output": {}}
    with contextlib.chdir(folder), contextlib.redirect_stderr(messages):
        answered["arguments"] = arguments(request, folder)
        try:
            result = _traced(list(answered["arguments"]))
        except click.ClickException as error:
            error.show()
            return {**answered, "messages": messages.getvalue(), "status": error.exit_code}
        answered["output"] = {format: _shown(result, format) for format in formats}
    return {**answered, "messages": messages.getvalue(), "status": NOT_KNOWN if result.unknown else 0}


def answer_json(request: str, contents: Sequence[str | bytes], folder: str) -> str:
    """Return the answer to a request as JSON; `contents` are those of its files, which the request only names."""
    asked = json.loads(request)
    asked["files"] = list(zip(asked["files"], contents, strict=True))
    return json.dumps(answer(asked, Path(folder)))


def _traced(words: list[str]) -> TraceResult:
    with command.make_context("narthex trace", words) as context:
        given = dict(context.params)
        for name in ("probe", "every", "output", "color"):
            del given[name]
        source, destination, lab = given.pop("source"), given.pop("destination"), given.pop("lab")
        return trace_result(source, destination, given, lab)


def _shown(result: TraceResult, format: str) -> str:
    """Return what the command prints in a format."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _columns(100):
        show(result, format, color="never")
    return printed.getvalue()


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    """Let text be as wide as tickets show it."""
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
