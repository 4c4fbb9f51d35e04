"""`narthex render`: the rules of a mode for a plan."""

from __future__ import annotations

from typing import Any

import click

from narthex.cli.inputs import inputs_of, options, output_option, source_options
from narthex.cli.output import json_text
from narthex.model.net import IPFamily


@click.command()
@source_options
@options
@click.option(
    "--family", type=click.Choice(["4", "6", "both"]), default="both", help="IP family. Default: those in use."
)
@output_option
def command(family: str, output: str, **given: Any) -> None:
    """Print the rules for one node in the format of their kernel tool. The kernel is not changed."""
    from narthex.proxy.backends import BACKENDS

    inputs = inputs_of(given)
    families = inputs.families if family == "both" else (IPFamily(int(family)),)
    backend = BACKENDS.get(inputs.mode)
    if backend is None:
        raise click.ClickException(f"mode {inputs.mode} is not supported; use --mode with {' or '.join(BACKENDS)}")
    texts = {each.label: backend.text(backend.render(inputs.plan(each))) for each in families}
    if output == "json":
        data = {"node": inputs.config.node_name, "mode": inputs.mode, "rules": texts}
        click.echo(json_text(data), nl=False)
        return
    for text in texts.values():
        click.echo(text, nl=not text.endswith("\n"))
