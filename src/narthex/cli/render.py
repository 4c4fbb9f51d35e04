"""`narthex render`: the rules of a mode for a plan."""

from __future__ import annotations

from typing import Any, Literal

import click
import msgspec

from narthex.cli.inputs import inputs_of, options, source_options
from narthex.cli.options import output_option
from narthex.cli.output import print_document, working
from narthex.model import IPFamily


class RenderDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="render"):
    """What `narthex render -o json` prints."""

    version: Literal[1] = 1
    node: str
    mode: str
    rules: dict[str, str]
    """Text for the kernel's tool, by IP family (`IPv4`, `IPv6`)."""


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
    with working("planning and rendering"):
        texts = {each.label: backend.text(backend.render(inputs.plan(each))) for each in families}
    document = RenderDocument(node=inputs.config.node_name, mode=inputs.mode, rules=texts)
    print_document(document, output, lambda: "".join(text.removesuffix("\n") + "\n" for text in texts.values()))
