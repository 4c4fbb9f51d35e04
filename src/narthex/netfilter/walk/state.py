"""The state of a walk: kernel objects, the current hook, and one branch for each random outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

import msgspec

from narthex.model import Disposition, WalkStep
from narthex.netfilter.ipset import IpSet
from narthex.netfilter.ipvs import ServerKey, VirtualServer

_ONE = Fraction(1)
_MAX_BITS = 512
_GRID = 1 << 128

Remembered = tuple[tuple[str, tuple[str | int, ...]], ...]
"""Keys that the packet added to dynamic sets and lists: (list name, key)."""


class KernelObjects(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel objects other than rules that the path of a packet depends on: ipsets, and the state of IPVS."""

    sets: Mapping[str, IpSet] = {}
    servers: Mapping[ServerKey, VirtualServer] = {}
    bound: frozenset[str] = frozenset()
    """Local addresses that the node has only for its Services (interface kube-ipvs0)."""
    marks: frozenset[int] = frozenset()
    """Packet marks for which a foreign virtual server exists."""


class HookPoint(msgspec.Struct, frozen=True):
    """A netfilter hook, and the packet's interfaces at that hook."""

    hook: str
    iif: str = ""
    """Input interface. Empty where the kernel has none."""
    oif: str | None = ""
    """Output interface. Empty where the kernel has none yet, None if it is unknown."""


PriorityRange = tuple[float, float]
"""First and last hook priority, both included."""
ALL_PRIORITIES: PriorityRange = (float("-inf"), float("inf"))
_IPVS_IN_INPUT, _IPVS_IN_OUTPUT = 99, -98
"""NF_IP_PRI_NAT_SRC - 1 and NF_IP_PRI_NAT_DST + 2."""
BEFORE_INPUT: PriorityRange = (float("-inf"), _IPVS_IN_INPUT)
"""The priorities of a hook before IPVS runs."""
AFTER_INPUT: PriorityRange = (_IPVS_IN_INPUT + 1, float("inf"))
BEFORE_OUTPUT: PriorityRange = (float("-inf"), _IPVS_IN_OUTPUT)
AFTER_OUTPUT: PriorityRange = (_IPVS_IN_OUTPUT + 1, float("inf"))


class BranchEnd(msgspec.Struct, frozen=True):
    """The end of a branch."""

    disposition: Disposition
    note: str = ""


ACCEPT = "accept"
RETURN = "return"
Continuation = None | str | BranchEnd
"""How a branch continues: None with the next rule, RETURN in the calling chain, ACCEPT after the base chain, or not."""

ChainResults = list[tuple[Continuation, "Branch"]]
"""All branches that a rule or chain produces."""


class Trail:
    """A linked list of steps, newest first. Branches share the part that they have in common.

    `part` is one step, or the whole trail of a chain that was walked before. `factor` multiplies the probability of the
    first step of such a trail.
    """

    __slots__ = ("before", "factor", "part")

    def __init__(self, part: WalkStep | Trail, before: Trail | None, factor: Fraction = _ONE) -> None:
        self.part = part
        self.before = before
        self.factor = factor


