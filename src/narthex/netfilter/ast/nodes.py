"""Rules as typed data: the nodes that nft and iptables rules are made of.

A rule is a tuple of expressions, read from left to right as the kernel does: matches that may end the rule, and
statements that act. Both tools share the nodes; a node that one tool cannot print raises `Unprintable` there. What a
parser does not know becomes `Unknown`, keeps its text, and makes a walk answer "unsupported" instead of a guess.

Addresses and networks are canonical text (`narthex.model.net`). Mark values are unsigned 32-bit integers.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from narthex.model.net import IPFamily
from narthex.netfilter.ast.foreign import (
    AddressType,
    AnyOf,
    Aside,
    Circumstance,
    ConnMarkIs,
    CtDirection,
    DnatRange,
    Draw,
    EveryNth,
    IcmpType,
    MarkCopy,
    MarkTo,
    RedirectRange,
    Snat,
    Switch,
    TcpFlags,
    Unknown,
    Unshown,
    Untrack,
)
from narthex.netfilter.ast.parts import (
    Accept,
    Atom,
    Dnat,
    DropPacket,
    Field,
    Goto,
    Jump,
    Key,
    KeyPart,
    RejectPacket,
    Return,
    Slot,
    Unprintable,
    Verdict,
)

__all__ = [
    "Accept",
    "AddressType",
    "AnyOf",
    "Aside",
    "Atom",
    "ByIpvs",
    "Chain",
    "Chance",
    "Circumstance",
    "Compare",
    "ConnMarkIs",
    "Counter",
    "CtDirection",
    "CtState",
    "CtStatus",
    "Dnat",
    "DnatMap",
    "DnatRange",
    "Draw",
    "DropPacket",
    "ElementData",
    "ElementKey",
    "EveryNth",
    "Expression",
    "Field",
    "Goto",
    "Hook",
    "IcmpType",
    "InSet",
    "IsLocal",
    "Jump",
    "Key",
    "KeyPart",
    "MarkCopy",
    "MarkIs",
    "MarkOr",
    "MarkTo",
    "MarkXor",
    "Masquerade",
    "MatchSet",
    "PortRange",
    "Recent",
    "RecentSet",
    "Redirect",
    "RedirectRange",
    "RejectPacket",
    "Remember",
    "Return",
    "Rule",
    "Ruleset",
    "Set",
    "Slot",
    "Snat",
    "Spread",
    "Switch",
    "Table",
    "TcpFlags",
    "TcpReset",
    "Unknown",
    "Unprintable",
    "Unshown",
    "Untrack",
    "Verdict",
    "VerdictMap",
]

# ---- matches -------------------------------------------------------------------------------------------------------


class Compare(msgspec.Struct, frozen=True, tag=True):
    """A field equals one of the values. Networks match what they hold; an interface value may end in `*`."""

    field: Field
    values: tuple[Atom, ...]
    negate: bool = False


class PortRange(msgspec.Struct, frozen=True, tag=True):
    """A port lies between two, both included."""

    field: Field
    first: int
    last: int
    negate: bool = False


class IsLocal(msgspec.Struct, frozen=True, tag=True):
    """The address (SADDR or DADDR) is one of this machine's own, loopback included: `fib … type local`,
    `addrtype --…-type LOCAL`."""

    field: Field
    negate: bool = False


class CtState(msgspec.Struct, frozen=True, tag=True):
    """The connection is in one of the states ("new", "established", "related", "invalid")."""

    states: tuple[str, ...]
    negate: bool = False


class CtStatus(msgspec.Struct, frozen=True, tag=True):
    """The connection has one of the status bits ("dnat", "snat")."""

    bits: tuple[str, ...]
    negate: bool = False


class TcpReset(msgspec.Struct, frozen=True, tag=True):
    """The packet ends a TCP connection at once: `tcp flags rst`."""


class MarkIs(msgspec.Struct, frozen=True, tag=True):
    """`mark & mask == value`."""

    value: int
    mask: int = 0xFFFFFFFF
    negate: bool = False


class InSet(msgspec.Struct, frozen=True, tag=True):
    """The key is an element of a named set of nft."""

    key: Key
    name: str
    negate: bool = False


class MatchSet(msgspec.Struct, frozen=True, tag=True):
    """The packet is in an ipset: `-m set --match-set NAME dst,dst`. What is looked up depends on the set's kind."""

    name: str
    sides: tuple[str, ...]
    """"src" or "dst" for each of the kind's dimensions."""
    negate: bool = False


class ByIpvs(msgspec.Struct, frozen=True, tag=True):
    """IPVS has sent the packet on, for a virtual server with all that is said here: `-m ipvs`."""

    address: str | None = None
    protocol: str | None = None
    """In lower case."""
    port: int | None = None
    negate: bool = False
    """Only for a node that says nothing of the virtual server: IPVS has not touched it."""


