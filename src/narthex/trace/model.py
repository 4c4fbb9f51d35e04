"""A packet's whole way as a value: over nodes, namespaces, hooks, rules and routes, with every branch that chance opens.

A `PacketPath` is a tree. A `PathBranch` is what happens one thing after the other; it ends with an `PathEnd`, or it parts into several
ways, whose chances add up to 1. Probabilities are exact `Fraction`s. Whatever cannot be known ends its way as UNKNOWN, with
the reason; nothing here is guessed. docs/reference/json.md documents the JSON form.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import msgspec

from narthex.model.net import join_port

VERSION = 1
"""Of the JSON form; a field that is added does not change it."""

_ONE = Fraction(1)


class Stage(enum.Enum):
    """Where on a way a step happens."""

    START = "start"
    """The packet is made."""
    POD_LINK = "pod link"
    """Out of a pod's namespace into the node's, or back."""
    BRIDGE = "bridge"
    NEIGHBOUR = "neighbour"
    """Who has the next hop's address on the link: ARP, neighbour discovery, a VXLAN's forwarding table."""
    PREROUTING = "prerouting"
    ROUTING = "routing"
    RP_FILTER = "rp_filter"
    INPUT = "input"
    FORWARD = "forward"
    OUTPUT = "output"
    POSTROUTING = "postrouting"
    IPVS = "ipvs"
    CONNTRACK = "conntrack"
    OVERLAY = "overlay"
    """Put into another packet (VXLAN) or taken out of it."""
    MTU = "mtu"
    NEXT_NODE = "next node"
    DELIVERY = "delivery"
    REPLY = "reply"
    """Something that the answer needs to find its way back."""


class Fate(enum.Enum):
    """How a way ends."""

    DELIVERED = "delivered"
    """A process may get it: there is an address of this node, of a pod, or of a known neighbour."""
    DROPPED = "dropped"
    """Thrown away in silence by a rule or a policy."""
    REJECTED = "rejected"
    """Refused by a rule; the sender is told."""
    LOST = "lost"
    """No rule's doing: no route, no neighbour, too large, a failed reverse path check."""
    LEAVES = "leaves"
    """It goes to a machine of which nothing is known here; `reason` says what would tell more."""
    UNKNOWN = "unknown"
    """What becomes of it depends on something that is not known; `reason` says what."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The packet at one moment."""

    source: str
    destination: str
    protocol: str
    """`tcp`, `udp`, `sctp` or `icmp`."""
    source_port: int | None = None
    """None: not known; the client draws one."""
    port: int = 0
    """The destination's; 0 for ICMP."""
    mark: int = 0
    iif: str = ""
    oif: str = ""
    masqueraded: bool = False
    """`source` is the outgoing link's address, which may not be known; then `source` is empty."""

    def __str__(self) -> str:
        to = join_port(self.destination, self.port) if self.port else self.destination
        return f"{self.protocol} {self.source or '(an address of this node)'} -> {to}"


class NearMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that all but one of its matches would have taken."""

    table: str
    chain: str
    rule: str
    place: str = ""
    """The dump's name and line ("nat.txt:214"), empty when not known."""
    missing: str = ""
    """The match that failed, and what the packet has instead."""


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """An address and what it is known as."""

    address: str
    name: str = ""
    """`pod shop/web-1 on worker-a`, `Service shop/web`, `node worker-a`; empty when nothing that is known holds it."""


class PathStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happens to the packet."""

    stage: Stage
    node: str = ""
    namespace: str = ""
    """A pod's (`NAMESPACE/NAME`) when it happens in there, empty for the node's own network."""
    what: str = ""
    """For people, one line."""
    why: str = ""
    """In Kubernetes' words, where known; a rule's comment else."""
    family: str = ""
    """`ip`, `ip6` or `inet`: of the table."""
    table: str = ""
    chain: str = ""
    rule: str = ""
    """As it stands in the dump, where that is known."""
    place: str = ""
    """The dump's name and line, empty when not known."""
    verdict: str = ""
    """`accept`, `drop`, `reject`, `jump KUBE-SERVICES`, `dnat 10.1.0.5:80`, `masquerade`, `local`, …"""
    chance: Fraction = _ONE
    """That the packet comes this way, given that it came to the step before."""
    before: Header | None = None
    after: Header | None = None
    """Both are there for a step that changes the packet (NAT, mark) or that looks at it (routing); `before` alone when
    nothing changes."""
    evidence: tuple[str, ...] = ()
    """What the step was read from: the route, the neighbour, the connection entry, the setting, as its tool prints it."""
    near: tuple[NearMiss, ...] = ()
    """Rules of the same chain, passed by since the step before, that nearly matched."""
    unknown: str = ""
    """What is not known here, though the way goes on because it makes no difference."""


class PathEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a way ends."""

    fate: Fate
    node: str = ""
    """Where it ends."""
    address: str = ""
    port: int = 0
    """Who gets it, for DELIVERED and LEAVES; the packet's destination then, after all rewriting."""
    name: str = ""
    """What the address is."""
    source: str = ""
    """The source that the receiver sees; empty when that is not known."""
    masqueraded: bool = False
    reason: str = ""
    reply: PathBranch | None = None
    """The answer's way back, when it could be followed; its own END is DELIVERED when the sender takes it for an answer."""


class PathBranch(msgspec.Struct, frozen=True, kw_only=True):
    """Steps one after the other, then an end or several ways."""

    steps: tuple[PathStep, ...] = ()
    chance: Fraction = _ONE
    """Given that the packet came to where this way begins."""
    ways: tuple[PathBranch, ...] = ()
    """Where the way parts; their chances add up to 1."""
    end: PathEnd | None = None
    """Present exactly when `ways` is empty."""


class PathLeaf(msgspec.Struct, frozen=True, kw_only=True):
    """One whole way from start to end."""

    probability: Fraction
    steps: tuple[PathStep, ...]
    end: PathEnd


class MissingPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what a node could tell that is not known."""

    node: str
    part: str
    """`routes`, `nft rules`, `conntrack`, …"""
    why: str = ""


class PacketPath(msgspec.Struct, frozen=True, kw_only=True):
    """All that can be told of one packet's way."""

    packet: Header
    source: Party
    destination: Party
    start: str = ""
    """The node where it begins, empty for outside."""
    service: str = ""
    """The Service port (`shop/web:http`) that the objects, or the rules' comments, name for the destination."""
    way: PathBranch
    sources: tuple[str, ...] = ()
    """What it was read from: `bundle node-1.tgz (node worker-a)`, `live`, `rules nat.txt`."""
    missing: tuple[MissingPart, ...] = ()
    """Parts that were not there and were asked for on the way."""

    def leaves(self) -> tuple[PathLeaf, ...]:
        """All ways from start to end, likeliest first, then in order."""
        found = sorted(_leaves(self.way, _ONE, ()), key=lambda leaf: -leaf.probability)
        return tuple(found)

    def ends(self) -> dict[tuple[Fate, str, int, bool], Fraction]:
        """(fate, address, port, masqueraded) and how likely; equal ends are added up."""
        told: dict[tuple[Fate, str, int, bool], Fraction] = {}
        for leaf in self.leaves():
            key = leaf.end.fate, leaf.end.address, leaf.end.port, leaf.end.masqueraded
            told[key] = told.get(key, Fraction(0)) + leaf.probability
        return told


def _leaves(way: PathBranch, probability: Fraction, steps: tuple[PathStep, ...]) -> Iterator[PathLeaf]:
    probability *= way.chance
    steps = (*steps, *way.steps)
    if way.end is not None:
        yield PathLeaf(probability=probability, steps=steps, end=way.end)
    for each in way.ways:
        yield from _leaves(each, probability, steps)


def as_data(journey: PacketPath) -> dict[str, Any]:
    """The journey as JSON can hold it: fractions as text ("1/3", "1"), `version`, and `ends`, the leaves without steps."""
    data: dict[str, Any] = msgspec.to_builtins(journey, enc_hook=_fraction)
    data["version"] = VERSION
    data["ends"] = [
        {
            "probability": str(leaf.probability),
            **{
                key: value for key, value in msgspec.to_builtins(leaf.end, enc_hook=_fraction).items() if key != "reply"
            },
        }
        for leaf in journey.leaves()
    ]
    return data


def _fraction(value: object) -> object:
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
