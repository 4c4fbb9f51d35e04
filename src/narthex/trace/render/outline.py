"""A path as an outline: rows in stages, and splits that say once what all their branches share.

Without `every`, the rules are summed up as what they do to the packet; only the rule that decides on a failure is a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import takewhile

import msgspec

from narthex.trace.model import (
    Fate,
    Header,
    PacketPath,
    PathBranch,
    PathEnd,
    PathStep,
    Stage,
    branch_ends,
    branch_steps,
)
from narthex.trace.render.styled import Style
from narthex.trace.render.verdict import FAILED, GOOD, WELL, fate_style, fate_text, place_text, possible_text

MOST_DETAILED = 10
"""If a path splits into more branches than this, those that arrive are only named."""
MOST_NAMED = 8
"""Endpoints of such a split that are named, of each way to end."""
_MOST_NEAR = 3
_DECIDED_BY_RULE = frozenset({Fate.DROPPED, Fate.REJECTED, Fate.UNKNOWN})
_ENDPOINT = "the endpoint"


class Note(msgspec.Struct, frozen=True):
    """A line below a row."""

    text: str
    style: Style = Style.DIM


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the outline: a step, a heading, or an end."""

    text: str
    stage: str = ""
    style: Style = Style.PLAIN
    sign: bool = False
    """The row is an end, which has the sign of its style instead of a stage."""
    notes: tuple[Note, ...] = ()
    below: tuple[Row | Split, ...] = ()
    place: str = ""
    """Where it happens. Rows of different places are not the same, even if they say the same."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A branch of a split: its share, and the endpoint if it has one."""

    share: Fraction
    place: str = ""
    """Address and port."""
    name: str = ""
    style: Style = Style.PLAIN


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Branches that differ only in their endpoint, and the rows that they share."""

    heads: tuple[Head, ...]
    rows: tuple[Row | Split, ...]


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Branches, by what they share."""

    groups: tuple[Group, ...]
    named: int | None = None
    """The number of heads of each group to list; None for all."""


Items = tuple[Row | Split, ...]


def outline(path: PacketPath, *, every: bool = False) -> Items:
    """Return the outline of a path. `every` has every rule with its position, near misses, and the path of the reply."""
    return tuple(_Outline(path, every).items(path.tree, _start(path)))


def heading(path: PacketPath) -> tuple[str, str]:
    """Return the title of the outline, and in parentheses what is known of the rules."""
    node, plan = _start(path), path.plan
    title = f"Path on {node}" if node else "Path" if plan is None else "Path on node (no name)"
    agree = "; plan and rules agree" if plan is not None and plan.agree else ""
    return title, f"({plan.mode}, {plan.rules}{agree})" if plan is not None else ""


def _start(path: PacketPath) -> str:
    node = path.start or (path.plan.node if path.plan is not None else "")
    return f"node {node}" if node else ""


