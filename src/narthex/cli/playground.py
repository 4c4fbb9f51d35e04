"""`narthex playground`: explain pasted rules in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from narthex.cli.output import reported_errors
from narthex.cli.ui import port_option


@click.command()
@click.option(
    "--site",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the built page. Default: where `make playground` of this checkout puts it.",
)
@port_option
def command(site: Path | None, port: int) -> None:
    """Explain the path of a packet in a browser: paste rules, manifests, or a bug report.

    The server listens on 127.0.0.1 and only sends the files of the page, which any other static host can send as well. `make
    playground` builds them. Explanations are made in the browser, by the code of `narthex trace`; nothing that a user pastes leaves
    the page.
    """
    from narthex.trace.program.playground import BUILT, serve

    with reported_errors():
        serve(site or BUILT, port, lambda address: click.echo(f"Open {address} (Ctrl+C to stop)"))
