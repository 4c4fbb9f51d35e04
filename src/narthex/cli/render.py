"""`narthex render`: the rules that a plan becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from narthex.cli.inputs import inputs_of, manifests_option, options, output_option, wishes_of
from narthex.model.net import IPFamily


@click.command()
@manifests_option(required=True)
@options
@click.option("--family", type=click.Choice(["4", "6", "both"]), default="both", help="Default: those in use.")
@output_option
def command(manifests: Path, family: str, output: str, **wishes: Any) -> None:
    """Print the rules for one node as their kernel tool reads them. Nothing is written to the kernel."""
    from narthex.backends import BACKENDS

    inputs = inputs_of(manifests, wishes_of(wishes))
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
