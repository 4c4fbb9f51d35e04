"""`narthex lab record` and `narthex lab replay`: recording and replay of a history."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from narthex.cli.lab import name_argument, name_option, report_lab_errors
from narthex.cli.options import output_option
from narthex.cli.output import print_document
from narthex.lab.program import labs
from narthex.runtime.logs import printable

if TYPE_CHECKING:
    from narthex.lab.program.recording import ReplaySummary
    from narthex.lab.replay import Replay


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--speed",
    type=click.FloatRange(min=0.001),
    help="1: the original pace; 10: ten times as fast. Default: no waiting.",
)
@output_option
@report_lab_errors
def replay(file: Path, speed: float | None, output: str) -> None:
    """Replay the history in FILE, as written by `narthex lab record`, without a network and without root.

    The replay repeats all writes of users and nodes, and runs the controllers at the same times. They depend on nothing else, so the final
    objects are identical: names, addresses, slices. JSON output contains all of them. If a controller decides differently,
    for instance in another version of Narthex, the replay ends with the first difference.
    """
    from narthex.lab.program.recording import replay as replay_history

    printer = _ChangePrinter(quiet=output == "json" or speed is None)
    done = replay_history(file, speed, printer)
    print_document(done, output, lambda: _summary(done))


def _summary(done: ReplaySummary) -> str:
    seconds = (done.end - done.begin).total_seconds()
    kinds = Counter(each["kind"] for each in done.objects)
    objects = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "nothing"
    return (
        f"Lab {done.lab!r}, {seconds:.1f} s from {done.begin:%Y-%m-%d %H:%M:%S} UTC, replayed:\n"
        f"  {done.written} changes by users and nodes repeated\n"
        f"  {done.decided} changes by controllers in {done.turns} runs, all identical\n"
        f"Final objects: {objects}\n"
    )


class RecordDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lab-record"):
    """What `narthex lab record -o json` prints."""

    version: Literal[1] = 1
    path: str
    """The recorded file."""


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--end", is_flag=True, help="End the running recording.")
@name_option
@output_option
@report_lab_errors
def record(file: Path | None, end: bool, name: str, output: str) -> None:
    """Record a lab's history to FILE from now on: all objects, each change with its time, and faults.

    FILE contains JSON lines and is readable by root only. Secrets are recorded without content; all other fields of objects
    (environment variables, annotations) are included. `narthex lab replay` replays the file.
    """
    if end is (file is not None):
        raise click.UsageError("give FILE to start a recording, or --end")
    content = {"end": True} if file is None else {"begin": str(file.absolute())}
    reply = labs.request(name, {"record": content})
    ended = f"{reply['path']} is complete."
    started = f"Recording to {reply['path']}; `narthex lab record --end{name_argument(name)}` ends it."
    print_document(RecordDocument(path=reply["path"]), output, lambda: printable(ended if end else started) + "\n")


class _ChangePrinter:
    """Prints changes as the replay reaches them."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._version = 0

    def __call__(self, moment: datetime, replayed: Replay) -> None:
        if self._quiet:
            return
        for change in replayed.registry.store.changes(self._version or replayed.begin.version):
            word = "deleted" if change.now is None else "changed" if change.was is not None else "created"
            name = "/".join(part for part in change.key if part)
            click.echo(printable(f"{moment:%H:%M:%S.%f}"[:-3] + f" {change.kind} {name} {word}"))
        self._version = replayed.registry.version
