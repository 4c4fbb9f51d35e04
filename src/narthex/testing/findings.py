"""The result of one witness for one flow, and its comparison with the expectation of the scenario."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from narthex.model import Disposition, Trace, join_port

End = tuple[Disposition, tuple[str, int] | None, bool]
"""Where a packet ends: disposition, endpoint when delivered, whether its source was rewritten to the node's."""
Ends = frozenset[End]
"""All ends that one connection can have."""

OutcomeText = str | Mapping[str, object]
"""An outcome in the words of a scenario file, or `{error: text}`, or `{unsupported: text}`."""

_WORDS = {Disposition.REJECTED: "reject", Disposition.DROPPED: "drop", Disposition.NOT_OURS: "none"}

REJECT: Ends = frozenset({(Disposition.REJECTED, None, False)})
DROP: Ends = frozenset({(Disposition.DROPPED, None, False)})
NONE: Ends = frozenset({(Disposition.NOT_OURS, None, False)})


class WitnessFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one flow or step, in one mode, by one witness."""

    scenario: str
    label: str
    mode: str
    against: str
    """`plan`, `rules` or `kernel`."""
    expect: OutcomeText
    got: OutcomeText
    ok: bool


def delivered(targets: Iterable[tuple[str, int]], masq: bool, masq_for: Iterable[tuple[str, int]] = ()) -> Ends:
    """Return the ends that `{dnat: targets, masq: …, masq_for: …}` of a scenario file means."""
    rewritten = frozenset(masq_for)
    return frozenset((Disposition.DELIVERED, target, masq or target in rewritten) for target in targets)


def possible_ends(trace: Trace) -> Ends:
    """Return all ends of a trace with a probability above 0."""
    return frozenset(end for end, probability in trace.ends().items() if probability > 0)


def targets_of(ends: Ends) -> frozenset[tuple[str, int]]:
    """Return the endpoints among the ends."""
    return frozenset(endpoint for _, endpoint, _ in ends if endpoint is not None)


def say(ends: Ends, note: str = "") -> OutcomeText:
    """Return ends in the notation of scenario files. `also` holds what one expectation cannot express."""
    deliveries = sorted(
        (join_port(*end[1]), end[2]) for end in ends if end[0] is Disposition.DELIVERED and end[1] is not None
    )
    if any(end[0] is Disposition.UNSUPPORTED for end in ends):
        return {"unsupported": note or "the way depends on something that the walker does not know"}
    others = sorted(
        _WORDS[what] + (" with another source" if rewritten else "")
        for what, endpoint, rewritten in ends
        if endpoint is None and what in _WORDS
    )
    if not deliveries:
        return others[0] if len(others) == 1 else {"also": others} if others else {"error": note or "nothing was seen"}
    said: dict[str, object] = {"dnat": list(dict.fromkeys(target for target, _ in deliveries))}
    rewritten = [target for target, masq in deliveries if masq]
    said["masq"] = len(rewritten) == len(deliveries)
    if rewritten and not said["masq"]:
        said["masq_for"] = rewritten
        both = sorted({target for target, masq in deliveries if not masq} & set(rewritten))
        if both:
            said["masq_varies"] = both
    if others:
        said["also"] = others
    return said


def say_trace(trace: Trace) -> OutcomeText:
    """Return the ends of a trace in the notation of scenario files, with the walker's note if it did not understand a rule."""
    note = next((outcome.note for outcome in trace.outcomes if outcome.note), "")
    return say(possible_ends(trace), note)


def print_said(said: OutcomeText) -> str:
    """Return an outcome as one line of text."""
    if isinstance(said, str):
        return said
    parts = []
    for key, value in said.items():
        if key == "dnat" and isinstance(value, list):
            parts.append(" | ".join(value))
        elif key == "masq":
            parts.append("masq" if value else "source kept")
        elif isinstance(value, list):
            parts.append(f"{key} {', '.join(map(str, value))}")
        else:
            parts.append(f"{key}: {value}")
    return ", ".join(parts)