class Branch:
    """One possible path of the packet up to the current rule."""

    __slots__ = (
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
        "step_probability",
        "stranded",
        "supposing",
        "tracked",
        "trail",
        "unsure",
    )

    def __init__(self, daddr: str, dport: int) -> None:
        self.daddr = daddr
        self.dport = dport
        self.mark = 0
        self.connection_mark = 0
        self.dnat = False
        """A rule has set up destination NAT, so no other NAT rule is evaluated for it."""
        self.rewritten = False
        """The destination differs from the original one, as conntrack records it (IPS_DST_NAT)."""
        self.masquerade = False
        self.saddr = ""
        """The new source address, if a rule names it."""
        self.tracked = True
        """The packet belongs to a tracked connection."""
        self.served: ServerKey | None = None
        """The virtual server for which IPVS has forwarded the packet."""
        self.doubt = ""
        """The reason why the packet may or may not take this path. If set, `probability` has no meaning."""
        self.supposing: tuple[str, ...] = ()
        self.stranded = ""
        """A chain of a Service that took the packet and sent it nowhere, as a reason: kube-proxy refuses such a packet."""
        self.unsure = ""
        """The reason why a rule that the input lacks may act on the packet, as long as no known rule did."""
        self.probability = _ONE
        self.step_probability = _ONE
        """Probability of this path since its last step."""
        self.remembers: Remembered = ()
        self.trail: Trail | None = None

    def copy(self) -> Branch:
        """Return a copy with the same state, probability, and trail."""
        made = Branch.__new__(Branch)
        made.daddr, made.dport, made.mark = self.daddr, self.dport, self.mark
        made.connection_mark, made.rewritten = self.connection_mark, self.rewritten
        made.dnat, made.masquerade, made.saddr, made.tracked = self.dnat, self.masquerade, self.saddr, self.tracked
        made.served, made.doubt, made.supposing = self.served, self.doubt, self.supposing
        made.unsure, made.stranded = self.unsure, self.stranded
        made.remembers, made.trail = self.remembers, self.trail
        made.probability, made.step_probability = self.probability, self.step_probability
        return made

    def take(self, share: Fraction) -> Branch:
        """Split off a share of this branch's probability. The rest remains here."""
        part = self.copy()
        # Until the first step both are one number. Fractions are the largest part of a walk's time.
        same = self.step_probability is self.probability
        part.probability, rest = _split(self.probability, share)
        if same:
            part.step_probability, self.step_probability = part.probability, rest
        else:
            part.step_probability, self.step_probability = _split(self.step_probability, share)
        self.probability = rest
        return part

    def suppose(self, text: str) -> None:
        """Record an assumption about something that the text of the rules omits."""
        if text not in self.supposing:
            self.supposing = (*self.supposing, text)

    def note(self, where: str, what: str, why: str = "", rule: tuple[str, str, int | None] | None = None) -> None:
        """Record a step. `rule` is its table, its chain, and its number in the chain, None if the text lacks it."""
        table, chain, number = rule or ("", "", None)
        probability = self.step_probability
        step = WalkStep(where=where, what=what, why=why, probability=probability, table=table, chain=chain, rule=number)
        self.trail = Trail(step, self.trail)
        self.step_probability = _ONE

    @property
    def sent(self) -> bool:
        """True if a rule or IPVS has sent the packet to another destination."""
        return self.dnat or self.served is not None

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that determines how this branch continues."""
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
            self.unsure,
            self.stranded,
            self.remembers,
        )

    def fresh(self) -> Branch:
        """Return a branch in the same state that starts here with probability 1."""
        made = self.copy()
        made.probability = made.step_probability = _ONE
        made.trail = None
        return made

    def last_step(self) -> WalkStep | None:
        """Return the newest step."""
        part = self.trail
        while part is not None and isinstance(part.part, Trail):
            part = part.part
        return part.part if part is not None and isinstance(part.part, WalkStep) else None

    def steps(self) -> tuple[WalkStep, ...]:
        """Return the steps of the path, first step first."""
        return tuple(_steps(self.trail, _ONE))


def _steps(trail: Trail | None, factor: Fraction) -> Iterator[WalkStep]:
    parts: list[Trail] = []
    while trail is not None:
        parts.append(trail)
        trail = trail.before
    for part in reversed(parts):
        if isinstance(part.part, Trail):
            yield from _steps(part.part, part.factor * factor)
        else:
            yield (
                part.part
                if factor == 1
                else msgspec.structs.replace(part.part, probability=part.part.probability * factor)
            )
        factor = _ONE


def graft(branch: Branch, results: ChainResults) -> ChainResults:
    """Apply the results that a chain has for a fresh branch to a branch in the same state."""
    made: ChainResults = []
    left = branch.probability
    whole = left is _ONE
    same = branch.step_probability is left
    last = None if whole else next((out for _, out in reversed(results) if out.doubt == branch.doubt), None)
    for continuation, part in results:
        out = part.copy()
        # Rounding one part of a split down keeps the sum exact, since the last part is the remainder. Parts of the whole are exact.
        if not whole:
            out.probability = left if part is last else _rounded(branch.probability * part.probability)
            if part is not last and part.doubt == branch.doubt:
                left -= out.probability
        if part.trail is not None:
            out.trail = Trail(part.trail, branch.trail, branch.step_probability)
        else:
            out.trail = branch.trail
            if same and part.step_probability is part.probability:
                out.step_probability = out.probability
            else:
                out.step_probability = _rounded(branch.step_probability * part.step_probability)
        made.append((continuation, out))
    return made


def merge_results(results: ChainResults) -> ChainResults:
    """Merge the branches that continue in the same way."""
    if len(results) < 2:
        return results
    grouped: dict[Continuation, list[Branch]] = {}
    for continuation, out in results:
        grouped.setdefault(continuation, []).append(out)
    return [(continuation, out) for continuation, outs in grouped.items() for out in merge(outs)]


def merge(branches: list[Branch]) -> list[Branch]:
    """Merge branches in the same state. The trail is that of the more probable one."""
    # Most branches differ in their endpoint, which is cheaper to compare than their whole states.
    if len(branches) < 2 or len({(each.daddr, each.dport) for each in branches}) == len(branches):
        return branches
    kept: dict[tuple[object, ...], Branch] = {}
    for branch in branches:
        other = kept.setdefault(branch.state, branch)
        if other is branch:
            continue
        if other.trail is branch.trail:
            other.step_probability += branch.step_probability
        elif branch.probability > other.probability:
            other.trail, other.step_probability = branch.trail, branch.step_probability
        other.probability += branch.probability
    return list(kept.values())


_MOST_SPLITS = 4096
_splits: dict[tuple[int, int], tuple[Fraction, Fraction, Fraction, Fraction]] = {}
"""Probability, share, part, and rest, by the identities of the first two: the hash of a fraction takes as long as a split."""


def _split(whole: Fraction, share: Fraction) -> tuple[Fraction, Fraction]:
    """Return a share of a probability, and the rest. Services with equally many endpoints split in the same way."""
    known = _splits.get((id(whole), id(share)))
    if known is None:
        part = whole if share == 1 else _rounded(whole * share)
        if len(_splits) >= _MOST_SPLITS:
            _splits.clear()
        known = _splits[id(whole), id(share)] = whole, share, part, whole - part
    return known[2:]


def _rounded(value: Fraction) -> Fraction:
    # A sequence of a thousand decimal probabilities would grow a fraction of ten thousand digits.
    if value.denominator.bit_length() <= _MAX_BITS:
        return value
    return Fraction(int(value * _GRID), _GRID)
