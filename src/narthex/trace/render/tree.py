"""An Explanation as a tree of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from narthex.proxy.plan.show import visible
from narthex.trace.explain import End, Explanation, Met

_TOLD_IN_FULL = 10
"""More ways than this are told in one line each."""


class Line(msgspec.Struct):
    """A line and what hangs below it."""

    text: str
    below: list[Line] = []


def text(explanation: Explanation) -> str:
    """The whole explanation, ending with a newline."""
    e = explanation
    below = [Line(f"from: {e.source}")]
    if e.lookup:
        below.append(Line("name", [Line(f"{met.what}: {met.why}") for met in e.lookup]))
    below.append(Line(f"to: {e.destination}"))
    if e.announced:
        below.append(Line("on the link", [Line(line) for line in e.announced]))
    if e.frontend is None:
        below.append(Line("frontend: none; no Service port answers here"))
    else:
        below.append(Line(f"frontend: Service port {e.service} by its {e.frontend}"))
    below.append(Line(f"sender: {e.sender}; {e.sender_reason}"))
    below += [Line(f"plan: {_met(met)}") for met in e.plan if met.where not in ("frontend", "sender")]
    below += [Line(conflict) for conflict in e.conflicts]
    below.append(Line(f"rules ({e.mode}, {e.rules})", _ways(e.ends)))
    if e.agree:
        below.append(Line("plan and rules agree"))
    else:
        below.append(Line("plan and rules DIFFER", [Line(line) for line in e.differences]))
    head = Line(f"{e.packet} on node {e.node or '(no name)'}", below)
    return "\n".join(visible(line) for line in drawn(head)) + "\n"


def _ways(ends: Sequence[End]) -> list[Line]:
    ends = [msgspec.structs.replace(end, steps=_telling(end.steps)) for end in ends]
    if len(ends) == 1:
        return [*map(_step, ends[0].steps), _end(ends[0], chance=False)]
    shared = _shared(ends)
    leaves = [_step(met) for met in ends[0].steps[:shared]]
    for end in ends:
        if len(ends) > _TOLD_IN_FULL:
            leaves.append(Line(_end_line(end, chance=True) + _short(end)))
        else:
            inner = [*map(_step, end.steps[shared:]), *_details(end)]
            leaves.append(Line(_end_line(end, chance=True), inner))
    return leaves


def _telling(steps: tuple[Met, ...]) -> tuple[Met, ...]:
    """The steps without visits to chains in which nothing happened."""
    told: list[Met] = []
    for met in reversed(steps):
        _, jump, chain = met.what.rpartition("jump ")
        if not jump or (told and told[-1].where.endswith(f" {chain}")):
            told.append(met)
    return tuple(reversed(told))


def _shared(ends: Sequence[End]) -> int:
    """How many steps all ways have in common."""
    count = 0
    for same in zip(*(end.steps for end in ends), strict=False):
        if any((met.where, met.what) != (same[0].where, same[0].what) for met in same):
            break
        count += 1
    return count


def _step(met: Met) -> Line:
    return Line(f"{met.where}: {met.what}" + (f"  # {met.why}" if met.why else ""))


def _met(met: Met) -> str:
    what = met.what if met.where == "decision" else f"{met.where}: {met.what}"
    return what + (f" ({met.why})" if met.why else "")


def _end(end: End, chance: bool) -> Line:
    return Line(_end_line(end, chance), _details(end))


def _end_line(end: End, chance: bool) -> str:
    what = end.disposition
    if end.endpoint:
        what = f"delivered to {end.endpoint}" + (f", {end.endpoint_name}" if end.endpoint_name else "")
    elif end.disposition == "not-ours":
        what = "no Service rule sends it anywhere: it goes wherever routing takes it"
    elif end.disposition == "rejected":
        what = "rejected: the sender is told at once (ICMP port unreachable)"
    elif end.disposition == "dropped":
        what = "dropped in silence"
    elif end.disposition == "unsupported":
        what = f"not known: {end.note}"
    return f"{end.probability * 100:.2f} % ({end.fraction}): {what}" if chance else what


def _details(end: End) -> list[Line]:
    lines = [*end.rewriting, *([f"route: {end.route}"] if end.route else [])]
    return [Line(line) for line in lines]


def _short(end: End) -> str:
    return ", masqueraded" if end.masquerade else ""


def drawn(node: Line, indent: str = "") -> Iterable[str]:
    yield node.text
    for number, child in enumerate(node.below):
        last = number == len(node.below) - 1
        lines = list(drawn(child))
        yield indent + ("└─ " if last else "├─ ") + lines[0]
        for line in lines[1:]:
            yield indent + ("   " if last else "│  ") + line
