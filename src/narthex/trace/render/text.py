"""A packet path as an indented text tree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from narthex.model.net import join_port
from narthex.proxy.plan.show import visible
from narthex.trace.model import (
    Fate,
    MissingPart,
    PacketPath,
    PathBranch,
    PathEnd,
    PathStep,
    PlanReading,
    PlanStep,
    PossibleEnd,
    Stage,
    branch_ends,
    branch_steps,
    probability_text,
)

_MOST_DETAILED = 10
"""If a path splits into more branches than this, each gets a single line."""
_MOST_NEAR = 3
_HOOKS = (Stage.PREROUTING, Stage.INPUT, Stage.FORWARD, Stage.OUTPUT, Stage.POSTROUTING)


class _Line(msgspec.Struct):
    text: str
    below: list[_Line] = []


def text(path: PacketPath, *, every: bool = False) -> str:
    """Return the path as text that ends with a newline.

    `every` adds rules that only lead to chains in which nothing happens, positions in dumps, and near misses.
    """
    tree = _Tree(path, every).branch(path.tree)
    below = [_Line(f"from: {path.source}")]
    if path.lookup:
        below.append(_Line("name", [_Line(f"{each.question}: {each.answer}") for each in path.lookup]))
    below.append(_Line(f"to: {path.destination}"))
    if path.announced:
        below.append(_Line("on the link", [_Line(line) for line in path.announced]))
    if path.plan is None and path.service:
        below.append(_Line(f"Service port: {path.service}"))
    below += _decided(path.plan, path.service) if path.plan is not None else ()
    below += [_Line(f"read from: {source}") for source in path.sources]
    below += [_Line(f"rules ({path.plan.mode}, {path.plan.rules})", tree)] if path.plan is not None else tree
    supposed = dict.fromkeys(text for end in branch_ends(path.tree) for text in end.supposing)
    if supposed:
        below.append(_Line("supposed, because the input lacks it", [_Line(each) for each in supposed]))
    if path.missing:
        below.append(
            _Line("not known, and assumed not to affect the packet", [_Line(_missing(each)) for each in path.missing])
        )
    if path.next_command:
        below.append(_Line(f"next: run `{path.next_command}` on the node, and add its output to the input"))
    if path.plan is not None and path.plan.agree:
        below.append(_Line("plan and rules agree"))
    elif path.plan is not None:
        below.append(_Line("plan and rules DIFFER", [_Line(line) for line in path.plan.differences]))
    node = path.start or (path.plan.node if path.plan is not None else "")
    where = f" on node {node}" if node else " on node (no name)" if path.plan is not None else ""
    return "\n".join(visible(line) for line in _drawn(_Line(f"{path.packet}{where}", below))) + "\n"


def _decided(plan: PlanReading, service: str) -> Iterator[_Line]:
    if plan.frontend is None:
        yield _Line("frontend: none; no Service port answers here")
    else:
        yield _Line(f"frontend: Service port {service} by its {plan.frontend}")
    yield _Line(f"sender: {plan.sender}; {plan.sender_reason}")
    yield from (_Line(f"plan: {_plan_step(step)}") for step in plan.decision if step.part not in ("frontend", "sender"))
    yield from (_Line(conflict) for conflict in plan.conflicts)


def _plan_step(step: PlanStep) -> str:
    what = step.what if step.part == "decision" else f"{step.part}: {step.what}"
    return what + (f" ({step.why})" if step.why else "")


def _missing(part: MissingPart) -> str:
    return part.part + (f" of node {part.node}" if part.node else "") + (f": {part.why}" if part.why else "")


class _Tree:
    """Renders branches; knows whether nodes have to be named."""

    def __init__(self, path: PacketPath, every: bool) -> None:
        self._every = every
        replies = [end.reply for end in branch_ends(path.tree) if end.reply is not None]
        nodes = {step.node for tree in (path.tree, *replies) for step in branch_steps(tree)}
        self._many_nodes = len(nodes) > 1
        self._supposed = "; ".join(text for end in branch_ends(path.tree) for text in end.supposing)
        """What the ends suppose, which is said once below the path."""

    def branch(self, branch: PathBranch) -> list[_Line]:
        """Return the steps and what follows them."""
        lines = [self._step(step) for step in self._shown(branch)]
        if branch.end is not None:
            return [*lines, _Line(end_text(branch.end), self._details(branch.end))]
        for each in branch.branches:
            share = probability_text(each.probability)
            if each.end is None:
                lines.append(_Line(share, self.branch(each)))
            elif len(branch.branches) > _MOST_DETAILED and not self._every:
                lines.append(_Line(f"{share}: {end_text(each.end, alone=True)}"))
            else:
                steps = [self._step(step) for step in self._shown(each)]
                lines.append(_Line(f"{share}: {end_text(each.end)}", [*steps, *self._details(each.end)]))
        return lines

    def _shown(self, branch: PathBranch) -> Sequence[PathStep]:
        """Return the steps worth showing; the last one before a drop, a rejection, or an unknown end is one of them."""
        if self._every:
            return branch.steps
        if branch.steps and branch.end is not None and branch.end.fate in (Fate.UNKNOWN, Fate.DROPPED, Fate.REJECTED):
            return [*_without_detours(branch.steps[:-1], {branch.steps[-1].chain}), branch.steps[-1]]
        return _without_detours(branch.steps, {each.steps[0].chain for each in branch.branches if each.steps})

    def _step(self, step: PathStep) -> _Line:
        said = " ".join(filter(None, (step.stage.value, step.table, step.chain)))
        place = f" [{step.place}]" if step.place and self._every else ""
        line = f"{said}: {step.what}" + (f"  # {step.why}" if step.why else "") + place
        below = [_Line(each) for each in step.evidence if each not in step.what]
        if step.after is not None and step.before is not None:
            below.append(_Line(f"{step.before} becomes {step.after}"))
        if step.unknown and step.unknown not in self._supposed:
            below.append(_Line(f"not known: {step.unknown}"))
        if self._every:
            below += [_Line(f"nearly: {each.rule or each.chain}: {each.missing}") for each in step.near[:_MOST_NEAR]]
        where = f"node {step.node}" if step.node and self._many_nodes else ""
        if step.namespace:
            where = f"pod {step.namespace}" if "/" in step.namespace else step.namespace
        return _Line(f"{where}: {line}" if where else line, below)

    def _details(self, end: PathEnd) -> list[_Line]:
        below = [_Line(possible_text(each)) for each in end.may]
        below += [_Line(line) for line in end.rewriting]
        if end.route:
            below.append(_Line(f"route: {end.route}"))
        if end.reply is None:
            return below
        if not self._every and all(each.fate is Fate.DELIVERED for each in branch_ends(end.reply)):
            return [*below, _Line("the reply reaches the sender")]
        return [*below, _Line("the reply", self.branch(end.reply))]


def _without_detours(steps: Sequence[PathStep], onwards: Collection[str]) -> list[PathStep]:
    """Leave out jumps to chains in which nothing happens; `onwards` are the chains in which the path continues."""
    shown: list[PathStep] = []
    for step in reversed(steps):
        _, jump, chain = step.what.rpartition("jump ")
        if step.stage not in _HOOKS or not jump or chain in ({shown[-1].chain} if shown else onwards):
            shown.append(step)
    return shown[::-1]


def end_text(end: PathEnd, *, alone: bool = False) -> str:
    """Return how a branch ends, in one line. `alone`: no lines about the rewriting follow."""
    to = join_port(end.address, end.port) if end.port else end.address
    named = f"{to}, {end.name}" if end.name else to
    if end.fate is Fate.DELIVERED:
        if end.rewriting or not end.source:
            return f"delivered to {named}" + (", masqueraded" if end.masqueraded and alone else "")
        return f"delivered to {named}, which sees {end.source}" + (" (masqueraded)" if end.masqueraded else "")
    if end.fate is Fate.LEAVES:
        return f"goes to {named}: {end.reason}" + (", masqueraded" if end.masqueraded else "")
    word = {Fate.DROPPED: "dropped", Fate.REJECTED: "rejected", Fate.LOST: "lost", Fate.UNKNOWN: "not known"}[end.fate]
    return f"{word}: {end.reason}" if end.reason else word


def possible_text(end: PossibleEnd) -> str:
    """Return an end that is possible, in one line, after its condition."""
    to = join_port(end.address, end.port) if end.port else end.address
    words = {Fate.DELIVERED: "delivered", Fate.LEAVES: "goes on"}.get(end.fate) or end.fate.value
    where = f" to {to}{f', {end.name}' if end.name else ''}" if to else ""
    why = f" ({end.reason})" if end.reason and end.fate not in (Fate.DELIVERED, Fate.LEAVES) else ""
    masqueraded = ", masqueraded" if end.masqueraded else ""
    return f"{f'if {end.when}' if end.when else 'it may be'}: {words}{where}{masqueraded}{why}"


def _drawn(line: _Line, indent: str = "") -> Iterable[str]:
    yield line.text
    for number, child in enumerate(line.below):
        last = number == len(line.below) - 1
        lines = list(_drawn(child))
        yield indent + ("└─ " if last else "├─ ") + lines[0]
        for each in lines[1:]:
            yield indent + ("   " if last else "│  ") + each
