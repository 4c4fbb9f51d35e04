"""Netfilter rules as typed data: the nodes of nft and iptables rules.

A rule is a tuple of expressions that the kernel evaluates from left to right: matches, which may end the evaluation of
the rule, and statements, which act on the packet. Both tools share the nodes. A printer raises `Unprintable` for a node
that its tool has no syntax for. A parser turns syntax that it does not know into `Unknown`, which keeps the text; a walk
then reports "unsupported" instead of guessing.

Addresses and networks are canonical text (see `narthex.model.net`). Mark values are unsigned 32-bit integers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from narthex.model import IPFamily


class Unprintable(ValueError):
    """An expression or value that the output format of a tool cannot express."""


# ---- packet fields, keys, and verdicts -----------------------------------------------------------------------------


class Field(enum.Enum):
    """Packet fields that rules read. The values are the names in nft."""

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
    """Source address of the connection's first packet as sent; the next three are of the same packet."""
    ORIG_DADDR = "ct original daddr"
    ORIG_SPORT = "ct original proto-src"
    ORIG_DPORT = "ct original proto-dst"

    __hash__ = object.__hash__  # as `model.net.IPFamily`


class Slot(msgspec.Struct, frozen=True, tag=True):
    """A random number below `mod` as a part of a key: `numgen random mod N`."""

    mod: int


class HashedFields(msgspec.Struct, frozen=True, tag=True):
    """A number that a hash of fields selects, the same for the same values: `jhash FIELDS mod N seed S offset M`."""

    fields: tuple[Field, ...]
    """Empty: fields that are not known, as `symhash` has."""
    mod: int
    """How many numbers there are."""
    seed: int | None = None
    """None: the kernel chose one, and does not tell it."""
    offset: int = 0
    """The lowest number."""


KeyPart = Field | Slot | HashedFields
Key = tuple[KeyPart, ...]

Atom = str | int
"""One component of a set element: address or network, protocol in lower case ("tcp"), port or slot number."""


