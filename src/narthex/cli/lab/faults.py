"""`narthex lab fault`: injection of faults."""

from __future__ import annotations

import time
from typing import Any, Literal

import click
import msgspec

from narthex.cli.lab import name_argument, name_option, report_lab_errors
from narthex.cli.options import output_option, with_options
from narthex.cli.output import print_document
from narthex.lab.faults import FaultKind, InjectedFault
from narthex.lab.program import labs
from narthex.model.duration import duration
from narthex.runtime.logs import printable


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse `30s`, `2m`, `500ms` to seconds."""
    if value is None:
        return None
    try:
        seconds = duration(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}", ctx, param) from None
    if seconds <= 0:
        raise click.BadParameter(f"{value!r} is not positive", ctx, param)
    return seconds


_common = with_options(
    click.option(
        "--for",
        "seconds",
        metavar="DURATION",
        callback=_seconds,
        help="Duration: 30s, 2m, 500ms. Default: until `fault end`.",
    ),
    name_option,
    output_option,
    report_lab_errors,
)
_targets = click.argument("targets", nargs=-1, required=True, metavar="TARGET...")


class FaultDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lab-fault"):
    """What `narthex lab fault loss`, `partition`, `delay`, and `api` print with `-o json`."""

    version: Literal[1] = 1
    fault: InjectedFault


class FaultKillDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lab-fault-kill"):
    """What `narthex lab fault kill -o json` prints."""

    version: Literal[1] = 1
    target: str


class FaultEndDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lab-fault-end"):
    """What `narthex lab fault end -o json` prints."""

    version: Literal[1] = 1
    ended: tuple[InjectedFault, ...]


@click.group(name="fault")
def fault() -> None:
    """Inject faults: packet loss, partitions, delays, killed processes, an unavailable API server.

    A TARGET is a node (node-1) or a pod (NAMESPACE/NAME, or NAME in namespace `default`). `narthex lab status` shows active
    faults.
    """


@fault.command()
@_targets
@click.option("--percent", default=50, show_default=True, type=click.IntRange(1, 100), help="Share of packets.")
@_common
def loss(targets: tuple[str, ...], percent: int, seconds: float | None, name: str, output: str) -> None:
    """Drop packets from and to each TARGET at random.

    For a node, packets are lost between the node and the network, including ARP; traffic between its pods is not affected.
    """
    _start(name, output, FaultKind.LOSS, targets, seconds, percent=percent)


@fault.command()
@_targets
@_common
def partition(targets: tuple[str, ...], seconds: float | None, name: str, output: str) -> None:
    """Disconnect TARGETs from the network.

    Nodes that are named together reach each other, but neither other nodes nor `outside`; a pod reaches nothing.
    """
    _start(name, output, FaultKind.PARTITION, targets, seconds)


@fault.command()
@_targets
@click.option(
    "--milliseconds", default=100, show_default=True, type=click.IntRange(1, 60000), help="Delay of each packet."
)
@_common
def delay(targets: tuple[str, ...], milliseconds: int, seconds: float | None, name: str, output: str) -> None:
    """Delay packets to a node or from a pod. Requires netem in the kernel."""
    _start(name, output, FaultKind.DELAY, targets, seconds, milliseconds=milliseconds)


@fault.command()
@click.argument("word", metavar="down", type=click.Choice(["down"]))
@_common
def api(word: str, seconds: float | None, name: str, output: str) -> None:
    """Stop the API server: connections of nodes and kubectl break, and new ones are refused. Its objects stay."""
    del word
    _start(name, output, FaultKind.API, (), seconds)


@fault.command()
@click.argument("target")
@name_option
@output_option
@report_lab_errors
def kill(target: str, name: str, output: str) -> None:
    """Kill TARGET: a node, the containers of a pod, process/NODE, the `narthex node` of a node, or proxy/NODE, its proxy.

    A dead node stays dead until `lab down`. Containers restart according to the pod's restartPolicy; a node's process
    restarts at once. The proxy is part of that process, or the kube-proxy of `lab up --kube-proxy`.
    """
    _send(name, {"kill": target})
    print_document(FaultKillDocument(target=target), output, lambda: f"{target} is killed.\n")


@fault.command(name="list")
@name_option
@output_option
@report_lab_errors
def list_faults(name: str, output: str) -> None:
    """List active faults."""
    active = labs.read(name).faults
    now = time.time()
    lines = [printable(f"{each.number}  {each.text(now)}") + "\n" for each in active]
    print_document(active, output, lambda: "".join(lines) or "There are no active faults.\n")


@fault.command()
@click.argument("number", required=False, type=click.IntRange(min=1))
@name_option
@output_option
@report_lab_errors
def end(number: int | None, name: str, output: str) -> None:
    """End the fault with this NUMBER, or all faults."""
    ended = msgspec.convert(_send(name, {"end": number})["ended"], tuple[InjectedFault, ...])
    now = time.time()
    lines = [printable(f"Ended: {msgspec.structs.replace(each, until=None).text(now)}") + "\n" for each in ended]
    print_document(FaultEndDocument(ended=ended), output, lambda: "".join(lines) or "There are no active faults.\n")


def _start(
    name: str, output: str, kind: FaultKind, targets: tuple[str, ...], seconds: float | None, **more: int
) -> None:
    request = {"kind": kind.value, "targets": targets, "seconds": seconds, **more}
    begun = msgspec.convert(_send(name, {"begin": request})["fault"], InjectedFault)
    text = f"{begun.text(begun.since)} (end it with `narthex lab fault end {begun.number}{name_argument(name)}`)"
    print_document(FaultDocument(fault=begun), output, lambda: printable(text) + "\n")


def _send(name: str, content: dict[str, Any]) -> dict[str, Any]:
    return labs.request(name, {"fault": content})
