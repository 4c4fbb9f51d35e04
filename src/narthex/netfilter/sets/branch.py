"""The state of a set of packets on its way through rules."""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from typing import NamedTuple

from narthex.model import Disposition
from narthex.netfilter.sets.diagram import Choice
from narthex.netfilter.sets.space import DADDR, DPORT, LINK, Box
from narthex.netfilter.sets.values import ValueSet

ONE = Fraction(1)


class PacketEnd(NamedTuple):
    """What finally happens to packets. Ends of rules and of plans are compared as values."""

    disposition: Disposition
    endpoint: tuple[str, int] = ("", 0)
    """Address and port after rewriting, if delivered. Port 0: the packet's own port."""
    masquerade: bool = False
    remembers: tuple[str, ...] = ()
    """The affinity lists that the sender is added to."""
    note: str = ""
    """For UNSUPPORTED: the rule that couldn't be interpreted, and why."""


class Continuation(Enum):
    """How packets continue after a rule or a chain."""

    NEXT = "the next rule"
    RETURN = "the calling chain"
    ACCEPT = "the next base chain"


class SetBranch:
    """A box of packets that rules have treated alike so far."""

    __slots__ = (
        "box",
        "choices",
        "connection_mark",
        "daddr",
        "dnat",
        "dport",
        "mark",
        "masquerade",
        "probability",
        "remembers",
        "rewritten",
        "saddr",
        "served",
        "to",
        "tracked",
    )

    def __init__(self, box: Box) -> None:
        self.box = box
        """The packets as they were sent."""
        self.daddr: ValueSet | None = None
        """The new destination; None: that of the box. Several values: routing knows which of them it is."""
        self.dport: ValueSet | None = None
        self.to: tuple[str, int] = ("", 0)
        """The new destination as text and port."""
        self.saddr: ValueSet | None = None
        """The new source, if a rule names it."""
        self.mark = 0
        self.connection_mark = 0
        self.dnat = False
        self.rewritten = False
        """The destination differs from the original one."""
        self.masquerade = False
        self.tracked = True
        self.served = False
        """IPVS has selected the destination."""
        self.choices: frozenset[Choice] = frozenset()
        self.remembers: tuple[str, ...] = ()
        self.probability = ONE

    def copy(self) -> SetBranch:
        """Return a copy."""
        made = SetBranch.__new__(SetBranch)
        made.box, made.daddr, made.dport, made.to, made.saddr = self.box, self.daddr, self.dport, self.to, self.saddr
        made.mark, made.connection_mark, made.dnat = self.mark, self.connection_mark, self.dnat
        made.rewritten, made.masquerade, made.tracked = self.rewritten, self.masquerade, self.tracked
        made.served = self.served
        made.choices, made.remembers, made.probability = self.choices, self.remembers, self.probability
        return made

    def within(self, field: int, part: ValueSet) -> SetBranch:
        """Return the branch of those packets that have a value of `part` in a field."""
        made = self.copy()
        box = self.box
        made.box = (*box[:field], part, *box[field + 1 :])
        return made

    def part(self, box: Box) -> SetBranch:
        """Return the branch of the packets of a smaller box."""
        if box is self.box:
            return self
        made = self.copy()
        made.box = box
        return made

    def taking(self, share: Fraction) -> SetBranch:
        """Return the same packets with a share of the probability."""
        made = self.copy()
        made.probability = product(self.probability, share)
        return made

    def choosing(self, choice: Choice) -> SetBranch:
        """Return the same packets under one more choice."""
        made = self.copy()
        made.choices = self.choices | {choice}
        return made

    @property
    def header(self) -> Box:
        """The header as it is now, apart from a rewritten source."""
        if self.daddr is None and self.dport is None:
            return self.box
        box = self.box
        dport = self.dport if self.dport is not None else box[DPORT]
        return (self.daddr if self.daddr is not None else box[DADDR], box[1], dport, *box[DPORT + 1 :])

    def with_header(self, header: Box) -> SetBranch:
        """Return the branch of those packets that have this header, which is a part of their header now."""
        box = self.box
        daddr = header[DADDR] if self.daddr is None else box[DADDR]
        dport = header[DPORT] if self.dport is None else box[DPORT]
        made = self.copy()
        made.box = (daddr, header[1], dport, *header[DPORT + 1 :])
        return made

    @property
    def state(self) -> tuple[object, ...]:
        """What rules of a later hook can see of the branch, apart from its header."""
        return (
            self.mark,
            self.connection_mark,
            self.dnat,
            self.rewritten,
            self.masquerade,
            self.saddr,
            self.tracked,
            self.served,
        )

    @property
    def is_vague(self) -> bool:
        """True if the destination is one of several addresses of the node, and only routing knows which."""
        return self.daddr is not None and self.daddr.size > 1

    def fresh(self, box: Box) -> SetBranch:
        """Return a branch in the same state that has a box as its header, and probability 1."""
        made = self.copy()
        made.box, made.daddr, made.dport, made.to = box, None, None, ("", 0)
        made.choices, made.remembers, made.probability = frozenset(), (), ONE
        return made

    def sent(self, target: ValueSet, ports: ValueSet | None, to: tuple[str, int]) -> SetBranch:
        """Return the same packets with another destination; `ports` None: their port stays."""
        made = self.copy()
        made.daddr, made.to = target, to
        if ports is not None:
            made.dport = ports
        return made

    def resume(self, later: SetBranch) -> SetBranch:
        """Return this branch with the state that a branch of equal state got in a hook. Both have one box."""
        made = self.copy()
        made.mark, made.connection_mark, made.dnat = later.mark, later.connection_mark, later.dnat
        made.rewritten, made.masquerade, made.tracked = later.rewritten, later.masquerade, later.tracked
        made.saddr = later.saddr
        made.probability = product(self.probability, later.probability)
        return made


class WalkPoint(NamedTuple):
    """A hook, and the links that rules see there."""

    hook: str
    iif: str | None = None
    """None: the packet's own link of arrival."""
    oif: str | None = ""
    """Empty where the kernel has none yet, None if routing decides it."""

    def link(self, branch: SetBranch) -> ValueSet:
        """Return the links of arrival of a branch."""
        return branch.box[LINK]


_products: dict[tuple[int, int], tuple[Fraction, Fraction, Fraction]] = {}
_MOST_PRODUCTS = 65536


def product(one: Fraction, other: Fraction) -> Fraction:
    """Return a product of probabilities. Services with equally many endpoints need the same ones, so they are remembered."""
    if one is ONE:
        return other
    if other is ONE:
        return one
    known = _products.get((id(one), id(other)))
    if known is None:
        if len(_products) >= _MOST_PRODUCTS:
            _products.clear()
        known = _products[id(one), id(other)] = one, other, one * other
    return known[2]