class Jump(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Evaluate a chain, then return to the next rule."""

    chain: str


class Goto(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Evaluate a chain without returning to this one."""

    chain: str


class Return(msgspec.Struct, frozen=True, tag=True):
    """Return to the calling chain."""


class Accept(msgspec.Struct, frozen=True, tag=True):
    """Accept the packet in this base chain."""


class DropPacket(msgspec.Struct, frozen=True, tag=True):
    """Drop the packet."""


class RejectPacket(msgspec.Struct, frozen=True, tag=True):
    """Reject the packet with an ICMP error or a TCP reset."""

    kind: str = "port-unreachable"
    """The ICMP code as nft names it, or "tcp reset"."""


Verdict = Jump | Goto | Return | Accept | DropPacket | RejectPacket


# ---- matches -------------------------------------------------------------------------------------------------------


class Compare(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A field equals one of the values, or lies in one of the networks. An interface name may end in `*`."""

    field: Field
    values: tuple[Atom, ...]
    negate: bool = False


class PortRange(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A port lies between `first` and `last`, both included."""

    field: Field
    first: int
    last: int
    negate: bool = False


class IsLocal(msgspec.Struct, frozen=True, tag=True):
    """SADDR or DADDR is a local address of this host: `fib … type local`, `addrtype --…-type LOCAL`."""

    field: Field
    negate: bool = False


class AddressType(msgspec.Struct, frozen=True, tag=True):
    """SADDR or DADDR has one of these route types ("unicast", "local", "broadcast", "multicast", …)."""

    field: Field
    types: tuple[str, ...]
    negate: bool = False


class TcpReset(msgspec.Struct, frozen=True, tag=True):
    """The packet is a TCP reset: `tcp flags rst`."""


TCP_FLAGS = ("fin", "syn", "rst", "psh", "ack", "urg", "ece", "cwr")
"""Names of the flags in a TCP header, lowest bit first."""


class TcpFlags(msgspec.Struct, frozen=True, tag=True):
    """`flags & mask == value` of a TCP header, with the bits of TCP_FLAGS."""

    mask: int
    value: int
    negate: bool = False


class IcmpType(msgspec.Struct, frozen=True, tag=True):
    """The ICMP or ICMPv6 message has one of these types and a code in the range `codes`, if set."""

    types: tuple[int, ...]
    codes: tuple[int, int] | None = None
    negate: bool = False


class CtState(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The connection is in one of the states "new", "established", "related", "invalid", or "untracked"."""

    states: tuple[str, ...]
    negate: bool = False


class CtStatus(msgspec.Struct, frozen=True, tag=True):
    """The connection has one of the status bits, such as "dnat" and "snat"."""

    bits: tuple[str, ...]
    negate: bool = False


class CtDirection(msgspec.Struct, frozen=True, tag=True):
    """The packet belongs to the connection's original direction, or to the reply direction."""

    original: bool


class MarkIs(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`packet mark & mask == value`."""

    value: int
    mask: int = 0xFFFFFFFF
    negate: bool = False


class ConnMarkIs(msgspec.Struct, frozen=True, tag=True):
    """`connection mark & mask == value`."""

    value: int
    mask: int = 0xFFFFFFFF
    negate: bool = False


class InSet(msgspec.Struct, frozen=True, tag=True):
    """The key is an element of a named nft set."""

    key: Key
    name: str
    negate: bool = False


class MatchSet(msgspec.Struct, frozen=True, tag=True):
    """The packet is in an ipset: `-m set --match-set NAME dst,dst`. The set's type determines the fields."""

    name: str
    sides: tuple[str, ...]
    """"src" or "dst" for each dimension of the set's type."""
    negate: bool = False


class IpvsMatch(msgspec.Struct, frozen=True, tag=True):
    """IPVS has forwarded the packet for a virtual server with these properties: `-m ipvs`."""

    address: str | None = None
    protocol: str | None = None
    """Protocol name in lower case."""
    port: int | None = None
    negate: bool = False
    """IPVS has not handled the packet. Only allowed without properties."""


class RandomMatch(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The rule matches at random with this probability, written with eleven decimals as iptables prints it."""

    probability: str


class EveryNth(msgspec.Struct, frozen=True, tag=True):
    """One of `every` packets matches, in turn. Over many connections that is a probability of 1/`every`."""

    every: int


class RecentCheck(msgspec.Struct, frozen=True, tag=True):
    """The source was added to an xt_recent list within `seconds`: `--rcheck --seconds N --reap`."""

    name: str
    seconds: int


class AnyOf(msgspec.Struct, frozen=True, tag=True):
    """At least one alternative matches. An alternative matches if all of its matches do."""

    alternatives: tuple[tuple[Expression, ...], ...]
    negate: bool = False


class UndecidableMatch(msgspec.Struct, frozen=True, tag=True):
    """A match that is understood but depends on something that no dump contains, described by `about`."""

    about: str
    text: str
    forwarded: bool = True
    """A packet that arrived on an interface can match."""
    sent_locally: bool = True
    """A packet that a local process sent can match."""


class OmittedMatch(msgspec.Struct, frozen=True, tag=True):
    """A listing omits some matches, which `text` describes, so the rule may have such a match here."""

    text: str


class Assumed(msgspec.Struct, frozen=True, tag=True):
    """The input lacks the rule, which is taken to be there for the reason `text`."""

    text: str


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """A match or statement that the parser does not know, as the original text."""

    text: str


NOT_DECODED = "could not decode"
"""Words that the text of every `Undecoded` has."""


class Undecoded(msgspec.Struct, frozen=True, tag=True):
    """A match or target that the kernel has and that the tool that printed the rule could not decode.

    An older iptables prints rules of a newer one without the parts that it does not know, and nft without the decoder of
    xtables prints only the name of an extension. `text` is a clause that says what is missing.
    """

    text: str


class RuleGap(msgspec.Struct, frozen=True, tag=True):
    """The only expression of a rule that stands for an unknown number of rules which the text omits here.

    `text` is a clause that says why ("the text is cut here").
    """

    text: str


# ---- statements ----------------------------------------------------------------------------------------------------


class MarkOr(msgspec.Struct, frozen=True, tag=True):
    """Set bits of the packet mark."""

    bits: int


class MarkXor(msgspec.Struct, frozen=True, tag=True):
    """Toggle bits of the packet mark."""

    bits: int


class SetMark(msgspec.Struct, frozen=True, tag=True):
    """Change the packet mark or the connection mark: `mark = mark & ~mask ^ value`."""

    value: int
    mask: int = 0xFFFFFFFF
    connection: bool = False


class CopyMark(msgspec.Struct, frozen=True, tag=True):
    """Copy between packet mark and connection mark: `to = to & ~to_mask ^ from & from_mask`."""

    to_connection: bool
    from_mask: int = 0xFFFFFFFF
    to_mask: int = 0xFFFFFFFF


class Masquerade(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the source to the address of the outgoing interface."""

    fully_random: bool = True


class Snat(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the source to an address in a range. The kernel chooses the port."""

    first: str
    last: str
    fully_random: bool = False


class Dnat(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Rewrite the destination. Port None keeps the port."""

    address: str
    port: int | None = None


class DnatRange(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the destination to an address and a port that the kernel chooses from ranges. Address "" keeps it."""

    first: str
    last: str
    first_port: int | None = None
    last_port: int | None = None


class DnatMap(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the destination to the map's value for the key. Without an element the rule does not match."""

    key: Key
    map: str


class Redirect(msgspec.Struct, frozen=True, tag=True):
    """Rewrite the destination to this host at a port.

    In prerouting the new destination is an address of the input interface, in output it is loopback.
    """

    port: int


class RedirectRange(msgspec.Struct, frozen=True, tag=True):
    """Like `Redirect`, to a port in a range. None keeps the port."""

    first: int | None = None
    last: int | None = None


class VerdictMap(msgspec.Struct, frozen=True, tag=True):
    """Apply the verdict that a named verdict map has for the key. Without an element, continue."""

    key: Key
    map: str


class InlineVerdictMap(msgspec.Struct, frozen=True, tag=True):
    """Apply the verdict of the first arm whose matches all match: `iifname vmap { "eth0" : goto a, … }`."""

    arms: tuple[tuple[tuple[Expression, ...], Verdict], ...]


class RandomGoto(msgspec.Struct, frozen=True, tag=True):
    """Go to one of the chains at random, all equally likely: `numgen random mod N vmap { 0 : goto …, … }`."""

    chains: tuple[str, ...]


class RandomMap(msgspec.Struct, frozen=True, tag=True):
    """Draw a random number below `mod` and apply the arm (first number, last number, action) that contains it.

    Without an arm, continue. `numgen random mod 4 vmap { 0-1 : accept, 2 : goto a }`, `dnat to numgen random mod 2 map
    { … }`.
    """

    mod: int
    arms: tuple[tuple[int, int, Verdict | Dnat], ...]
    by: HashedFields | None = None
    """What selects the number instead; the numbers of the arms are without its offset."""


class UpdateSet(msgspec.Struct, frozen=True, tag=True):
    """Add the key to a dynamic set, or restart its timeout: `update @set { … }`."""

    key: Key
    set: str


class RecentSet(msgspec.Struct, frozen=True, tag=True):
    """Add the source to an xt_recent list: `--set`."""

    name: str


class NoTrack(msgspec.Struct, frozen=True, tag=True):
    """Exclude the packet from connection tracking, and thereby from NAT: `notrack`."""


class Counter(msgspec.Struct, frozen=True, tag=True):
    """Count packets and bytes. Counter values read from the kernel are not kept."""


class IgnoredStatement(msgspec.Struct, frozen=True, tag=True):
    """A statement that never affects the path of a packet (log, MSS clamping, priority), as the original text."""

    text: str


Expression = (
    Compare
    | PortRange
    | IsLocal
    | AddressType
    | TcpReset
    | TcpFlags
    | IcmpType
    | CtState
    | CtStatus
    | CtDirection
    | MarkIs
    | ConnMarkIs
    | InSet
    | MatchSet
    | IpvsMatch
    | RandomMatch
    | EveryNth
    | RecentCheck
    | AnyOf
    | UndecidableMatch
    | OmittedMatch
    | Assumed
    | Unknown
    | Undecoded
    | RuleGap
    | Verdict
    | MarkOr
    | MarkXor
    | SetMark
    | CopyMark
    | Masquerade
    | Snat
    | Dnat
    | DnatRange
    | DnatMap
    | Redirect
    | RedirectRange
    | VerdictMap
    | InlineVerdictMap
    | RandomGoto
    | RandomMap
    | UpdateSet
    | RecentSet
    | NoTrack
    | Counter
    | IgnoredStatement
)


# ---- rules, chains, sets, and tables -------------------------------------------------------------------------------


class Rule(msgspec.Struct, frozen=True, gc=False):
    """A rule: expressions in evaluation order, and a comment."""

    expressions: tuple[Expression, ...]
    comment: str = ""

    @property
    def target(self) -> str:
        """Name of the chain that the rule calls or continues in; empty if there is none."""
        for each in self.expressions:
            if isinstance(each, (Jump, Goto)):
                return each.chain
        return ""


class Hook(msgspec.Struct, frozen=True, kw_only=True):
    """The hook, priority, and policy of a base chain."""

    type: str
    """`filter` or `nat`. The iptables tables other than nat are of type `filter`."""
    hook: str
    """prerouting, input, forward, output, or postrouting."""
    priority: int
    policy: str = "accept"


class Chain(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A named list of rules. A base chain has a hook."""

    name: str
    rules: tuple[Rule, ...] = ()
    hook: Hook | None = None

    @property
    def targets(self) -> frozenset[str]:
        """Names of the chains that the rules call or continue in."""
        return frozenset(rule.target for rule in self.rules if rule.target)


ElementKey = tuple[Atom, ...]
ElementData = Verdict | tuple[str, int] | None
"""The value of a map element, a verdict or an (address, port); None in a set."""


class Set(msgspec.Struct, frozen=True, kw_only=True):
    """An nft set, or a map if `data` is not empty."""

    name: str
    key: Key
    data: str = ""
    """"" for a set, "verdict" for a verdict map, or "endpoint" for a map to address . port."""
    interval: bool = False
    """Elements may be networks."""
    dynamic: bool = False
    """The packet path adds elements, so the elements are not part of a comparison."""
    timeout: int = 0
    """Seconds after which an element expires, or 0 for never."""
    size: int = 0
    counter: bool = False
    elements: Mapping[ElementKey, ElementData] = {}
    comments: Mapping[ElementKey, str] = {}
    """The comments of elements that have one."""
    unsupported: str = ""
    """The part of a foreign set's definition that is not supported. Lookups in such a set have no answer."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table with its chains and sets by name."""

    family: IPFamily | None
    """None for `inet`, both families."""
    name: str
    chains: Mapping[str, Chain] = {}
    """The chains of a dump may be parsed only when they are accessed (see `netfilter.lazy`)."""
    sets: Mapping[str, Set] = {}
    legacy: bool = False
    """The table is of iptables-legacy, which allows deeper chain calls than nf_tables."""
    partial: str = ""
    """Why chains and rules may be missing anywhere in the table ("the output was filtered with grep"), or empty."""


class Ruleset(msgspec.Struct, frozen=True):
    """Tables in the order in which they were read or are written."""

    tables: tuple[Table, ...] = ()
    copied: bool = False
    """The rules were read from a text that a person copied, so that parts of them may be missing."""
    absent: Mapping[str, str] = {}
    """Tables of iptables that such a text lacks, wholly or in part, each with the reason."""


class TouchedPart(NamedTuple):
    """The chain of a table, or the set whose elements, another program changed."""

    table: str
    chain: str = ""
    set: str = ""
