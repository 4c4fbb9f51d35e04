"""`narthex lab record` and `narthex lab replay`: a history, and the same once more."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from narthex.lab.program import labs
from narthex.lab.program.state import LabError, StateDirectory
from narthex.runtime.logs import printable

if TYPE_CHECKING:
    from narthex.lab.replay import Replay

_SECONDS = 60.0


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--speed",
    type=click.FloatRange(min=0.001),
    help="1: in the pace of then; 10: ten times as fast. Default: wait for nothing.",
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the output.")
def replay(file: Path, speed: float | None, output: str) -> None:
    """Go through the history in FILE once more, which `narthex lab record` wrote, without a network and without root.

    What people and nodes had written is written again, and the controllers decide again. As they depend on nothing but that, the
    objects at the end are the same: names, addresses, slices. JSON has all of them. A controller that decides otherwise, in
    another version of Narthex for instance, ends the replay with the first thing that differs.
    """
    from narthex.lab.program.recording import replay as go

    told = _Teller(quiet=output == "json" or speed is None)
    try:
        done = go(file, speed, told)
    except LabError as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(done)))
        return
    seconds = (done.end - done.begin).total_seconds()
    click.echo(f"Lab {done.lab!r}, {seconds:.1f} s from {done.begin:%Y-%m-%d %H:%M:%S} UTC on, replayed:")
    click.echo(f"  {done.written} changes of people and nodes, written again")
    click.echo(f"  {done.decided} changes of controllers in {done.turns} turns, each decided as then")
    kinds = Counter(each["kind"] for each in done.objects)
    click.echo("At the end: " + (", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "nothing"))


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--end", is_flag=True, help="End the record that is being written.")
@click.option("--name", default=labs.DEFAULT_NAME, show_default=True, help="Which lab.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the output.")
def record(file: Path | None, end: bool, name: str, output: str) -> None:
    """Record a lab's history in FILE from now on: all objects, each change of them with its time, and faults.

    The file is one of JSON lines, readable by root alone. Of Secrets it has the names only; what else the objects hold (environment
    variables, annotations) is in it. `narthex lab replay` goes through it once more.
    """
    if end is (file is not None):
        raise click.UsageError("give FILE to begin, or --end")
    content = {"end": True} if file is None else {"begin": str(file.absolute())}
    try:
        told = labs.send_command(StateDirectory(labs.read(name).name), {"record": content}, _SECONDS)
    except LabError as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(told)))
    elif end:
        click.echo(printable(f"{told['path']} is complete."))
    else:
        option = "" if name == labs.DEFAULT_NAME else f" --name {name}"
        click.echo(printable(f"{told['path']} is being written; `narthex lab record --end{option}` ends it."))


class _Teller:
    """Tells what happens while it happens."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._version = 0

    def __call__(self, moment: datetime, again: Replay) -> None:
        if self._quiet:
            return
        for change in again.registry.store.changes(self._version or again.begin.version):
            word = "deleted" if change.now is None else "changed" if change.was is not None else "created"
            name = "/".join(part for part in change.key if part)
            click.echo(printable(f"{moment:%H:%M:%S.%f}"[:-3] + f" {change.kind} {name} {word}"))
        self._version = again.registry.version
