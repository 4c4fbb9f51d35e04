"""What a walk carries along: one branch per way that chance has opened, and the place where it is."""

from __future__ import annotations

from fractions import Fraction

import msgspec

from narthex.model.packet import Disposition, Step
from narthex.netfilter.ast import Chain, Rule, Table
from narthex.netfilter.ipvs import ServerKey

_ONE = Fraction(1)
_MAX_BITS = 512
_GRID = 1 << 128

Remembered = tuple[tuple[str, tuple[str | int, ...]], ...]


class Place(msgspec.Struct, frozen=True):
    """Where in the kernel a rule is asked, and what is known of the interfaces there."""

    hook: str
    iif: str = ""
    """Empty where the kernel has no input interface."""
    oif: str | None = ""
    """Empty where the kernel has no output interface yet; None where it has one that nobody told us."""


class End(msgspec.Struct, frozen=True):
    """How a branch ends."""

    disposition: Disposition
    note: str = ""


class Met:
    """The rule that a step tells of, None for a base chain's policy, and the packet as it came to it."""

    __slots__ = ("chain", "daddr", "dport", "mark", "place", "rule", "saddr", "table")

    def __init__(self, place: Place, table: Table, chain: Chain, rule: Rule | None, branch: Branch) -> None:
        self.place = place
        self.table = table
        self.chain = chain
        self.rule = rule
        self.daddr = branch.daddr
        self.dport = branch.dport
        self.mark = branch.mark
        self.saddr = branch.saddr


class Trail:
    """Steps so far, newest first. Branches share the part of the way that they have in common."""

    __slots__ = ("before", "met", "step")

    def __init__(self, step: Step, before: Trail | None, met: object = None) -> None:
        self.step = step
        self.before = before
        self.met = met
        """A `Met`; or what somebody wishes to remember who walks hook by hook and notes steps of his own."""


class Branch:
    """One way that the packet may go, up to now."""

    __slots__ = (
        "chance",
        "daddr",
        "dnat",
        "dport",
        "mark",
        "masquerade",
        "probability",
        "remembers",
        "saddr",
        "served",
        "trail",
    )

    def __init__(self, daddr: str, dport: int) -> None:
        self.daddr = daddr
        self.dport = dport
        self.mark = 0
        self.dnat = False
        self.masquerade = False
        self.saddr: str | None = None
        """The source after rewriting; None while it is the packet's own. Empty: an address of the outgoing link, which
        nobody has told."""
        self.served: ServerKey | None = None
        """The virtual server for which IPVS has sent it on."""
        self.probability = _ONE
        self.chance = _ONE
        """Probability of this way since its last step."""
        self.remembers: Remembered = ()
        self.trail: Trail | None = None

    def take(self, share: Fraction) -> Branch:
        """Split off a part of this branch's probability; what is left stays here."""
        part = Branch(self.daddr, self.dport)
        part.mark, part.dnat, part.masquerade = self.mark, self.dnat, self.masquerade
        part.served, part.saddr = self.served, self.saddr
        part.remembers, part.trail = self.remembers, self.trail
        part.probability = self.probability if share == 1 else _manageable(self.probability * share)
        part.chance = self.chance if share == 1 else _manageable(self.chance * share)
        self.probability -= part.probability
        self.chance -= part.chance
        return part

    def note(self, where: str, what: str, why: str = "", met: object = None) -> None:
        """Record a step."""
        self.trail = Trail(Step(where=where, what=what, why=why, chance=self.chance), self.trail, met)
        self.chance = _ONE

    @property
    def state(self) -> tuple[object, ...]:
        """All that decides how this branch goes on."""
        return self.daddr, self.dport, self.saddr, self.mark, self.dnat, self.masquerade, self.served, self.remembers

    def steps(self) -> tuple[Step, ...]:
        """The way, first step first."""
        steps: list[Step] = []
        trail = self.trail
        while trail is not None:
            steps.append(trail.step)
            trail = trail.before
        return tuple(reversed(steps))


def merge(branches: list[Branch]) -> list[Branch]:
    """Put branches together that will go the same way from here; the likelier one tells the story."""
    if len(branches) < 2:
        return branches
    kept: dict[tuple[object, ...], Branch] = {}
    for branch in branches:
        other = kept.setdefault(branch.state, branch)
        if other is branch:
            continue
        if other.trail is branch.trail:
            other.chance += branch.chance
        elif branch.probability > other.probability:
            other.trail, other.chance = branch.trail, branch.chance
        other.probability += branch.probability
    return list(kept.values())


def _manageable(value: Fraction) -> Fraction:
    # A ladder of a thousand decimals would grow a fraction of ten thousand digits. Rounding one part of a split
    # down keeps the sum exact, since the other part is what is left.
    if value.denominator.bit_length() <= _MAX_BITS:
        return value
    return Fraction(int(value * _GRID), _GRID)
