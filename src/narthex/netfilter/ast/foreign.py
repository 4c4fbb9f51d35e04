"""Nodes that only other people's rules have; ours are printed without them. Import them from `narthex.netfilter.ast.nodes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from narthex.netfilter.ast.parts import Dnat, Field, Verdict

if TYPE_CHECKING:
    from narthex.netfilter.ast.nodes import Expression

# ---- matches -------------------------------------------------------------------------------------------------------


class AnyOf(msgspec.Struct, frozen=True, tag=True):
    """At least one of the ways holds; a way holds when all of its matches do."""

    ways: tuple[tuple[Expression, ...], ...]
    negate: bool = False


class AddressType(msgspec.Struct, frozen=True, tag=True):
    """The address (SADDR or DADDR) is of one of these types of route: "unicast", "local", "broadcast", "multicast", …"""

    field: Field
    types: tuple[str, ...]
    negate: bool = False


class TcpFlags(msgspec.Struct, frozen=True, tag=True):
    """A TCP packet with `flags & mask == value`, in the header's bits: FIN 1, SYN 2, RST 4, PSH 8, ACK 16, URG 32, ECE 64, CWR 128."""

    mask: int
    value: int
    negate: bool = False


class IcmpType(msgspec.Struct, frozen=True, tag=True):
    """The ICMP (or ICMPv6) message is of one of these types, and with a code between two when `codes` says so."""

    types: tuple[int, ...]
    codes: tuple[int, int] | None = None
    negate: bool = False


class ConnMarkIs(msgspec.Struct, frozen=True, tag=True):
    """`mark of the connection & mask == value`."""

    value: int
    mask: int = 0xFFFFFFFF
    negate: bool = False


class CtDirection(msgspec.Struct, frozen=True, tag=True):
    """The packet goes the connection's own way, or back."""

    original: bool


class EveryNth(msgspec.Struct, frozen=True, tag=True):
    """One of `every` packets that come here matches, in turn: over many connections that is its share."""

    every: int


class Circumstance(msgspec.Struct, frozen=True, tag=True):
    """A match that is understood but asks for something that no dump tells; `about` says what in plain words."""

    about: str
    text: str
    forwarded: bool = True
    """A packet that came in over a link can have it."""
    made_here: bool = True
    """A packet that a process of this node made can have it."""


class Unshown(msgspec.Struct, frozen=True, tag=True):
    """What a listing leaves out of every rule: a match for it may stand here. The text says what."""

    text: str


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """A match or statement of somebody else's that this version does not know; the text as it stood."""

    text: str


# ---- statements ---


class MarkTo(msgspec.Struct, frozen=True, tag=True):
    """`mark = mark & ~mask ^ value`: of the packet, or of its connection."""

    value: int
    mask: int = 0xFFFFFFFF
    connection: bool = False


class MarkCopy(msgspec.Struct, frozen=True, tag=True):
    """Between the packet's mark and the connection's: `to = to & ~to_mask ^ from & from_mask`."""

    to_connection: bool
    from_mask: int = 0xFFFFFFFF
    to_mask: int = 0xFFFFFFFF


class Untrack(msgspec.Struct, frozen=True, tag=True):
    """No connection is kept for the packet: `notrack`. So nothing rewrites it."""


class Aside(msgspec.Struct, frozen=True, tag=True):
    """Something that never changes a packet's way: a log line, a segment size, a priority. The text as it stood."""

    text: str


class DnatRange(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the destination to one of several addresses, or ports, that the kernel chooses. Address "" keeps it."""

    first: str
    last: str
    first_port: int | None = None
    last_port: int | None = None


class RedirectRange(msgspec.Struct, frozen=True, tag=True):
    """As Redirect, to a port between two; None keeps the port that the packet has."""

    first: int | None = None
    last: int | None = None


class Snat(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the source to an address between two; ports are the kernel's to choose."""

    first: str
    last: str


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Do what the first arm says all of whose matches hold; none: go on. `iifname vmap { "eth0" : goto a, … }`."""

    arms: tuple[tuple[tuple[Expression, ...], Verdict], ...]


class Draw(msgspec.Struct, frozen=True, tag=True):
    """Draw a number below `mod` and do what the arm with it says: (first number, last number, what). Numbers without an
    arm go on. `numgen random mod 4 vmap { 0-1 : accept, 2 : goto a }`, `dnat to numgen random mod 2 map { … }`."""

    mod: int
    arms: tuple[tuple[int, int, Verdict | Dnat], ...]
