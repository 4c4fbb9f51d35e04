"""`narthex lab fault`: what goes wrong on request, and ends again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import msgspec

from narthex.lab.faults import FaultKind, InjectedFault
from narthex.lab.program import labs
from narthex.lab.program.state import LabError, StateDirectory
from narthex.model.duration import duration
from narthex.runtime.logs import printable

_REQUEST_SECONDS = 60.0


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Seconds of `30s`, `2m`, `500ms`."""
    if value is None:
        return None
    try:
        seconds = duration(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}", ctx, param) from None
    if seconds <= 0:
        raise click.BadParameter(f"{value!r} is over before it begins", ctx, param)
    return seconds


_name = click.option("--name", default=labs.DEFAULT_NAME, show_default=True, help="Which lab.")
_output = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the output."
)
_for = click.option(
    "--for",
    "seconds",
    metavar="DURATION",
    callback=_seconds,
    help="How long: 30s, 2m, 500ms. Default: until it is ended.",
)


@click.group(name="fault")
def fault() -> None:
    """Let something go wrong: packets get lost, nodes are cut off, processes die, the API server is away.

    A TARGET is a node (node-1) or a pod (NAMESPACE/NAME, or NAME in the namespace `default`). What is in force stands in
    `narthex lab status`; `narthex lab down` ends it with the rest.
    """


def _common(function: Callable[..., None]) -> Callable[..., None]:
    return _for(_name(_output(function)))


@fault.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--percent", default=50, show_default=True, type=click.IntRange(1, 100), help="Of all packets.")
@_common
def loss(targets: tuple[str, ...], percent: int, seconds: float | None, name: str, output: str) -> None:
    """Lose packets from and to each TARGET, each by chance.

    At a node this is between it and the network, so pods of one node reach one another; ARP gets lost, too.
    """
    _begin(name, output, FaultKind.LOSS, targets, seconds, percent=percent)


@fault.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@_common
def partition(targets: tuple[str, ...], seconds: float | None, name: str, output: str) -> None:
    """Cut TARGETs off. Nodes that are named together reach one another, but no other node and no `outside`; a pod reaches
    nobody."""
    _begin(name, output, FaultKind.PARTITION, targets, seconds)


@fault.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--milliseconds", default=100, show_default=True, type=click.IntRange(1, 60000), help="For each packet.")
@_common
def delay(targets: tuple[str, ...], milliseconds: int, seconds: float | None, name: str, output: str) -> None:
    """Let packets come later: those to a node, those from a pod. Only where the kernel has netem."""
    _begin(name, output, FaultKind.DELAY, targets, seconds, milliseconds=milliseconds)


@fault.command()
@click.argument("word", metavar="down", type=click.Choice(["down"]))
@_common
def api(word: str, seconds: float | None, name: str, output: str) -> None:
    """Take the API server down: nodes and kubectl lose their connections and get no new ones. Its objects stay."""
    del word
    _begin(name, output, FaultKind.API, (), seconds)


@fault.command()
@click.argument("target")
@_name
@_output
def kill(target: str, name: str, output: str) -> None:
    """Kill TARGET, without a word to anybody: a node, the containers of a pod, or process/NODE, the `narthex node` of a node.

    A dead node stays dead until `lab down`. Containers are started again as their pod's restartPolicy says, and so is a node's
    process, as a supervisor would.
    """
    answer = _ask(name, {"kill": target})
    _print(answer, output, f"{target} is killed.")


@fault.command(name="list")
@_name
@_output
def list_faults(name: str, output: str) -> None:
    """Show what goes wrong at present."""
    try:
        present = labs.read(name).faults
    except LabError as error:
        raise click.ClickException(str(error)) from error
    now = time.time()
    lines = [printable(f"{each.number}  {each.text(now)}") for each in present]
    _print(present, output, "\n".join(lines) or "Nothing goes wrong on request.")


@fault.command()
@click.argument("number", required=False, type=click.IntRange(min=1))
@_name
@_output
def end(number: int | None, name: str, output: str) -> None:
    """End the fault of this NUMBER, or all of them."""
    ended = msgspec.convert(_ask(name, {"end": number})["ended"], tuple[InjectedFault, ...])
    now = time.time()
    said = [printable(f"Ended: {msgspec.structs.replace(each, until=None).text(now)}") for each in ended]
    _print(ended, output, "\n".join(said) or "There was nothing to end.")


def _begin(
    name: str, output: str, kind: FaultKind, targets: tuple[str, ...], seconds: float | None, **more: int
) -> None:
    wish = {"kind": kind.value, "targets": targets, "seconds": seconds, **more}
    begun = msgspec.convert(_ask(name, {"begin": wish})["fault"], InjectedFault)
    option = "" if name == labs.DEFAULT_NAME else f" --name {name}"
    text = begun.text(begun.since)
    _print(begun, output, printable(f"{text} (end it with `narthex lab fault end {begun.number}{option}`)"))


def _ask(name: str, content: dict[str, Any]) -> dict[str, Any]:
    try:
        return labs.send_command(StateDirectory(labs.read(name).name), {"fault": content}, _REQUEST_SECONDS)
    except LabError as error:
        raise click.ClickException(str(error)) from error


def _print(value: object, output: str, text: str) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)) if output == "json" else text)
