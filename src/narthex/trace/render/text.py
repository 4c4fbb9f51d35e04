"""A packet path as lines for a terminal: the verdict and its cause, who talks to whom, then the path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.model import MissingPart, PacketPath, PlanReading, PlanStep
from narthex.trace.render.outline import Group, Head, Items, Row, Split, heading, outline
from narthex.trace.render.styled import Span, Style, StyledLine, paragraph, plain
from narthex.trace.render.verdict import SIGNS, judge, missing_names, share_text

WIDTH = 80
"""Characters of a line where there is no terminal."""
_STAGE = 13
"""Width of the column of stages."""
_MOST_REASONS = 4
_MOST_ASSUMED = 3
_MOST_FINDINGS = 8


def text(path: PacketPath, findings: Sequence[CauseFinding] = (), *, every: bool = False, width: int = WIDTH) -> str:
    """Return the lines without styles, as text that ends with a newline."""
    return plain(lines(path, findings, every=every, width=width))


def lines(
    path: PacketPath, findings: Sequence[CauseFinding] = (), *, every: bool = False, width: int = WIDTH
) -> list[StyledLine]:
    """Return a path and the causes of its failure as lines of at most `width` characters.

    `every` adds all rules with their positions, near misses, the path of the reply, and why something is unknown.
    """
    causes = [each for each in findings if each.explains]
    others = [each for each in findings if not each.explains]
    sections = (
        _verdict(path, causes, every, width),
        _findings(causes, "Why not", width),
        _facts(path, width),
        _path(path, every, width),
        _findings(others, "Also", width),
        _missing(path, every, width),
    )
    made: list[StyledLine] = []
    for section in map(list, sections):
        if section:
            made += [(), *section] if made else section
    return made


# ---- the verdict ---------------------------------------------------------------------------------------------------


def _verdict(path: PacketPath, causes: Sequence[CauseFinding], every: bool, width: int) -> Iterator[StyledLine]:
    verdict = judge(path, causes)
    first = (Span(f"{SIGNS[verdict.style]} {verdict.word}: ", verdict.style),)
    yield from paragraph(str(path.packet), width, style=Style.STRONG, first=first, further="  ")
    several = len(verdict.reasons) > 1
    for reason in verdict.reasons[:_MOST_REASONS]:
        share = Span(f"{share_text(reason.share)}  " if several else "", reason.style)
        yield from paragraph(reason.text, width, first=(Span("  "), share))
    if len(verdict.reasons) > _MOST_REASONS:
        yield (Span(f"  and {len(verdict.reasons) - _MOST_REASONS} more ways to end"),)
    for possible in verdict.possible[:_MOST_REASONS]:
        yield from paragraph(possible, width, style=Style.DOUBT, first=(Span("  "),))
    assumed = verdict.assumed if every else verdict.assumed[:_MOST_ASSUMED]
    for each in assumed:
        yield from paragraph(each, width, style=Style.DOUBT, first=(Span("  assumed: "),), further="    ")
    left = len(verdict.assumed) - len(assumed)
    if left:
        yield (Span(f"  and {left} more assumption{'s' * (left > 1)}; --all lists them", Style.DIM),)
    if path.next_command:
        yield from paragraph("run this on the node, and add its output to the input:", width, first=(Span("  next  "),))
        yield (Span(f"        {path.next_command}", Style.STRONG),)


def _findings(findings: Sequence[CauseFinding], word: str, width: int) -> Iterator[StyledLine]:
    for number, finding in enumerate(findings[:_MOST_FINDINGS]):
        label = (word if not number else "Also") + ("" if finding.certain else " (likely)")
        style = Style.BAD if word != "Also" else Style.DOUBT
        yield from paragraph(finding.sentence, width, first=(Span(f"{label}: ", style),), further="  ")
        for line in finding.evidence:
            yield from paragraph(line, width, first=(Span("  seen  ", Style.DIM),))
        if finding.advice:
            yield from paragraph(finding.advice, width, first=(Span("  do    ", Style.DIM),))
        yield (Span(f"  more  {finding.cause.page}", Style.DIM),)
    if len(findings) > _MOST_FINDINGS:
        yield (Span(f"Also: {len(findings) - _MOST_FINDINGS} more; -o json has them all"),)


# ---- who talks to whom ---------------------------------------------------------------------------------------------


def _facts(path: PacketPath, width: int) -> Iterator[StyledLine]:
    facts = [("from", str(path.source))]
    facts += [("name", f"{each.question}: {each.answer}") for each in path.lookup]
    facts.append(("to", str(path.destination)))
    facts += [("on the link", line) for line in path.announced]
    facts += _decided(path.plan, path.service) if path.plan is not None else ()
    facts += [("Service port", path.service)] if path.service and path.plan is None else []
    facts += [("read from", source) for source in path.sources]
    column = max(len(name) for name, _ in facts) + 2
    before = ""
    for name, value in facts:
        first = Span(f"{name if name != before else '':<{column}}", Style.DIM)
        yield from paragraph(value, width, first=(first,))
        before = name
    if path.plan is not None and not path.plan.agree:
        yield (Span("plan and rules DIFFER", Style.BAD),)
        for line in path.plan.differences:
            yield from paragraph(line, width, first=(Span("  "),))


def _decided(plan: PlanReading, service: str) -> Iterator[tuple[str, str]]:
    answers = (
        f"Service port {service} by its {plan.frontend}" if plan.frontend else "none; no Service port answers here"
    )
    yield "frontend", answers
    yield "sender", f"{plan.sender}; {plan.sender_reason}"
    yield from (("plan", _plan_step(step)) for step in plan.decision if step.part not in ("frontend", "sender"))
    yield from (("conflict", each) for each in plan.conflicts)


def _plan_step(step: PlanStep) -> str:
    what = step.what if step.part == "decision" else f"{step.part}: {step.what}"
    return what + (f" ({step.why})" if step.why else "")


# ---- the path ------------------------------------------------------------------------------------------------------


def _path(path: PacketPath, every: bool, width: int) -> Iterator[StyledLine]:
    title, rules = heading(path)
    yield from paragraph(rules, width, first=(Span(title, Style.STRONG), Span(" ")), further="  ")
    yield from _items(outline(path, every=every), "  ", width)


def _items(items: Items, indent: str, width: int) -> Iterator[StyledLine]:
    for each in items:
        yield from _row(each, indent, width) if isinstance(each, Row) else _split(each, indent, width)


def _row(row: Row, indent: str, width: int) -> Iterator[StyledLine]:
    lead = f"{SIGNS[row.style]} " if row.sign else f"{row.stage:<{_STAGE}}" if row.stage else ""
    stage = Span(lead, row.style if row.sign or row.style is not Style.PLAIN else Style.DIM)
    further = indent + " " * len(lead)
    yield from paragraph(row.text, width, style=row.style, first=(Span(indent, Style.DIM), stage), further=further)
    for note in row.notes:
        yield from paragraph(note.text, width, style=note.style, first=(Span(further, Style.DIM),), further=further)
    yield from _items(row.below, f"{indent}  ", width)


def _split(split: Split, indent: str, width: int) -> Iterator[StyledLine]:
    heads = [head for group in split.groups for head in _named(group, split.named)]
    shares = max(len(share_text(head.share)) for head in heads)
    places = max(len(head.place) for head in heads)
    for number, group in enumerate(split.groups):
        last = number == len(split.groups) - 1
        named = _named(group, split.named)
        left = len(group.heads) - len(named)
        for position, head in enumerate(named):
            corner = "└─ " if last and position == len(named) - 1 and not left else "├─ "
            below = indent + ("   " if corner == "└─ " else "│  ")
            lead = f"{share_text(head.share):<{shares}}  "
            first = (Span(indent + corner, Style.DIM), Span(lead, head.style), Span(f"{head.place:<{places}}  "))
            yield from paragraph(head.name, width, first=first, further=below + " " * len(lead))
        if left:
            together = share_text(sum((head.share for head in group.heads[len(named) :]), Fraction(0)))
            corner = "└─ " if last else "├─ "
            yield (Span(indent + corner, Style.DIM), Span(f"… and {left} more, {together} together; --all lists them"))
        yield from _items(group.rows, indent + ("   " if last else "│  ") + "  ", width)


def _named(group: Group, most: int | None) -> tuple[Head, ...]:
    return group.heads if most is None or len(group.heads) <= most else group.heads[:most]


# ---- what is missing -----------------------------------------------------------------------------------------------


def _missing(path: PacketPath, every: bool, width: int) -> Iterator[StyledLine]:
    if not path.missing:
        return
    title = "unknown, and assumed not to affect the packet"
    if every:
        yield (Span(title),)
        for part in path.missing:
            yield from paragraph(_missing_text(part), width, first=(Span("  "),))
        return
    names, count = missing_names(path)
    yield from paragraph(f"{title} ({count}): {names} (--all says why)", width, style=Style.DIM, further="  ")


def _missing_text(part: MissingPart) -> str:
    return part.part + (f" of node {part.node}" if part.node else "") + (f": {part.why}" if part.why else "")
