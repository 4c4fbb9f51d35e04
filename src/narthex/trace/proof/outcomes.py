"""What happens to a class of packets, as values that classes are grouped by, and in words."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from narthex.model import Disposition, join_port
from narthex.netfilter.sets.branch import PacketEnd
from narthex.netfilter.sets.diagram import Distribution, Ratio

_FATES = {
    Disposition.REJECTED: "refused",
    Disposition.DROPPED: "dropped",
    Disposition.NOT_OURS: "left alone",
    Disposition.UNSUPPORTED: "undecided",
}
_FEW = 3
"""Endpoints that are named."""
_NOTHING = "nothing"


class EndShare(NamedTuple):
    """One possible end of the packets of a class."""

    disposition: Disposition
    endpoint: tuple[str, int]
    masquerade: bool
    probability: Ratio
    remembered: bool = False
    """Only packets of senders that an affinity list has end so."""

    @property
    def words(self) -> str:
        """`10.244.1.7:8080`, `refused`, `dropped`, or `left alone`."""
        if self.disposition is not Disposition.DELIVERED:
            return _FATES[self.disposition]
        return join_port(*self.endpoint) if self.endpoint[1] else self.endpoint[0]


class ClassOutcome(NamedTuple):
    """What happens to the packets of a class."""

    shares: tuple[EndShare, ...]
    """For senders that no affinity list has, and the ends that only others meet."""
    affinity: bool = False
    """A sender that an affinity list has gets its endpoint."""

    def with_own(self, address: str, masquerade: bool) -> ClassOutcome:
        """Return the outcome with another answer to whether what goes to one address is masqueraded."""
        changed = (
            each._replace(masquerade=masquerade) if each.endpoint[0] == address else each for each in self.shares
        )
        return self._replace(shares=tuple(sorted(changed, key=_order)))

    def own(self, address: str) -> frozenset[bool]:
        """Return whether what goes to an address is masqueraded; nothing if nothing goes there."""
        return frozenset(each.masquerade for each in self.shares if each.endpoint[0] == address)

    def only_to(self, address: str) -> bool:
        """Return True if all packets go to one address."""
        return all(each.endpoint[0] == address for each in self.shares)

    @property
    def without_endpoints(self) -> ClassOutcome:
        """What can happen, without endpoints and probabilities."""
        ends = {EndShare(each.disposition, ("", 0), each.masquerade, (1, 1)) for each in self.shares}
        return ClassOutcome(tuple(sorted(ends, key=_order)))

    @property
    def words(self) -> str:
        """The outcome in words."""
        return self.text(_FEW)

    def text(self, most: int) -> str:
        """Return the outcome in words, with at most `most` endpoints by name."""
        delivered = [each for each in self.shares if each.disposition is Disposition.DELIVERED]
        texts = _endpoints(delivered, most) if delivered else []
        for each in self.shares:
            if each.disposition is not Disposition.DELIVERED:
                texts.append(each.words + _probability(each))
        text = ", ".join(texts) or _NOTHING
        return f"{text}, session affinity" if self.affinity else text


def _endpoints(delivered: list[EndShare], most: int) -> list[str]:
    masked = {each.masquerade for each in delivered}
    suffix = ", masqueraded" if masked == {True} else ""
    if len(delivered) > most:
        ratios = {each.probability for each in delivered}
        several = len(delivered) > 1
        each_one = f" ({Fraction(*ratios.pop())} each)" if len(ratios) == 1 and several else ""
        texts = [f"{len(delivered)} endpoints{each_one}" if several else f"one endpoint{_probability(delivered[0])}"]
        if len(masked) > 1:
            texts.append(f"{sum(each.masquerade for each in delivered)} of them masqueraded")
    else:
        texts = [
            each.words + _probability(each) + (" masqueraded" if each.masquerade and len(masked) > 1 else "")
            for each in delivered
        ]
        texts[0] = f"endpoint{'s' if len(texts) > 1 else ''} {texts[0]}"
    texts[-1] += suffix
    return texts


def _probability(share: EndShare) -> str:
    if share.remembered:
        return " (senders that its affinity list has)"
    return "" if share.probability == (1, 1) else f" ({Fraction(*share.probability)})"


def _order(share: EndShare) -> tuple[object, ...]:
    return share.disposition.value, share.endpoint, share.masquerade, share.probability, share.remembered


def outcome_of(distribution: Distribution) -> ClassOutcome:
    """Return what a distribution means: the ends of a sender that no list has, and those that only other senders meet."""
    found: dict[tuple[Disposition, tuple[str, int], bool], Fraction] = {}
    others: set[tuple[Disposition, tuple[str, int], bool]] = set()
    affinity = False
    for choices, end, (above, below) in distribution:
        assert isinstance(end, PacketEnd)
        delivered = end.disposition is Disposition.DELIVERED
        key = end.disposition, end.endpoint if delivered else ("", 0), end.masquerade
        affinity = affinity or bool(choices)
        if any(taken for _, taken in choices):
            others.add(key)
        else:
            found[key] = found.get(key, Fraction(0)) + Fraction(above, below)
    shares = [EndShare(*key, probability.as_integer_ratio()) for key, probability in found.items()]
    shares += [EndShare(*key, (1, 1), True) for key in others - found.keys()]
    return ClassOutcome(tuple(sorted(shares, key=_order)), affinity)


def change_text(before: ClassOutcome, after: ClassOutcome) -> str:
    """Return `endpoint 10.244.1.7:8080 (1/2) -> refused`, shortened to what changes where only masquerading or few of many endpoints do."""
    if before.shares == after.shares:
        if before.affinity == after.affinity:
            return f"{before.words} -> the same with other affinity lists"
        return f"{_with_affinity(before)} -> {_with_affinity(after)}"
    plain = [[each._replace(masquerade=False) for each in side.shares] for side in (before, after)]
    masked = [{each.masquerade for each in side.shares} for side in (before, after)]
    if plain[0] == plain[1] and len(masked[0]) == len(masked[1]) == 1:
        return f"{_masked(masked[0])} -> {_masked(masked[1])}"
    ends, later = ({each.words for each in side.shares} for side in (before, after))
    lost, gained = sorted(ends - later), sorted(later - ends)
    text = f"{before.words} -> {after.words}"
    many = min(len(before.shares), len(after.shares)) > _FEW
    if many and len(lost) <= _FEW and len(gained) <= _FEW:
        text += f", without {', '.join(lost)}" if lost else ""
        text += f", with {', '.join(gained)}" if gained else ""
    return text


def _with_affinity(outcome: ClassOutcome) -> str:
    return "with session affinity" if outcome.affinity else "without session affinity"


def _masked(masquerade: Iterable[bool]) -> str:
    return "masqueraded" if set(masquerade) == {True} else "not masqueraded"
