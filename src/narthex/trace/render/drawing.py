"""The layout of a path as a drawing: boxes in areas, lanes that split, and limits on their number.

All picture formats draw this and decide nothing themselves. What is left out for its size is counted where it was. No text is
escaped here; each format escapes for itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby

import msgspec

from narthex.model import join_port, visible
from narthex.trace.model import (
    Fate,
    Header,
    PacketPath,
    Party,
    PathBranch,
    PathEnd,
    PathStep,
    Stage,
    branch_ends,
    tree_leaves,
)
from narthex.trace.render.verdict import FAILED, WELL, judge, lost_replies, missing_names, percent

MOST_ROWS = 12
"""In one box; the rest is folded."""
MOST_LANES = 8
"""At one split."""
MOST_BOXES = 160
"""In one drawing."""
_MOST_NEAR = 3
_LONGEST = 400
"""Characters of one text."""

_BEFORE_RULE = re.compile(r"^(?:\[\d+:\d+\] )?(?:-A \S+ )?")


class BoxRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line in a box."""

    text: str
    where: str = ""
    """Table and chain, for a rule."""
    verdict: str = ""
    note: str = ""
    faded: bool = False
    """A near miss, or a placeholder for what is left out."""


class StageBox(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive steps of one stage."""

    stage: str
    rows: tuple[BoxRow, ...]
    change: str = ""
    """What changes in the header: "10.96.0.10:80 becomes 10.244.0.5:8080"."""


class NamespaceArea(msgspec.Struct, frozen=True, kw_only=True):
    """A network namespace, with the boxes of consecutive steps in it."""

    title: str
    boxes: tuple[StageBox, ...]


class BranchLane(msgspec.Struct, frozen=True, kw_only=True):
    """A branch up to its end or split, and the lanes that follow."""

    label: str = ""
    """Its probability at the split; empty for the trunk."""
    areas: tuple[NamespaceArea, ...] = ()
    lanes: tuple[BranchLane, ...] = ()
    folded: str = ""
    """A text that stands for further lanes."""
    end: str = ""
    fate: Fate | None = None
    kind: str = ""
    """How it ends, with the reply: `good`, `bad`, or `doubt`."""
    taken: bool = True
    """False: drawn faded, because another lane is explained."""
    reply: tuple[NamespaceArea, ...] = ()
    reply_end: str = ""


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """The complete layout."""

    title: str
    lines: tuple[tuple[str, str], ...]
    """Name and value: from, to, Service, read from."""
    trunk: BranchLane
    result: str
    good: bool


def draw(path: PacketPath) -> Drawing:
    """Return the layout of a path.

    A failing branch is drawn completely and the others next to it faded; if none fails, the most probable branch is complete.
    """
    chosen = _chosen(path.tree)
    trunk = _Layout(path.tree, chosen).lane(path.tree, "", chosen is not None)
    lines = [("from", _party(path.source)), ("to", _party(path.destination))]
    lines += [("Service", path.service)] if path.service else []
    lines += [("read from", source) for source in path.sources]
    lines += [("unknown", missing_names(path)[0])] if path.missing else []
    judged = judge(path)
    return Drawing(
        title=clean(str(path.packet)),
        lines=tuple((name, clean(value)) for name, value in lines),
        trunk=trunk,
        result=judged.word,
        good=judged.style in WELL,
    )


def verdict(drawing: Drawing, fails: bool) -> tuple[str, str]:
    """Return the result, and `good`, `bad` or `doubt`. `fails`: a cause was found that affects the path."""
    if drawing.good and fails:
        return f"{drawing.result}, and yet it fails", "bad"
    return drawing.result, "good" if drawing.good else "doubt" if drawing.result.startswith("unknown") else "bad"


def _chosen(branch: PathBranch) -> frozenset[int] | None:
    """Return the ids of the branches from the top to the end that is drawn completely."""
    found: list[tuple[bool, Fraction, tuple[int, ...]]] = []

    def visit(each: PathBranch, probability: Fraction, path: tuple[int, ...]) -> None:
        """Collect the ends below a branch with their probability and their path."""
        probability *= each.probability
        path = (*path, id(each))
        if each.end is not None:
            found.append((_kind([each.end]) != "good", probability, path))
        for below in each.branches:
            visit(below, probability, path)

    visit(branch, Fraction(1), ())
    best = max(found, key=lambda one: one[:2])
    return frozenset(best[2])


class _Layout:
    def __init__(self, branch: PathBranch, chosen: frozenset[int] | None) -> None:
        self._chosen = chosen or frozenset()
        self._some_fail = _kind(list(branch_ends(branch))) != "good"
        self._boxes_left = MOST_BOXES

    def lane(self, branch: PathBranch, label: str, whole: bool) -> BranchLane:
        """Return a branch with everything below it; unless `whole`, only how it ends."""
        areas = self._areas(branch.steps) if whole else ()
        shown = self._shown(branch.branches) if whole else ()
        lanes = [self.lane(each, percent(each.probability), whole and id(each) in self._chosen) for each in shown]
        rest = [each for each in branch.branches if each not in shown] if whole else []
        folded = ""
        if rest:
            together = percent(sum((each.probability for each in rest), Fraction(0)))
            folded = f"{len(rest)} more branches, {together} together: {_summary(rest)}"
        end = branch.end
        reply: tuple[NamespaceArea, ...] = ()
        if end is not None and end.reply is not None and whole:
            reply = self._areas(_first_branch(end.reply))
        return BranchLane(
            label=label,
            areas=areas,
            lanes=tuple(lanes),
            folded=clean(folded),
            end=clean(end_text(end)) if end else "" if whole else clean(_summary([branch])),
            fate=end.fate if end else None if whole else next(iter(branch_ends(branch))).fate,
            kind=_kind([end] if end else list(branch_ends(branch))),
            taken=whole or not self._some_fail,
            reply=reply,
            reply_end=clean(_reply_text(end)) if end and whole else "",
        )

    def _shown(self, branches: Sequence[PathBranch]) -> list[PathBranch]:
        """Return the branches to draw; the chosen one is always among them."""
        first = list(branches[:MOST_LANES])
        chosen = [each for each in branches if id(each) in self._chosen]
        return first if all(each in first for each in chosen) else [*first[:-1], *chosen]

    def _areas(self, steps: Sequence[PathStep]) -> tuple[NamespaceArea, ...]:
        areas: list[NamespaceArea] = []
        for place, together_here in groupby(steps, key=lambda step: (step.node, step.namespace)):
            boxes = []
            stages = _stages(list(together_here))
            for stage, together in stages:
                if self._boxes_left <= 0:
                    break
                self._boxes_left -= 1
                boxes.append(_box(stage, together))
            left = len(stages) - len(boxes)
            if left:
                boxes.append(StageBox(stage="", rows=(BoxRow(text=f"… {left} more stages are not drawn", faded=True),)))
            areas.append(NamespaceArea(title=clean(_place(*place)), boxes=tuple(boxes)))
        return tuple(areas)


def _place(node: str, namespace: str) -> str:
    if namespace:
        kind = "pod " if "/" in namespace else ""
        return f"{kind}{namespace}" + (f" on {node}" if node else "")
    return f"node {node}" if node else "this node"


def _stages(steps: Sequence[PathStep]) -> list[tuple[Stage, list[PathStep]]]:
    return [(stage, list(together)) for stage, together in groupby(steps, key=lambda step: step.stage)]


def _box(stage: Stage, steps: Sequence[PathStep]) -> StageBox:
    change = clean(_change(steps))
    # Only the ends can be seen of very many, so the middle is not even looked at.
    middle = max(len(steps) - 2 * MOST_ROWS, 0)
    if middle:
        steps = [*steps[:MOST_ROWS], *steps[-MOST_ROWS:]]
    rows = [row for step in steps for row in _rows(step)]
    if len(rows) + middle > MOST_ROWS:
        head, tail = rows[: MOST_ROWS - 6], rows[-5:]
        left = len(rows) + middle - len(head) - len(tail)
        rows = [*head, BoxRow(text=f"… {left} more lines", faded=True), *tail]
    return StageBox(stage=stage.value, rows=tuple(rows), change=change)


def _rows(step: PathStep) -> Iterator[BoxRow]:
    near = step.near[:_MOST_NEAR]
    for miss in near:
        where = f"{miss.table} {miss.chain}" if miss.chain else ""
        note = f"not met: {miss.missing}"
        text = _BEFORE_RULE.sub("", miss.rule) if where else miss.rule
        yield BoxRow(text=clean(text), where=clean(where), note=clean(note), faded=True)
    if len(step.near) > len(near):
        yield BoxRow(text=f"… {len(step.near) - len(near)} more rules nearly matched", faded=True)
    yield _row(step)


def _row(step: PathStep) -> BoxRow:
    # The chain is in a column of its own, and counters say nothing about this packet.
    text = _BEFORE_RULE.sub("", step.rule) if step.chain and step.rule else step.what
    notes = [step.why, step.unknown and f"unknown: {step.unknown}"]
    if step.probability != 1:
        notes.append(f"probability {percent(step.probability)}")
    note = "; ".join(dict.fromkeys(note for note in notes if note and note != text))
    where = f"{step.table} {step.chain}" if step.chain else ""
    return BoxRow(text=clean(text), where=clean(where), verdict=clean(step.verdict), note=clean(note))


def _change(steps: Sequence[PathStep]) -> str:
    befores = [step.before for step in steps if step.before is not None]
    afters = [step.after for step in steps if step.after is not None]
    if not befores or not afters:
        return ""
    one, other = befores[0], afters[-1]
    said = []
    if (one.destination, one.port) != (other.destination, other.port):
        said.append(f"destination {_to(one)} becomes {_to(other)}")
    if other.masqueraded and not one.masqueraded:
        said.append(f"source {one.source} becomes {other.source or 'this node’s address'}")
    if one.mark != other.mark:
        said.append(f"mark {one.mark:#x} becomes {other.mark:#x}")
    return "; ".join(said)


def _to(header: Header) -> str:
    return join_port(header.destination, header.port) if header.port else header.destination


def end_text(end: PathEnd) -> str:
    """Return how a branch ends, in one line."""
    to = (join_port(end.address, end.port) if end.port else end.address) if end.address else ""
    words = {
        Fate.DELIVERED: f"delivered to {to}" if to else "delivered",
        Fate.LEAVES: f"leaves for {to}" if to else "leaves this machine",
        Fate.DROPPED: "dropped",
        Fate.REJECTED: "rejected: the sender receives an error",
        Fate.LOST: "lost",
        Fate.UNKNOWN: "unknown",
    }
    said = words[end.fate] + (f", {end.name}" if end.name else "")
    if end.masqueraded:
        said += f", which sees {end.source or 'the node’s address'} as the source"
    lost = lost_replies(end)
    reply = f"; {percent(lost)} of the replies do not arrive" if 0 < lost < 1 else "; no reply arrives" if lost else ""
    return said + (f": {end.reason}" if end.reason else "") + reply


def _kind(ends: Sequence[PathEnd]) -> str:
    """Return `bad` if an end or its reply fails, `doubt` if one is unknown, or else `good`."""
    if any(end.fate in FAILED or lost_replies(end) for end in ends):
        return "bad"
    return "doubt" if any(end.fate is Fate.UNKNOWN for end in ends) else "good"


def _reply_text(end: PathEnd) -> str:
    """Return how the replies end, each way with its share unless there is only one."""
    if end.reply is None:
        return ""
    shares: dict[str, Fraction] = {}
    for leaf in tree_leaves(end.reply):
        text = leaf.end.fate.value + (f": {leaf.end.reason}" if leaf.end.reason else "")
        shares[text] = shares.get(text, Fraction(0)) + leaf.probability
    return "; ".join(f"{percent(share)} {text}" if len(shares) > 1 else text for text, share in shares.items())


def _first_branch(branch: PathBranch) -> tuple[PathStep, ...]:
    """Return the steps of the branch that fails, or else of the most probable one."""
    steps = list(branch.steps)
    while branch.branches:
        branch = max(branch.branches, key=lambda each: (_kind(list(branch_ends(each))) == "bad", each.probability))
        steps += branch.steps
    return tuple(steps)


def _summary(branches: Sequence[PathBranch]) -> str:
    ends = [end_text(end) for branch in branches for end in branch_ends(branch)]
    texts = list(dict.fromkeys(ends))
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} other ends" if len(texts) > 3 else "")


def _party(party: Party) -> str:
    return str(party) if party.address else party.name


def clean(text: str) -> str:
    """Return the text with a limited length, without control characters or characters that XML forbids."""
    text = visible(" ".join(text[: 4 * _LONGEST].split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
