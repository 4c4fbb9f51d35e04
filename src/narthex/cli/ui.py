"""`narthex ui`: the picture of a cluster in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from narthex.cli.inputs import has_source, mode_option, source_options

if TYPE_CHECKING:
    from narthex.lab.ui.board import Board
    from narthex.lab.ui.path import Tracer


def port_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--port`."""
    return click.option(
        "--port",
        default=0,
        type=click.IntRange(0, 65535),
        help="Of 127.0.0.1. Default: any free one.",
    )(function)


@click.command()
@source_options
@mode_option("--mode", default="", help="nftables, iptables, ipvs or userspace: whose rules a path follows.")
@port_option
def command(mode: str, port: int, **given: Any) -> None:
    """Show a cluster as a picture in a browser: nodes, pods, Services, and the way of a packet between two of them.

    The page is for this machine alone: it listens on 127.0.0.1 and asks for the token in the address that is printed. It
    follows the API server or the manifests; it changes nothing. For a lab use `narthex lab ui`, which knows its nodes' live
    rules and connections, too.
    """
    from narthex.lab.ui.cluster import board_of_manifests, board_of_server

    if not has_source(given):
        raise click.UsageError("no source given: use --manifests DIR, --kubeconfig FILE or --master URL")
    if given["manifests"] is not None:
        show(*board_of_manifests(given["manifests"], mode), port)
    else:
        show(*board_of_server(given["kubeconfig"] or "", given["master"], mode), port)


def show(board: Board, trace: Tracer, port: int) -> None:
    """Serve until a signal comes; tells the address."""
    from narthex.lab.ui.serve import UiError, serve

    try:
        serve(board, trace, port, lambda address: click.echo(f"Open {address} (Ctrl+C ends)"))
    except UiError as error:
        raise click.ClickException(str(error)) from error
