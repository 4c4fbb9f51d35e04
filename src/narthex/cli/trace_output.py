"""How `narthex trace` prints a journey: as text, for programs, or drawn; and why it fails, below."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from narthex.trace.causes import told
from narthex.trace.causes.finding import Finding
from narthex.trace.journey import Journey, as_data
from narthex.trace.journey_text import text

if TYPE_CHECKING:
    from narthex.apps.path.known import Known

DRAWN = ("dot", "mermaid", "html", "svg")

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", *DRAWN]),
    default="text",
    show_default=True,
    help="html and svg are one file each that needs nothing beside it, for tickets; they, dot and mermaid draw what nodes "
    "really have (--live, --bundle, --rules alone, --lab).",
)


def findings_of(journey: Journey, known: Known) -> list[Finding]:
    """Why the journey fails, by all that is known."""
    from narthex.trace.causes.find import find

    return find(journey, {view.name: view for view in known.views}, known.snapshot if known.has_objects else None)


def show(journey: Journey, findings: list[Finding], output: str, *, every: bool = False, probe: Any = None) -> None:
    """Print it. `probe`: what the kernel said of a packet of ours, for JSON."""
    if output == "json":
        data = {
            **as_data(journey),
            "findings": told.as_data(findings),
            **({"probe": probe} if probe is not None else {}),
        }
        click.echo(msgspec.json.format(msgspec.json.encode(data)))
    elif output == "text":
        click.echo(text(journey, every=every), nl=False)
        click.echo(told.text(findings), nl=False)
    else:
        click.echo(_drawn(output)(journey, findings), nl=False)


def _drawn(output: str) -> Callable[[Journey, list[Finding]], str]:
    from narthex.trace.drawing import draw

    if output == "html":
        from narthex.trace.render_html import page

        return page
    if output == "svg":
        from narthex.trace.render_svg import svg

        return lambda journey, findings: svg(draw(journey), findings)
    from narthex.trace import render_graph

    made = render_graph.dot if output == "dot" else render_graph.mermaid
    return lambda journey, _: made(draw(journey))
