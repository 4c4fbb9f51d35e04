"""What a walk carries along: one branch per way that chance has opened, and the place where it is."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import msgspec

from narthex.model.packet import Disposition, WalkStep
from narthex.netfilter.ipvs.servers import ServerKey

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


ACCEPT = "accept"
RETURN = "return"
Way = None | str | End
"""None: go on with the next rule; "return": leave the chain; "accept": leave the base chain; or the end."""


class Trail:
    """Steps so far, newest first: one step, or the whole trail of a chain that was walked before. Branches share the
    part of the way that they have in common."""

    __slots__ = ("before", "chance", "part")

    def __init__(self, part: WalkStep | Trail, before: Trail | None, chance: Fraction = _ONE) -> None:
        self.part = part
        self.before = before
        self.chance = chance
        """What the first step of a chain's trail has to be multiplied with."""


class Branch:
    """One way that the packet may go, up to now."""

    __slots__ = (
        "chance",
        "connection_mark",
        "daddr",
        "dnat",
        "doubt",
        "dport",
        "mark",
        "masquerade",
        "probability",
        "remembers",
        "rewritten",
        "saddr",
        "served",
        "supposing",
        "tracked",
        "trail",
    )

    def __init__(self, daddr: str, dport: int) -> None:
        self.daddr = daddr
        self.dport = dport
        self.mark = 0
        self.connection_mark = 0
        self.dnat = False
        """A rule has settled where it goes; no other rule for that is asked."""
        self.rewritten = False
        """The destination is another than before, which the kernel remembers of the connection (IPS_DST_NAT)."""
        self.masquerade = False
        self.saddr = ""
        """The new source, when a rule names it."""
        self.tracked = True
        """The kernel keeps a connection for it."""
        self.served: ServerKey | None = None
        """The virtual server for which IPVS has sent it on."""
        self.doubt = ""
        """Not empty: the packet may come this way, or may not, for this reason; its probability means nothing."""
        self.supposing: tuple[str, ...] = ()
        self.probability = _ONE
        self.chance = _ONE
        """Probability of this way since its last step."""
        self.remembers: Remembered = ()
        self.trail: Trail | None = None

    def copy(self) -> Branch:
        """The same once more, the probability too."""
        made = Branch.__new__(Branch)
        made.daddr, made.dport, made.mark, made.connection_mark = (
            self.daddr,
            self.dport,
            self.mark,
            self.connection_mark,
        )
        made.dnat, made.masquerade, made.saddr, made.tracked = self.dnat, self.masquerade, self.saddr, self.tracked
        made.rewritten = self.rewritten
        made.served, made.doubt, made.supposing, made.remembers = (
            self.served,
            self.doubt,
            self.supposing,
            self.remembers,
        )
        made.probability, made.chance, made.trail = self.probability, self.chance, self.trail
        return made

    def take(self, share: Fraction) -> Branch:
        """Split off a part of this branch's probability; what is left stays here."""
        part = self.copy()
        if share != 1:
            part.probability = _manageable(self.probability * share)
            part.chance = _manageable(self.chance * share)
        self.probability -= part.probability
        self.chance -= part.chance
        return part

    def suppose(self, text: str) -> None:
        """Note what the way depends on that the rules' text leaves out."""
        if text not in self.supposing:
            self.supposing = (*self.supposing, text)

    def note(self, where: str, what: str, why: str = "", rule: tuple[str, str, int] | None = None) -> None:
        """Record a step; `rule` is its table, chain and number there."""
        table, chain, number = rule or ("", "", None)
        step = WalkStep(where=where, what=what, why=why, chance=self.chance, table=table, chain=chain, rule=number)
        self.trail = Trail(step, self.trail)
        self.chance = _ONE

    @property
    def state(self) -> tuple[object, ...]:
        """All that decides how this branch goes on."""
        return (
            self.daddr,
            self.dport,
            self.mark,
            self.connection_mark,
            self.dnat,
            self.rewritten,
            self.masquerade,
            self.saddr,
            self.tracked,
            self.served,
            self.doubt,
            self.supposing,
            self.remembers,
        )

    def fresh(self) -> Branch:
        """A branch in the same state, as if the way began here."""
        made = self.copy()
        made.probability = made.chance = _ONE
        made.trail = None
        return made

    def steps(self) -> tuple[WalkStep, ...]:
        """The way, first step first."""
        return tuple(_steps(self.trail, _ONE))


def _steps(trail: Trail | None, chance: Fraction) -> Iterator[WalkStep]:
    parts: list[Trail] = []
    while trail is not None:
        parts.append(trail)
        trail = trail.before
    for part in reversed(parts):
        if isinstance(part.part, Trail):
            yield from _steps(part.part, part.chance * chance)
        else:
            yield part.part if chance == 1 else msgspec.structs.replace(part.part, chance=part.part.chance * chance)
        chance = _ONE


def grafted(branch: Branch, ways: list[tuple[Way, Branch]]) -> list[tuple[Way, Branch]]:
    """What a chain does to a branch, from what it does to a fresh one in the same state."""
    made: list[tuple[Way, Branch]] = []
    left = branch.probability
    whole = [out for _, out in ways if out.doubt == branch.doubt]
    last = whole[-1] if whole else None
    for way, part in ways:
        out = part.copy()
        if part.trail is None:
            out.trail, out.chance = branch.trail, _manageable(branch.chance * part.chance)
        else:
            out.trail = Trail(part.trail, branch.trail, branch.chance)
        # Rounding one part of a split down keeps the sum exact, since the last part is what is left.
        out.probability = left if part is last else _manageable(branch.probability * part.probability)
        if part.doubt == branch.doubt:
            left -= out.probability
        made.append((way, out))
    return made


def merged_ways(ways: list[tuple[Way, Branch]]) -> list[tuple[Way, Branch]]:
    """Ways that lead to the same put together."""
    if len(ways) < 2:
        return ways
    by_way: dict[Way, list[Branch]] = {}
    for way, out in ways:
        by_way.setdefault(way, []).append(out)
    return [(way, out) for way, outs in by_way.items() for out in merge(outs)]


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
    # A ladder of a thousand decimals would grow a fraction of ten thousand digits.
    if value.denominator.bit_length() <= _MAX_BITS:
        return value
    return Fraction(int(value * _GRID), _GRID)
