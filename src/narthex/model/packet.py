"""A packet and the outcomes that a witness predicts for it.

`evaluate` (the plan), `walk` (the rules), and the scenario runner (the kernel) all return a `Trace`, so that three predictions
for one packet can be compared as values.
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
    """0: not known, because the client chooses one."""
    iif: str = ""
    """Input interface; empty if the packet is created on this node or the interface is not known."""
    from_host: bool = False
    """Created by a process on this node: passes OUTPUT, not PREROUTING."""

    def __str__(self) -> str:
        """Return `TCP 10.0.0.1 -> 10.96.0.1:80`."""
        where = join_port(self.destination, self.port) if self.port else self.destination
        return f"{self.protocol.value} {self.source} -> {where}"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What a walk needs to know about the node in addition to its rules."""

    addresses: tuple[str, ...] = ()
    """The node's own addresses without loopback; loopback is always local."""
    others: bool = False
    """The node may have more addresses than these."""


class Memory:
    """State that earlier packets left: elements of dynamic sets, xt_recent lists, or the plan's affinity records.

    A record is (list, key) with the time of its last update in seconds; the list is the name of a set.
    """

    def __init__(self) -> None:
        """Create an empty memory."""
        self._touched: dict[tuple[str, tuple[str | int, ...]], float] = {}

    def seen(self, name: str, key: tuple[str | int, ...], now: float, timeout: float) -> bool:
        """Return True if the key was put into the list less than `timeout` seconds ago."""
        at = self._touched.get((name, key))
        return at is not None and now - at < timeout

    def touch(self, name: str, key: tuple[str | int, ...], now: float) -> None:
        """Put the key into the list, or update its time."""
        self._touched[name, key] = now


class Disposition(enum.Enum):
    """What finally happens to a packet in the Service rules."""

    DELIVERED = "delivered"
    """Sent to an endpoint."""
    REJECTED = "rejected"
    """The sender receives ICMP port unreachable."""
    DROPPED = "dropped"
    """Dropped silently."""
    NOT_OURS = "not-ours"
    """No Service rule matches; routing decides."""
    UNSUPPORTED = "unsupported"
    """The outcome depends on something that the walk doesn't know; `Outcome.note` says what."""


class WalkStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to the packet."""

    where: str
    """Hook, table, and chain ("prerouting nat KUBE-SERVICES"), or the part of the plan."""
    what: str
    """The rule, map element, or decision as text."""
    why: str = ""
    """The meaning in Kubernetes terms."""
    probability: Fraction = Fraction(1)
    """Probability that the packet comes this way, given it came to the step before."""
    table: str = ""
    """Table and chain of a rule, and its number in the chain, from 0."""
    chain: str = ""
    rule: int | None = None


class WalkNearMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of which exactly one match failed."""

    where: str
    """Hook, table, and chain."""
    what: str
    """The rule as text."""
    missing: str
    """The match that failed."""
    why: str = ""
    """The rule's comment."""
    table: str = ""
    chain: str = ""
    rule: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One possible outcome."""

    disposition: Disposition
    probability: Fraction = Fraction(1)
    endpoint: tuple[str, int] | None = None
    """Address and port after rewriting, if delivered."""
    masquerade: bool = False
    """The source is rewritten: to `source`, or to an address of the node."""
    source: str = ""
    """The new source, if a rule names it."""
    note: str = ""
    may: tuple[tuple[Disposition, tuple[str, int] | None, bool], ...] = ()
    """For UNSUPPORTED: all possible ends, as disposition, endpoint, masquerade."""
    supposing: tuple[str, ...] = ()
    """Assumptions made because the text of the rules leaves something out."""
    remembers: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    """State that the packet leaves: arguments for `Memory.touch`."""
    steps: tuple[WalkStep, ...] = ()


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """All possible outcomes of one packet; their probabilities add up to 1."""

    packet: Packet
    outcomes: tuple[Outcome, ...]
    near: tuple[WalkNearMiss, ...] = ()
    """Rules of which one match failed, the most informative first."""

    def ends(self) -> dict[tuple[Disposition, tuple[str, int] | None, bool], Fraction]:
        """Return the total probability of each end; witnesses must agree on this."""
        ends: dict[tuple[Disposition, tuple[str, int] | None, bool], Fraction] = {}
        for outcome in self.outcomes:
            end = outcome.disposition, outcome.endpoint, outcome.masquerade
            ends[end] = ends.get(end, Fraction(0)) + outcome.probability
        return ends


def agree(one: Trace, other: Trace, tolerance: Fraction = Fraction(1, 10**6)) -> bool:
    """Return True if two traces have the same ends with the same probabilities.

    The tolerance allows for iptables, which writes probabilities as decimals with ten digits.
    """
    a, b = one.ends(), other.ends()
    return a.keys() == b.keys() and all(abs(a[end] - b[end]) <= tolerance for end in a)


def single(packet: Packet, disposition: Disposition, steps: Iterable[WalkStep] = (), note: str = "") -> Trace:
    """Return a trace with one certain end."""
    return Trace(packet=packet, outcomes=(Outcome(disposition=disposition, steps=tuple(steps), note=note),))
