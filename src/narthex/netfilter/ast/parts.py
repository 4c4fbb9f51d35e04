"""What all nodes of rules are made of: fields, keys, verdicts. Import them from `narthex.netfilter.ast.nodes`."""

from __future__ import annotations

import enum

import msgspec


class Unprintable(ValueError):
    """The node has no form in this tool."""


class Field(enum.Enum):
    """What can be read from a packet; the value is nft's name for it."""

    SADDR = "saddr"
    DADDR = "daddr"
    L4PROTO = "meta l4proto"
    SPORT = "th sport"
    DPORT = "th dport"
    IIFNAME = "iifname"
    OIFNAME = "oifname"
    NFPROTO = "meta nfproto"
    """"ipv4" or "ipv6"."""
    ORIG_SADDR = "ct original saddr"
    """Of the connection's first packet as it was sent, like the next three."""
    ORIG_DADDR = "ct original daddr"
    ORIG_SPORT = "ct original proto-src"
    ORIG_DPORT = "ct original proto-dst"

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class Slot(msgspec.Struct, frozen=True, tag=True):
    """A random number below `mod`, as part of a key: `numgen random mod N`."""

    mod: int


KeyPart = Field | Slot
Key = tuple[KeyPart, ...]

Atom = str | int
"""One component of an element: address or network text, protocol in lower case ("tcp"), port or slot as a number."""


class Jump(msgspec.Struct, frozen=True, tag=True):
    """Walk the chain and come back."""

    chain: str


class Goto(msgspec.Struct, frozen=True, tag=True):
    """Walk the chain; what follows here is skipped."""

    chain: str


class Return(msgspec.Struct, frozen=True, tag=True):
    """Back to the calling chain."""


class Accept(msgspec.Struct, frozen=True, tag=True):
    """Done with this hook's chain."""


class DropPacket(msgspec.Struct, frozen=True, tag=True):
    """Throw the packet away."""


class RejectPacket(msgspec.Struct, frozen=True, tag=True):
    """Refuse with ICMP; `kind` is nft's word ("port-unreachable")."""

    kind: str = "port-unreachable"


Verdict = Jump | Goto | Return | Accept | DropPacket | RejectPacket


class Dnat(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the destination. Port None keeps the port."""

    address: str
    port: int | None = None
