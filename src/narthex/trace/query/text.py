"""Answers as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from narthex.trace.proof.class_groups import way_text
from narthex.trace.proof.prove import ProofEnd
from narthex.trace.query.answer import QueryLine, QueryReport
from narthex.trace.render.styled import Span, Style, StyledLine, paragraph

_STYLES = {"delivered": Style.GOOD, "rejected": Style.BAD, "dropped": Style.BAD, "unsupported": Style.DOUBT}


def query_lines(report: QueryReport, width: int) -> Iterator[StyledLine]:
    """Yield the lines of an answer."""
    where = f"node {report.node}, {report.family}" if report.node else report.family
    yield from paragraph(f"{where}, by {' and by '.join(report.read)}:", width, style=Style.DIM)
    for line in report.lines:
        yield ()
        yield from _line(line, report, width)
    if report.more:
        yield ()
        yield (Span(f"{report.more:,} more answers; --all shows them"),)
    yield ()
    yield from _certainty(report, width)


def _line(line: QueryLine, report: QueryReport, width: int) -> Iterator[StyledLine]:
    by = ""
    if report.agree is not None and len(line.given_by) == 1:
        by = f" (only the {line.given_by[0]} say so)"
    yield from paragraph(f"{way_text(line.senders, line.destination)}{by}", width, style=Style.STRONG, further="  ")
    text = line.outcome
    if line.hairpin:
        text += "; what an endpoint sends to itself is masqueraded"
    yield from paragraph(text, width, style=_style(line.ends), first=(Span("  "),), further="    ")
    for each in line.evidence:
        yield from paragraph(each, width, style=Style.DIM, first=(Span("  "),), further="    ")


def _style(ends: tuple[ProofEnd, ...]) -> Style:
    kinds = {each.end for each in ends}
    return _STYLES.get(kinds.pop(), Style.PLAIN) if len(kinds) == 1 else Style.DOUBT


def _certainty(report: QueryReport, width: int) -> Iterator[StyledLine]:
    """Yield what the answer is worth: whether it holds for all packets, and what is undecided."""
    what = "The answer is complete: it" if report.lines else "No packet. This"
    if report.certain:
        yield from paragraph(f"{what} holds for all packets of {report.family}.", width)
    else:
        text = f"{what} holds for all packets of {report.family} except those that are undecided:"
        yield from paragraph(text, width, style=Style.DOUBT)
    for rule in report.undecided:
        text = f"undecided: {rule.rule}: {rule.share:.3%} of all packets, such as {rule.described}"
        yield from paragraph(text, width, first=(Span("  "),), further="    ")
    if report.agree is not None:
        same = "Rules and objects give the same answer." if report.agree else "Rules and objects differ."
        yield from paragraph(same, width, style=Style.PLAIN if report.agree else Style.BAD)
    for parameter in report.parameters:
        yield from paragraph(f"given: {parameter}", width, style=Style.DIM, further="  ")