class _Outline:
    def __init__(self, path: PacketPath, every: bool) -> None:
        self._every = every
        self._asked = path.packet.destination, path.packet.port
        replies = [end.reply for end in branch_ends(path.tree) if end.reply is not None]
        self._routed = any(step.stage is Stage.ROUTING for step in branch_steps(path.tree))
        self._many_places = len({_place(step) for tree in (path.tree, *replies) for step in branch_steps(tree)}) > 1
        self._assumed = "; ".join(text for end in branch_ends(path.tree) for text in end.supposing)
        """What the ends assume, which is said once for the whole path."""

    def items(self, branch: PathBranch, place: str) -> Iterator[Row | Split]:
        """Yield the rows of a branch, and what follows them. `place` is where the packet is before it."""
        explained = any(end.rewriting for end in branch_ends(branch)) and not self._every
        for step in branch.steps if self._every else _without_arrival(branch):
            if self._many_places and _place(step) != place:
                place = _place(step)
                yield Row(text=place, style=Style.STRONG)
            fate = branch.end.fate if branch.end is not None and step is branch.steps[-1] else Fate.DELIVERED
            rule = self._rule(step, fate in _DECIDED_BY_RULE, explained)
            for row in rule if step.chain else (self._step(step, fate not in GOOD, explained),):
                yield msgspec.structs.replace(row, place=place)
        if branch.end is not None:
            yield from self._end(branch.end, place)
        else:
            yield from self._split(branch, place)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _step(self, step: PathStep, deciding: bool, explained: bool) -> Row:
        text = step.what + (f" ({step.why})" if step.why else "")
        evidence = step.evidence if self._every or deciding else ()
        notes = [Note(each) for each in evidence if each not in step.what]
        if step.before is not None and step.after is not None:
            notes += [Note(text) for text in _changes(step.before, step.after, source=not explained)]
        return Row(stage=step.stage.value, text=text, notes=(*notes, *self._unknown(step)))

    def _rule(self, step: PathStep, deciding: bool, explained: bool) -> Iterator[Row]:
        """Yield the rule, or what it does to the packet. `explained`: a row of the end says what happens to the source."""
        changes = _changes(step.before, step.after, source=not explained) if step.before and step.after else []
        if not self._every and not deciding:
            for text in changes:
                yield Row(stage=step.stage.value, text=text)
            for note in self._unknown(step):
                yield Row(stage=step.stage.value, text=note.text, style=note.style)
            return
        notes = [Note(step.place)] if step.place else []
        notes += [Note(each) for each in step.evidence if each not in step.what]
        notes += [Note(text) for text in changes]
        notes += self._unknown(step)
        if self._every:
            notes += [Note(f"nearly: {each.rule or each.chain}: {each.missing}") for each in step.near[:_MOST_NEAR]]
        text = f"{step.table} {step.chain}: {step.what}" + (f"  # {step.why}" if step.why else "")
        yield Row(stage=step.stage.value, text=text, notes=tuple(notes))

    def _unknown(self, step: PathStep) -> tuple[Note, ...]:
        hidden = not step.unknown or step.unknown in self._assumed
        return () if hidden else (Note(f"unknown: {step.unknown}", Style.DOUBT),)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _end(self, end: PathEnd, place: str) -> Iterator[Row]:
        if end.route and (self._every or not self._routed):
            yield Row(stage="route", text=end.route)
        for text in end.rewriting if self._every else end.rewriting[-1:]:
            yield Row(stage="address", text=text)
        notes = tuple(Note(possible_text(each), Style.DOUBT) for each in end.may)
        yield Row(text=end_text(end), sign=True, style=fate_style(end.fate), notes=notes)
        if end.reply is None:
            return
        fates = {each.fate for each in branch_ends(end.reply)}
        if not self._every and fates <= GOOD:
            yield Row(stage="reply", text="reaches the sender" if fates == {Fate.DELIVERED} else "leaves this machine")
            return
        style = Style.BAD if fates & FAILED else Style.PLAIN
        yield Row(text="the path of the reply", stage="reply", style=style, below=tuple(self.items(end.reply, place)))

    # ---- splits ------------------------------------------------------------------------------------------------------

    def _split(self, branch: PathBranch, place: str) -> Iterator[Row | Split]:
        parts = [_Part(each, self._asked, tuple(self.items(each, place))) for each in branch.branches]
        before = _shared([tuple(takewhile(_goes_on, part.items)) for part in parts])
        after = _shared([part.items[before:][::-1] for part in parts])
        yield from parts[0].items[:before]
        condensed = len(parts) > MOST_DETAILED and not self._every
        groups: dict[Items, list[_Part]] = {}
        for part in parts:
            rows = part.items[before : len(part.items) - after]
            if condensed and part.style in WELL:
                rows = tuple(each for each in rows if isinstance(each, Row) and each.sign)
            groups.setdefault(rows, []).append(part)
        ordered = sorted(groups.items(), key=lambda group: group[1][0].style in WELL)
        made = []
        for rows, held in ordered:
            # A rule is not changed where no other branch needs it to be.
            own = held[0].own[before : len(held[0].own) - after] if self._every and len(held) == 1 else rows
            made.append(Group(heads=tuple(part.head for part in held), rows=own))
        yield Split(groups=tuple(made), named=MOST_NAMED if condensed else None)
        yield from parts[0].items[len(parts[0].items) - after :]


class _Part:
    """A branch of a split, with its rows: its `own`, and the same in terms of `the endpoint`."""

    def __init__(self, branch: PathBranch, asked: tuple[str, int], items: Items) -> None:
        ends = list(branch_ends(branch))
        place = endpoint_of(branch.steps, ends, asked)
        name = ends[0].name if len({end.name for end in ends}) == 1 else ""
        fates = {end.fate for end in ends}
        replies = {each.fate for end in ends if end.reply is not None for each in branch_ends(end.reply)}
        failed = (fates | replies) & FAILED
        self.style = Style.BAD if failed else fate_style(next(iter(fates))) if len(fates) == 1 else Style.DOUBT
        self.head = Head(share=branch.probability, place=place_text(*place), name=name, style=self.style)
        self.own = items
        self.items = _renamed(items, _renaming(place, name))


