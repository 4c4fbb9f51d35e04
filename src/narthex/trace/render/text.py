"""A packet path as lines for a terminal: the verdict and its cause, who talks to whom, then the path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from narthex.model.net import join_port
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.model import (
    Fate,
    MissingPart,
    PacketPath,
    PathLeaf,
    PlanReading,
    PlanStep,
    branch_ends,
    fraction_text,
)
from narthex.trace.render.drawing import percent
from narthex.trace.render.outline import (
    FAILED,
    Group,
    Head,
    Items,
    Row,
    Split,
    fate_text,
    outline,
    possible_text,
    start_text,
)
from narthex.trace.render.styled import Span, Style, StyledLine, paragraph, plain

WIDTH = 80
"""Characters of a line where there is no terminal."""
_STAGE = 13
"""Width of the column of stages."""
_MOST_REASONS = 4
_MOST_SUPPOSED = 3
_MOST_FINDINGS = 8
_LONGEST_FRACTION = 100
"""The greatest denominator that a reader grasps; other shares are percents."""
_SIGNS = {
    Style.GOOD: "\N{CHECK MARK} ",
    Style.BAD: "\N{MULTIPLICATION X} ",
    Style.DOUBT: "? ",
    Style.PLAIN: "\N{RIGHTWARDS ARROW} ",
}


def text(path: PacketPath, findings: Sequence[CauseFinding] = (), *, every: bool = False, width: int = WIDTH) -> str:
    """Return the lines without styles, as text that ends with a newline."""
    return plain(lines(path, findings, every=every, width=width))


def lines(
    path: PacketPath, findings: Sequence[CauseFinding] = (), *, every: bool = False, width: int = WIDTH
) -> list[StyledLine]:
    """Return a path and the causes of its failure as lines of at most `width` characters.

    `every` adds all rules with their positions, near misses, the path of the reply, and why something is not known.
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


def _reply_fails(leaf: PathLeaf) -> bool:
    return leaf.end.reply is not None and any(each.fate in FAILED for each in branch_ends(leaf.end.reply))


def _result(path: PacketPath, causes: Sequence[CauseFinding]) -> tuple[str, Style]:
    """Return the verdict. `causes` affect the path."""
    leaves = path.leaves()
    bad = [leaf for leaf in leaves if leaf.end.fate in FAILED or _reply_fails(leaf)]
    failing = sum((leaf.probability for leaf in bad), Fraction(0))
    if 0 < failing < 1:
        return f"fails in {percent(failing)}", Style.BAD
    fates = sorted({leaf.end.fate for leaf in leaves}, key=lambda fate: fate.value)
    if failing:
        words = dict.fromkeys(fate_text(fate) for fate in fates if fate in FAILED)
        return " or ".join(words) or "delivered, but the reply does not arrive", Style.BAD
    unknown = sum((leaf.probability for leaf in leaves if leaf.end.fate is Fate.UNKNOWN), Fraction(0))
    if unknown:
        return "not known" + (f" in {percent(unknown)}" if unknown < 1 else ""), Style.DOUBT
    word = fate_text(Fate.LEAVES if Fate.LEAVES in fates else Fate.DELIVERED)
    if causes:
        certain = any(each.certain for each in causes)
        return f"{word}, and yet it fails" if certain else f"{word}, but it probably fails", Style.BAD
    return word, Style.PLAIN if Fate.LEAVES in fates else Style.GOOD


def _verdict(path: PacketPath, causes: Sequence[CauseFinding], every: bool, width: int) -> Iterator[StyledLine]:
    word, style = _result(path, causes)
    first = (Span(_SIGNS[style] + word, style), Span(": ", style))
    yield from paragraph(str(path.packet), width, style=Style.STRONG, first=first, further="  ")
    yield from _reasons(path, width)
    may = dict.fromkeys(possible_text(each) for end in branch_ends(path.tree) for each in end.may)
    for possible in list(may)[:_MOST_REASONS]:
        yield from paragraph(possible, width, style=Style.DOUBT, first=(Span("  "),))
    yield from _supposed(path, every, width)
    if path.next_command:
        yield from paragraph("run this on the node, and add its output to the input:", width, first=(Span("  next  "),))
        yield (Span(f"        {path.next_command}", Style.STRONG),)


