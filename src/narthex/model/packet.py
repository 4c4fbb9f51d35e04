"""A packet on its way, and the story of that way.

`evaluate` (over the plan) and `walk` (over rules) both answer with a `Trace`; the kernel's answer is brought into the
same shape by the scenario runner. Three traces of one packet can therefore be compared as values.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from fractions import Fraction

import msgspec

from narthex.model.net import Protocol, join_port


class Packet(msgspec.Struct, frozen=True, kw_only=True):
    """The first packet of a NEW connection, as the node sees it before any rewriting."""

    source: str
    destination: str
    port: int = 0
    """Destination port; 0 for ICMP."""
    protocol: Protocol = Protocol.TCP
    source_port: int = 0
    """0: not known, the client draws one."""
    iif: str = ""
    """Interface it came in on; empty when it was made on this node, or when the interface is not known."""
    from_host: bool = False
    """Made by a process on this node (goes through OUTPUT, not PREROUTING)."""

    def __str__(self) -> str:
        where = join_port(self.destination, self.port) if self.port else self.destination
        return f"{self.protocol.value} {self.source} -> {where}"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What a walk has to know of the node that no rule says."""

    addresses: tuple[str, ...] = ()
    """The node's own addresses without loopback; loopback is always local."""


class Memory:
    """What earlier packets left behind: elements of dynamic sets, xt_recent lists, or the plan's affinity records.

    One record is (list, key); `list` is a set's name, and it was last touched at a time in seconds.
    """

    def __init__(self) -> None:
        self._touched: dict[tuple[str, tuple[str | int, ...]], float] = {}

    def seen(self, name: str, key: tuple[str | int, ...], now: float, timeout: float) -> bool:
        """Whether the key is in the list and was touched less than `timeout` seconds ago."""
        at = self._touched.get((name, key))
        return at is not None and now - at < timeout

    def touch(self, name: str, key: tuple[str | int, ...], now: float) -> None:
        """Put the key into the list, or start its time again."""
        self._touched[name, key] = now


class Disposition(enum.Enum):
    """How a packet's way through the Service rules ends. A closed list (never a guess)."""

    DELIVERED = "delivered"
    """Sent to an endpoint."""
    REJECTED = "rejected"
    """Refused at once: ICMP port unreachable."""
    DROPPED = "dropped"
    """Thrown away in silence."""
    NOT_OURS = "not-ours"
    """No Service rule touches it; it goes wherever routing takes it."""
    UNSUPPORTED = "unsupported"
    """The way depends on something the walker does not know; `Outcome.note` says what."""


class WalkStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to the packet."""

    where: str
    """Hook, table and chain ("prerouting nat KUBE-SERVICES"), or the stage of the plan."""
    what: str
    """The rule, the map element or the decision, printed."""
    why: str = ""
    """What it means in Kubernetes' words."""
    chance: Fraction = Fraction(1)
    """Probability that the packet comes this way, given it came to the step before."""
    table: str = ""
    """Of a rule: its table, its chain and its number there, from 0."""
    chain: str = ""
    rule: int | None = None


class WalkNearMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A rule on the way that all of its matches but one would have taken."""

    where: str
    """Hook, table and chain, as a step says them."""
    what: str
    """The rule, printed."""
    missing: str
    """The match that failed."""
    why: str = ""
    """The rule's comment."""
    table: str = ""
    chain: str = ""
    rule: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One possible end of the way."""

    disposition: Disposition
    probability: Fraction = Fraction(1)
    endpoint: tuple[str, int] | None = None
    """Address and port after rewriting, when delivered."""
    masquerade: bool = False
    """The source is rewritten, to the node's own unless `source` says to what."""
    source: str = ""
    """The new source, when a rule names it."""
    note: str = ""
    may: tuple[tuple[Disposition, tuple[str, int] | None, bool], ...] = ()
    """Of UNSUPPORTED: where the packet may end, whichever way that which is not known turns out: disposition, endpoint,
    masquerade."""
    supposing: tuple[str, ...] = ()
    """What was taken to be so because the rules' text leaves it out."""
    remembers: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    """What the packet path will remember if it goes this way: arguments for `Memory.touch`."""
    steps: tuple[WalkStep, ...] = ()


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All possible ways of one packet; the probabilities add up to 1."""

    packet: Packet
    outcomes: tuple[Outcome, ...]
    near: tuple[WalkNearMiss, ...] = ()
    """Rules that nearly matched, the telling ones first."""

    def ends(self) -> dict[tuple[Disposition, tuple[str, int] | None, bool], Fraction]:
        """Where the packet can end and how likely; equal ends are added up. This is what witnesses must agree on."""
        ends: dict[tuple[Disposition, tuple[str, int] | None, bool], Fraction] = {}
        for outcome in self.outcomes:
            end = outcome.disposition, outcome.endpoint, outcome.masquerade
            ends[end] = ends.get(end, Fraction(0)) + outcome.probability
        return ends


def agree(one: Trace, other: Trace, tolerance: Fraction = Fraction(1, 10**6)) -> bool:
    """Whether two traces end in the same places with the same probabilities.

    The tolerance is for iptables, whose probabilities are decimals with ten digits.
    """
    a, b = one.ends(), other.ends()
    return a.keys() == b.keys() and all(abs(a[end] - b[end]) <= tolerance for end in a)


def single(packet: Packet, disposition: Disposition, steps: Iterable[WalkStep] = (), note: str = "") -> Trace:
    """A trace with one certain end."""
    return Trace(packet=packet, outcomes=(Outcome(disposition=disposition, steps=tuple(steps), note=note),))
