"""A journey as a tree of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from narthex.model.net import join_port
from narthex.proxy.plan.show import visible
from narthex.trace.explain import fraction_text
from narthex.trace.model import (
    Fate,
    PacketPath,
    PathBranch,
    PathEnd,
    PathStep,
    Stage,
)
from narthex.trace.render.tree import Line, drawn

_TOLD_IN_FULL = 10
"""More ways than this are told in one line each."""
_NEAR = 3
_RULES = (Stage.PREROUTING, Stage.INPUT, Stage.FORWARD, Stage.OUTPUT, Stage.POSTROUTING)


def text(journey: PacketPath, *, every: bool = False) -> str:
    """The whole journey, ending with a newline. `every`: also the rules that only led to others, and near misses."""
    below = [Line(f"from: {_party(journey.source.address, journey.source.name)}")]
    below.append(Line(f"to: {_party(journey.destination.address, journey.destination.name)}"))
    if journey.service:
        below.append(Line(f"Service port: {journey.service}"))
    below += [Line(f"read from: {source}") for source in journey.sources]
    below += _way(journey.way, every)
    if journey.missing:
        told = [Line(_missing(each.node, each.part, each.why)) for each in journey.missing]
        below.append(Line("not known, and taken to stand in nobody's way", told))
    head = Line(str(journey.packet) + (f" from node {journey.start}" if journey.start else ""), below)
    return "\n".join(visible(line) for line in drawn(head)) + "\n"


def _party(address: str, name: str) -> str:
    return f"{address}, {name}" if name else address


def _missing(node: str, part: str, why: str) -> str:
    return f"{part}" + (f" of node {node}" if node else "") + (f": {why}" if why else "")


def _way(way: PathBranch, every: bool) -> list[Line]:
    lines = [line for step in _chosen(way, every) for line in _step(step, every)]
    if way.end is not None:
        return [*lines, _end(way.end, every)]
    for each in way.ways:
        share = f"{float(each.chance) * 100:.2f} % ({fraction_text(each.chance)})"
        if len(way.ways) > _TOLD_IN_FULL and each.end is not None and not every:
            lines.append(Line(f"{share}: {end_text(each.end)}"))
        else:
            lines.append(Line(share + (f": {end_text(each.end)}" if each.end is not None else ""), _inner(each, every)))
    return lines


def _inner(way: PathBranch, every: bool) -> list[Line]:
    lines = _way(way, every)
    if way.end is None:
        return lines
    # The end stands in the heading already; what hangs below it does not.
    return [*lines[:-1], *lines[-1].below]


def _chosen(way: PathBranch, every: bool) -> Sequence[PathStep]:
    """The steps that are worth telling; the last one of a way that a rule ends is always."""
    if every:
        return way.steps
    onwards = {each.steps[0].chain for each in way.ways if each.steps}
    if way.steps and way.end is not None and way.end.fate in (Fate.UNKNOWN, Fate.DROPPED, Fate.REJECTED):
        return [*_telling(way.steps[:-1], {way.steps[-1].chain}), way.steps[-1]]
    return _telling(way.steps, onwards)


def _telling(steps: Sequence[PathStep], onwards: Collection[str]) -> list[PathStep]:
    """The steps without visits to chains in which nothing happened; `onwards` are chains where it goes on."""
    told: list[PathStep] = []
    for step in reversed(steps):
        _, jump, chain = step.what.rpartition("jump ")
        if step.stage not in _RULES or not jump or chain in ({told[-1].chain} if told else onwards):
            told.append(step)
    return told[::-1]


def _step(step: PathStep, every: bool) -> list[Line]:
    where = " ".join(filter(None, (step.stage.value, step.table, step.chain)))
    place = f" [{step.place}]" if step.place and every else ""
    line = f"{where}: {step.what}" + (f"  # {step.why}" if step.why else "") + place
    below = [Line(each) for each in step.evidence if each not in step.what]
    if step.after is not None and step.before is not None:
        below.append(Line(f"{step.before} becomes {step.after}"))
    if step.unknown:
        below.append(Line(f"not known: {step.unknown}"))
    if every:
        below += [Line(f"nearly: {each.rule or each.chain}: {each.missing}") for each in step.near[:_NEAR]]
    return [Line(f"node {step.node}: {line}" if step.node else line, below)]


def end_text(end: PathEnd) -> str:
    """How a way ends, in a line."""
    to = join_port(end.address, end.port) if end.port else end.address
    named = f"{to}, {end.name}" if end.name else to
    if end.fate is Fate.DELIVERED:
        return f"delivered to {named}" + (_seen(end) if end.source else "")
    if end.fate is Fate.LEAVES:
        return f"goes to {named}: {end.reason}" + (", masqueraded" if end.masqueraded else "")
    word = {Fate.DROPPED: "dropped", Fate.REJECTED: "rejected", Fate.LOST: "lost", Fate.UNKNOWN: "not known"}[end.fate]
    return f"{word}: {end.reason}" if end.reason else word


def _seen(end: PathEnd) -> str:
    return f", which sees {end.source}" + (" (masqueraded)" if end.masqueraded else "")


def _end(end: PathEnd, every: bool) -> Line:
    below: list[Line] = []
    if end.reply is not None:
        ends = _ends(end.reply)
        good = all(each.fate is Fate.DELIVERED for each in ends)
        if good and not every:
            below.append(Line("the answer comes back to the sender"))
        else:
            below.append(Line("the answer", _way(end.reply, every)))
    return Line(end_text(end), below)


def _ends(way: PathBranch) -> list[PathEnd]:
    return [way.end] if way.end is not None else [end for each in way.ways for end in _ends(each)]