def _reasons(path: PacketPath, width: int) -> Iterator[StyledLine]:
    """Yield how the branches end, failures first, with their shares if there is more than one way."""
    leaves = path.leaves()
    well = [leaf for leaf in leaves if leaf.end.fate not in FAILED | {Fate.UNKNOWN} and not _reply_fails(leaf)]
    reasons: dict[tuple[str, Style], Fraction] = {}
    for leaf in leaves:
        key = (_arrival(well), Style.GOOD) if leaf in well else _failure(leaf)
        reasons[key] = reasons.get(key, Fraction(0)) + leaf.probability
    ordered = sorted(reasons.items(), key=lambda each: each[0][1] is Style.GOOD)
    several = len(reasons) > 1
    for (reason, style), share in ordered[:_MOST_REASONS]:
        said = f"{'delivered ' if several and style is Style.GOOD else ''}{reason}"
        yield from paragraph(said, width, first=(Span("  "), Span(f"{share_text(share)}  " if several else "", style)))
    if len(ordered) > _MOST_REASONS:
        yield (Span(f"  and {len(ordered) - _MOST_REASONS} more ways to end"),)


def _arrival(leaves: Sequence[PathLeaf]) -> str:
    """Return where branches that do not fail end."""
    ends = {(leaf.end.address, leaf.end.port): leaf.end for leaf in leaves}
    if len(ends) > 1:
        return f"to one of {len(ends)} endpoints"
    ((address, port), end), *_ = ends.items()
    to = join_port(address, port) if port else address
    return f"to {to}" + (f", {end.name}" if end.name else "") + (f": {end.reason}" if end.reason else "")


def _failure(leaf: PathLeaf) -> tuple[str, Style]:
    end = leaf.end
    if end.fate is Fate.UNKNOWN:
        return end.reason or fate_text(end.fate), Style.DOUBT
    if end.reply is None or end.fate in FAILED:
        return end.reason or fate_text(end.fate), Style.BAD
    lost = next(each for each in branch_ends(end.reply) if each.fate in FAILED)
    return f"the reply is {fate_text(lost.fate)}" + (f": {lost.reason}" if lost.reason else ""), Style.BAD


def _supposed(path: PacketPath, every: bool, width: int) -> Iterator[StyledLine]:
    supposed = list(dict.fromkeys(text for end in branch_ends(path.tree) for text in end.supposing))
    shown = supposed if every else supposed[:_MOST_SUPPOSED]
    for each in shown:
        yield from paragraph(each, width, style=Style.DOUBT, first=(Span("  supposed: "),), further="    ")
    if len(supposed) > len(shown):
        yield (Span(f"  and {len(supposed) - len(shown)} more suppositions; --all lists them", Style.DIM),)


def share_text(share: Fraction) -> str:
    """Return a share in the form that is shorter: `1/3`, or `0.123 %`. Decimals in rules are taken for what they stand for."""
    near = share.limit_denominator(_LONGEST_FRACTION)
    return fraction_text(near) if abs(near - share) * 1000 < share else f"{float(share) * 100:.3g} %"


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
    items = outline(path, every=every)
    plan = path.plan
    agree = "; plan and rules agree" if plan is not None and plan.agree else ""
    rules = f" ({plan.mode}, {plan.rules}{agree})" if plan is not None else ""
    yield from paragraph(
        rules.strip(), width, first=(Span("Path" + start_text(path), Style.STRONG), Span(" ")), further="  "
    )
    yield from _items(items, "  ", width)


def _items(items: Items, indent: str, width: int) -> Iterator[StyledLine]:
    for each in items:
        yield from _row(each, indent, width) if isinstance(each, Row) else _split(each, indent, width)


def _row(row: Row, indent: str, width: int) -> Iterator[StyledLine]:
    lead = _SIGNS[row.style] if row.sign else f"{row.stage:<{_STAGE}}" if row.stage else ""
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
    title = "not known, and assumed not to affect the packet"
    if every:
        yield (Span(title),)
        for part in path.missing:
            yield from paragraph(_missing_text(part), width, first=(Span("  "),))
        return
    parts = dict.fromkeys(part.part for part in path.missing)
    tables = [name for part in parts if part.startswith("table ") for name in part.removeprefix("table ").split(", ")]
    others = [part for part in parts if not part.startswith("table ")]
    names = [f"table{'s' * (len(tables) > 1)} {', '.join(tables)}"] * bool(tables) + others
    text = f"{title} ({len(tables) + len(others)}): {'; '.join(names)} (--all says why)"
    yield from paragraph(text, width, style=Style.DIM, further="  ")


def _missing_text(part: MissingPart) -> str:
    return part.part + (f" of node {part.node}" if part.node else "") + (f": {part.why}" if part.why else "")
