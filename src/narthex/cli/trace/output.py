"""How `narthex trace` prints a path: as text, as JSON, or as a picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click
import msgspec

from narthex.cli.output import output
from narthex.model.store import Snapshot
from narthex.trace.causes import report
from narthex.trace.causes.finding import CauseFinding
from narthex.trace.document import trace_document
from narthex.trace.model import PacketPath
from narthex.trace.render.text import text

if TYPE_CHECKING:
    from narthex.trace.program.known import KnownCluster
    from narthex.trace.program.probing import ProbeComparison

PICTURES = ("dot", "mermaid", "html", "svg")

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json", *PICTURES]),
    default="text",
    show_default=True,
    help="html and svg are self-contained files, for tickets; dot and mermaid are graphs for other tools.",
)


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    """A path, the causes of its failure, and the result of a probe."""

    path: PacketPath
    findings: list[CauseFinding] = []
    tried: ProbeComparison | None = None

    @property
    def parts(self) -> bool:
        """True if the kernel treated the probe in another way than predicted."""
        return self.tried is not None and not self.tried.alignment.agrees


def findings_of(path: PacketPath, known: KnownCluster) -> list[CauseFinding]:
    """Return the causes of a failure, by everything that is known of nodes and objects."""
    from narthex.trace.causes.find import find

    return find(path, {view.name: view for view in known.views}, known.snapshot if known.has_objects else None)


def findings_of_objects(path: PacketPath, snapshot: Snapshot) -> list[CauseFinding]:
    """Return the causes of a failure, by objects alone."""
    from narthex.trace.causes.find import find

    return find(path, {}, snapshot)


def show(result: TraceResult, format: str, *, every: bool = False) -> None:
    """Print a result; `every` adds details to the text."""
    from narthex.trace.program import probing

    if format in PICTURES:
        click.echo(_picture(format)(result.path, result.findings), nl=False)
        return
    probe = probing.record(result.tried) if result.tried is not None else None
    output(trace_document(result.path, result.findings, probe), format, lambda: _text(result, every))


def _text(result: TraceResult, every: bool) -> str:
    from narthex.trace.program import probing

    probed = probing.text(result.tried) if result.tried is not None else ""
    return text(result.path, every=every) + report.text(result.findings) + probed


def _picture(format: str) -> Callable[[PacketPath, list[CauseFinding]], str]:
    from narthex.trace.render.drawing import draw

    if format == "html":
        from narthex.trace.render.html import page

        return page
    if format == "svg":
        from narthex.trace.render.svg import svg

        return lambda path, findings: svg(draw(path), findings)
    from narthex.trace.render import graph

    made = graph.dot if format == "dot" else graph.mermaid
    return lambda path, _: made(draw(path))
