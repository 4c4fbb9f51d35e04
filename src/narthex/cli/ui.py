"""`narthex ui`: a diagram of a cluster in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from narthex.cli.inputs import NO_SOURCE, has_source, mode_option, source_options
from narthex.cli.output import reported_errors

if TYPE_CHECKING:
    from narthex.lab.ui.board import Board
    from narthex.lab.ui.path import Tracer


port_option = click.option(
    "--port", default=0, type=click.IntRange(0, 65535), help="Port on 127.0.0.1. Default: any free one."
)


@click.command()
@source_options
@mode_option("--mode", default="", help="Mode whose rules determine paths: nftables, iptables, ipvs, or userspace.")
@port_option
def command(mode: str, port: int, **given: Any) -> None:
    """Show a diagram of a cluster in a browser: nodes, Pods, Services, and the path of a packet between two of them.

    The server listens on 127.0.0.1 and requires the token in the printed URL. It watches the API server or the manifests and
    changes nothing. For a lab, use `narthex lab ui`, which also shows the live rules and connections of its nodes.
    """
    from narthex.lab.ui.path import board_of_manifests, board_of_server

    if not has_source(given):
        raise click.UsageError(NO_SOURCE)
    if given["manifests"] is not None:
        show(*board_of_manifests(given["manifests"], mode), port)
    else:
        show(*board_of_server(given["kubeconfig"] or "", given["master"], mode), port)


def show(board: Board, trace: Tracer, port: int) -> None:
    """Serve the page until a signal arrives, and print its URL."""
    from narthex.lab.ui.serve import serve

    with reported_errors():
        serve(board, trace, port, lambda address: click.echo(f"Open {address} (Ctrl+C to stop)"))
