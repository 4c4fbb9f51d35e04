"""How `narthex trace` prints a journey: as text, for programs, or drawn; and why it fails, below."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from narthex.trace import explain
from narthex.trace.causes import report as told
from narthex.trace.causes.finding import Finding
from narthex.trace.explain import Explanation
from narthex.trace.model import PacketPath, as_data
from narthex.trace.render.text import text
from narthex.trace.render.tree import text as tree_text

if TYPE_CHECKING:
    from narthex.trace.program.known import Known
    from narthex.trace.program.probing import Tried

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


def findings_of(journey: PacketPath, known: Known) -> list[Finding]:
    """Why the journey fails, by all that is known."""
    from narthex.trace.causes.find import find

    return find(journey, {view.name: view for view in known.views}, known.snapshot if known.has_objects else None)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What stands below a way."""

    findings: list[Finding] = []
    tried: Tried | None = None

    @property
    def parts(self) -> bool:
        """Whether the kernel went another way than predicted."""
        return self.tried is not None and not self.tried.alignment.agrees

    def data(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {"findings": told.as_data(self.findings)}
        if self.tried is not None:
            from narthex.trace.program import probing

            found["probe"] = probing.as_data(self.tried)
        return found

    def text(self) -> str:
        """For people; may be empty."""
        said = told.text(self.findings)
        if self.tried is not None:
            from narthex.trace.program import probing

            said += probing.text(self.tried)
        return said


def show(journey: PacketPath, shown: Shown, output: str, *, every: bool = False) -> None:
    """Print a journey and what stands below it."""
    if output == "json":
        _print_json({**as_data(journey), **shown.data()})
    elif output == "text":
        click.echo(text(journey, every=every) + shown.text(), nl=False)
    else:
        click.echo(_drawn(output)(journey, shown.findings), nl=False)


def show_explanation(
    explanation: Explanation, shown: Shown, output: str, journey: PacketPath | None = None, *, every: bool = False
) -> None:
    """Print what the plan and the rules say, and what stands below it. `journey`: over the lab's nodes, for JSON and with
    `every`."""
    if output == "json":
        beside = {**shown.data(), "journey": as_data(journey)} if journey is not None else {}
        _print_json({**explain.as_data(explanation), **beside})
    else:
        if journey is not None and every:
            click.echo(text(journey, every=True))
        click.echo(tree_text(explanation) + shown.text(), nl=False)


def _print_json(data: dict[str, Any]) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(data)))


def _drawn(output: str) -> Callable[[PacketPath, list[Finding]], str]:
    from narthex.trace.render.drawing import draw

    if output == "html":
        from narthex.trace.render.html import page

        return page
    if output == "svg":
        from narthex.trace.render.svg import svg

        return lambda journey, findings: svg(draw(journey), findings)
    from narthex.trace.render import graph as render_graph

    made = render_graph.dot if output == "dot" else render_graph.mermaid
    return lambda journey, _: made(draw(journey))
