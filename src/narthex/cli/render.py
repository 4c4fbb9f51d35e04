"""`narthex render`: the rules that a plan becomes."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from narthex.cli.inputs import inputs_of, options, output_option, source_options
from narthex.model.net import IPFamily


@click.command()
@source_options
@options
@click.option("--family", type=click.Choice(["4", "6", "both"]), default="both", help="Default: those in use.")
@output_option
def command(family: str, output: str, **given: Any) -> None:
    """Print the rules for one node as their kernel tool reads them. Nothing is written to the kernel."""
    from narthex.proxy.backends import BACKENDS

    inputs = inputs_of(given)
    families = inputs.families if family == "both" else (IPFamily(int(family)),)
    backend = BACKENDS.get(inputs.mode)
    if backend is None:
        raise click.ClickException(
            f"mode {inputs.mode} has no backend here; choose {' or '.join(BACKENDS)} with --mode"
        )
    texts = {each.label: backend.text(backend.render(inputs.plan(each))) for each in families}
    if output == "json":
        data = {"node": inputs.config.node_name, "mode": inputs.mode, "rules": texts}
        click.echo(msgspec.json.format(msgspec.json.encode(data)))
        return
    for text in texts.values():
        click.echo(text, nl=not text.endswith("\n"))