def endpoint_of(steps: Iterable[PathStep], ends: Sequence[PathEnd], asked: tuple[str, int]) -> tuple[str, int]:
    """Return address and port of the endpoint of a branch, also if the packet does not reach it; ("", 0) if it has none.

    `asked` is the destination of the packet before any rewriting.
    """
    places = {(end.address, end.port) for end in ends}
    if len(places) != 1:
        return "", 0
    (place,) = places
    headers = (header for step in steps for header in (step.before, step.after) if header is not None)
    sent = [(each.destination, each.port) for each in headers if (each.destination, each.port) != asked]
    return place if place[0] else sent[-1] if sent else ("", 0)


def _renaming(place: tuple[str, int], name: str) -> Callable[[str], str]:
    if not place[0]:
        return lambda text: text
    to = place_text(*place)
    words = [re.escape(each) for each in (f"{to}, {name}" if name else "", to, name, place[0]) if each]
    pattern = re.compile(rf"(?<![\w.:/-])(?:{'|'.join(words)})(?![\w/-]|[.:]\w)")
    return lambda text: pattern.sub(_ENDPOINT, text)


def _renamed(items: Iterable[Row | Split], rename: Callable[[str], str]) -> Items:
    return tuple(
        msgspec.structs.replace(
            each,
            text=rename(each.text),
            notes=tuple(Note(rename(note.text), note.style) for note in each.notes),
            below=_renamed(each.below, rename),
        )
        if isinstance(each, Row)
        else each
        for each in items
    )


def _goes_on(item: Row | Split) -> bool:
    """Return False for an end, which follows the endpoints that share it."""
    return not (isinstance(item, Row) and item.sign)


def _shared(sequences: Sequence[Items]) -> int:
    """Return the number of items that all sequences begin with."""
    count = 0
    for items in zip(*sequences, strict=False):
        if any(each != items[0] for each in items):
            break
        count += 1
    return count


# ---- texts ---------------------------------------------------------------------------------------------------------


def _place(step: PathStep) -> str:
    """Return `node worker-a`, or the network namespace: `pod shop/web-1 on worker-a`, `outside`."""
    if step.namespace:
        kind = "pod " if "/" in step.namespace else ""
        return f"{kind}{step.namespace}" + (f" on {step.node}" if step.node else "")
    return f"node {step.node}" if step.node else ""


def _without_arrival(branch: PathBranch) -> list[PathStep]:
    """Return the steps of a branch without those in which a pod takes what the end says that it takes."""
    steps = branch.steps
    if branch.end is None or branch.end.fate is not Fate.DELIVERED or not steps[-1:] or not steps[-1].namespace:
        return list(steps)
    came = max((number for number, step in enumerate(steps) if _place(step) != _place(steps[-1])), default=len(steps))
    return [
        step
        for number, step in enumerate(steps)
        if number <= came or step.unknown or step.stage not in (Stage.ROUTING, Stage.DELIVERY)
    ]


def _changes(before: Header, after: Header, *, source: bool = True) -> list[str]:
    """Return what the rule changes in the header."""
    was, now = (place_text(each.destination, each.port) for each in (before, after))
    changes = [f"{was} becomes {now} (DNAT)"] if was != now else []
    if source and (before.source, before.masqueraded) != (after.source, after.masqueraded):
        kind = "masqueraded" if after.masqueraded else "SNAT"
        changes.append(f"source {before.source} becomes {after.source or 'an address of this node'} ({kind})")
    return changes


def end_text(end: PathEnd) -> str:
    """Return how a branch ends, in one line."""
    to = place_text(end.address, end.port)
    named = f"{to}, {end.name}" if end.name else to
    if end.fate is Fate.DELIVERED:
        if end.rewriting or not end.source:
            return f"delivered to {named}"
        return f"delivered to {named}, which sees {end.source}" + (" (masqueraded)" if end.masqueraded else "")
    if end.fate is Fate.LEAVES:
        return f"goes to {named}" + (", masqueraded" if end.masqueraded else "") + f": {end.reason}"
    return f"{fate_text(end.fate)}: {end.reason}" if end.reason else fate_text(end.fate)
