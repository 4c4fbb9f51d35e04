"""The verdict on a path: how its packet ends, in a few words, with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from narthex.model import join_port
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.model import (
    Fate,
    PacketPath,
    PathEnd,
    PathLeaf,
    PossibleEnd,
    branch_ends,
    fraction_text,
    tree_leaves,
)
from narthex.trace.render.styled import Style

GOOD = frozenset({Fate.DELIVERED, Fate.LEAVES})
FAILED = frozenset({Fate.DROPPED, Fate.REJECTED, Fate.LOST})
WELL = frozenset({Style.GOOD, Style.PLAIN})
"""The styles of what does not fail."""
SIGNS = {
    Style.GOOD: "\N{CHECK MARK}",
    Style.BAD: "\N{MULTIPLICATION X}",
    Style.DOUBT: "?",
    Style.PLAIN: "\N{RIGHTWARDS ARROW}",
}
"""Signs before verdicts and ends."""
_LONGEST_FRACTION = 100
"""The greatest denominator that a reader grasps; other shares are percents."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One way to end."""

    share: Fraction
    text: str
    style: Style


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How the packet ends."""

    word: str
    """`delivered`, `dropped`, `fails in 50 % (1/2)`, …"""
    style: Style
    reasons: tuple[Reason, ...]
    """All ways to end, failures first."""
    possible: tuple[str, ...]
    """Ends that are possible where the input does not decide."""
    assumed: tuple[str, ...]
    """What the input lacks and the path therefore assumes."""


def judge(path: PacketPath, findings: Sequence[CauseFinding] = ()) -> Verdict:
    """Return the verdict on a path; `findings` may contradict a path that looks healthy."""
    word, style = _word(path.leaves(), [each for each in findings if each.explains])
    ends = list(branch_ends(path.tree))
    return Verdict(
        word=word,
        style=style,
        reasons=_reasons(path.leaves()),
        possible=tuple(dict.fromkeys(possible_text(each) for end in ends for each in end.may)),
        assumed=tuple(dict.fromkeys(text for end in ends for text in end.supposing)),
    )


def leaf_style(leaf: PathLeaf) -> Style:
    """Return the style of a branch by how it ends, and whether the reply arrives."""
    return Style.BAD if lost_replies(leaf.end) else fate_style(leaf.end.fate)


def lost_replies(end: PathEnd) -> Fraction:
    """Return the share of the replies to a packet that arrives which do not."""
    if end.reply is None:
        return Fraction(0)
    return sum((each.probability for each in tree_leaves(end.reply) if each.end.fate in FAILED), Fraction(0))


def fate_style(fate: Fate) -> Style:
    """Return the style of an end."""
    return {Fate.DELIVERED: Style.GOOD, Fate.LEAVES: Style.PLAIN, Fate.UNKNOWN: Style.DOUBT}.get(fate, Style.BAD)


def _word(leaves: Sequence[PathLeaf], causes: Sequence[CauseFinding]) -> tuple[str, Style]:
    failing = sum((leaf.probability * _failing(leaf) for leaf in leaves), Fraction(0))
    if 0 < failing < 1:
        return f"fails in {percent(failing)}", Style.BAD
    fates = sorted({leaf.end.fate for leaf in leaves}, key=lambda fate: fate.value)
    if failing:
        words = [fate_text(fate) for fate in fates if fate in FAILED]
        return " or ".join(words) or "delivered, but the reply does not arrive", Style.BAD
    unknown = sum((leaf.probability for leaf in leaves if leaf.end.fate is Fate.UNKNOWN), Fraction(0))
    if unknown:
        return "unknown" + (f" in {percent(unknown)}" if unknown < 1 else ""), Style.DOUBT
    fate = Fate.LEAVES if Fate.LEAVES in fates else Fate.DELIVERED
    if not causes:
        return fate_text(fate), fate_style(fate)
    certain = any(each.certain for each in causes)
    return f"{fate_text(fate)}, and yet it fails" if certain else f"{fate_text(fate)}, but it probably fails", Style.BAD


def _reasons(leaves: Sequence[PathLeaf]) -> tuple[Reason, ...]:
    well = [leaf for leaf in leaves if fate_style(leaf.end.fate) in WELL and _failing(leaf) < 1]
    shares: dict[tuple[str, Style], Fraction] = {}

    def add(key: tuple[str, Style], share: Fraction) -> None:
        """Add a share of the packets to a reason."""
        shares[key] = shares.get(key, Fraction(0)) + share

    for leaf in leaves:
        failing = _failing(leaf)
        if failing:
            add((_failure(leaf), Style.BAD), leaf.probability * failing)
        if failing < 1:
            style = fate_style(leaf.end.fate)
            key = (_arrival(well), Style.GOOD) if style in WELL else (_failure(leaf), style)
            add(key, leaf.probability * (1 - failing))
    said = f"{'delivered' if all(leaf.end.fate is Fate.DELIVERED for leaf in well) else 'goes on'} "
    reasons = [
        Reason(share=share, text=f"{said if style is Style.GOOD and len(shares) > 1 else ''}{text}", style=style)
        for (text, style), share in shares.items()
    ]
    return tuple(sorted(reasons, key=lambda each: each.style is Style.GOOD))


def _failing(leaf: PathLeaf) -> Fraction:
    """Return the share of the packets of a branch that fail, or whose replies do."""
    return Fraction(1) if leaf.end.fate in FAILED else lost_replies(leaf.end)


def _arrival(leaves: Sequence[PathLeaf]) -> str:
    """Return where branches that do not fail end."""
    ends = {(leaf.end.address, leaf.end.port): leaf.end for leaf in leaves}
    if len(ends) > 1:
        return f"to one of {len(ends)} endpoints"
    ((address, port), end), *_ = ends.items()
    return (
        f"to {place_text(address, port)}"
        + (f", {end.name}" if end.name else "")
        + (f": {end.reason}" if end.reason else "")
    )


def _failure(leaf: PathLeaf) -> str:
    end = leaf.end
    if end.reply is None or not lost_replies(end):
        return end.reason or fate_text(end.fate)
    lost = next(each for each in branch_ends(end.reply) if each.fate in FAILED)
    return f"the reply is {fate_text(lost.fate)}" + (f": {lost.reason}" if lost.reason else "")


def missing_names(path: PacketPath) -> tuple[str, int]:
    """Return the names of what is missing, as `tables raw, nat; routes`, and their number."""
    parts = dict.fromkeys(part.part for part in path.missing)
    tables = [name for part in parts if part.startswith("table ") for name in part.removeprefix("table ").split(", ")]
    others = [part for part in parts if not part.startswith("table ")]
    names = [f"table{'s' * (len(tables) > 1)} {', '.join(tables)}"] * bool(tables) + others
    return "; ".join(names), len(tables) + len(others)


# ---- texts ---------------------------------------------------------------------------------------------------------


def fate_text(fate: Fate) -> str:
    """Return the verdict for a fate."""
    return {Fate.UNKNOWN: "unknown", Fate.LEAVES: "leaves this machine"}.get(fate) or fate.value


def possible_text(end: PossibleEnd) -> str:
    """Return an end that is possible, in one line, after its condition."""
    to = place_text(end.address, end.port)
    words = {Fate.DELIVERED: "delivered", Fate.LEAVES: "goes on"}.get(end.fate) or end.fate.value
    where = f" to {to}{f', {end.name}' if end.name else ''}" if to else ""
    why = f" ({end.reason})" if end.reason and end.fate not in GOOD else ""
    masqueraded = ", masqueraded" if end.masqueraded else ""
    return f"{f'if {end.when}' if end.when else 'it may be'}: {words}{where}{masqueraded}{why}"


def place_text(address: str, port: int) -> str:
    """Return `10.244.1.5:8080`, or the address alone without a port."""
    return join_port(address, port) if port else address


def percent(probability: Fraction) -> str:
    """Return a probability as `33.3 % (1/3)`."""
    return f"{float(probability) * 100:.3g} % ({fraction_text(probability)})"


def share_text(share: Fraction) -> str:
    """Return a share in the form that is shorter: `1/3`, or `0.123 %`. Decimals in rules are taken for what they stand for."""
    near = share.limit_denominator(_LONGEST_FRACTION)
    return fraction_text(near) if abs(near - share) * 1000 < share else f"{float(share) * 100:.3g} %"