class Chance(msgspec.Struct, frozen=True, tag=True):
    """Matches at random with this probability, written as iptables prints it: eleven decimals."""

    probability: str


class Recent(msgspec.Struct, frozen=True, tag=True):
    """xt_recent: the source is in the list, seen within `seconds` (`--rcheck --seconds N --reap`)."""

    name: str
    seconds: int


# ---- statements ----------------------------------------------------------------------------------------------------


class MarkOr(msgspec.Struct, frozen=True, tag=True):
    """Set bits of the packet mark."""

    bits: int


class MarkXor(msgspec.Struct, frozen=True, tag=True):
    """Turn bits of the packet mark."""

    bits: int


class Masquerade(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the source to the outgoing link's address."""

    fully_random: bool = True


class Redirect(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the destination to this machine itself, at this port: in prerouting to an address of the interface that
    the packet came in on, in output to loopback."""

    port: int


class DnatMap(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the destination to what a map holds for the key; no element: the rule does not match."""

    key: Key
    map: str


class VerdictMap(msgspec.Struct, frozen=True, tag=True):
    """Do what a named verdict map holds for the key; no element: go on."""

    key: Key
    map: str


class Spread(msgspec.Struct, frozen=True, tag=True):
    """Go to one of the chains at random, each equally likely: `numgen random mod N vmap { 0 : goto …, … }`."""

    chains: tuple[str, ...]


class Remember(msgspec.Struct, frozen=True, tag=True):
    """Put the key into a dynamic set, or start its timeout again: `update @set { … }`."""

    key: Key
    set: str


class RecentSet(msgspec.Struct, frozen=True, tag=True):
    """xt_recent: put the source into the list (`--set`)."""

    name: str


class Counter(msgspec.Struct, frozen=True, tag=True):
    """Count; never changes a packet's way. Figures read from the kernel are not kept here."""


Expression = (
    Compare
    | PortRange
    | IsLocal
    | CtState
    | CtStatus
    | TcpReset
    | MarkIs
    | InSet
    | MatchSet
    | ByIpvs
    | Chance
    | Recent
    | AnyOf
    | AddressType
    | TcpFlags
    | IcmpType
    | ConnMarkIs
    | CtDirection
    | EveryNth
    | Circumstance
    | Unshown
    | Unknown
    | Verdict
    | MarkOr
    | MarkXor
    | MarkTo
    | MarkCopy
    | Untrack
    | Aside
    | Masquerade
    | Snat
    | Dnat
    | DnatRange
    | Redirect
    | RedirectRange
    | Switch
    | Draw
    | DnatMap
    | VerdictMap
    | Spread
    | Remember
    | RecentSet
    | Counter
)


# ---- containers ----------------------------------------------------------------------------------------------------


class Rule(msgspec.Struct, frozen=True):
    """Expressions in order, and a comment that changes nothing."""

    expressions: tuple[Expression, ...]
    comment: str = ""


class Hook(msgspec.Struct, frozen=True, kw_only=True):
    """Where a base chain hangs."""

    type: str
    """`filter` or `nat`; iptables tables other than nat are `filter`."""
    hook: str
    """prerouting, input, forward, output or postrouting."""
    priority: int
    policy: str = "accept"


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """A named list of rules."""

    name: str
    rules: tuple[Rule, ...] = ()
    hook: Hook | None = None


ElementKey = tuple[Atom, ...]
ElementData = Verdict | tuple[str, int] | None
"""A verdict, an (address, port) to send to, or None in a set."""


class Set(msgspec.Struct, frozen=True, kw_only=True):
    """A set or, when `data` says so, a map."""

    name: str
    key: Key
    data: str = ""
    """"" for a set, "verdict", or "endpoint" for address . port."""
    interval: bool = False
    """Elements may hold networks."""
    dynamic: bool = False
    """The packet path adds elements; what stands in it is no part of a comparison."""
    timeout: int = 0
    """Seconds after which an element is forgotten; 0: never."""
    size: int = 0
    counter: bool = False
    elements: Mapping[ElementKey, ElementData] = {}
    strange: str = ""
    """Of other people's sets: what is not understood, so that no look-up in it can be answered."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table with its chains and sets, by name."""

    family: IPFamily | None
    """None: `inet`, both families."""
    name: str
    chains: Mapping[str, Chain] = {}
    """Those of a dump may be read only when they are asked for (`netfilter.lazy`)."""
    sets: Mapping[str, Set] = {}
    legacy: bool = False
    """Of iptables-legacy, whose chains may call each other more deeply than nf_tables allows."""


class Ruleset(msgspec.Struct, frozen=True):
    """Tables in the order read or written."""

    tables: tuple[Table, ...] = ()
