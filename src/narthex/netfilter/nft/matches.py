"""Matches of nft other than the comparison of a field with a value."""

from __future__ import annotations

import re
from collections.abc import Callable

from narthex.netfilter import ast
from narthex.netfilter.nft.cursor import TokenCursor, UnknownSyntax
from narthex.netfilter.xtables.values import ICMP_TYPES

Expressions = tuple[ast.Expression, ...]

_COMPARISONS = ("==", "!=", "<", ">", "<=", ">=")
_ENDS = frozenset(
    ("counter", "accept", "drop", "return", "jump", "goto", "log", "limit", "comment", "reject", "continue")
)


def negation(cursor: TokenCursor) -> bool:
    """Read an optional `!=` or `==`. Return True for `!=`."""
    if cursor.peek() in ("!=", "=="):
        return cursor.take() == "!="
    return False


# ---- TCP flags -----------------------------------------------------------------------------------------------------

_FLAG_BITS = {**{name: 1 << bit for bit, name in enumerate(ast.TCP_FLAGS)}, "ecn": 64}
_RESET = ("rst",), ("rst", "/", "rst"), ("&", "rst", "==", "rst")
"""Forms after `tcp flags` that mean a reset."""


def tcp_flags(cursor: TokenCursor) -> Expressions:
    """Read the part after `tcp flags`."""
    for form in _RESET:
        following = tuple(cursor.peek(ahead) for ahead in range(len(form) + 1))
        if following[:-1] == form and following[-1] not in (",", "/", "|", "&", "==", "!="):
            cursor.position += len(form)
            return (ast.TcpReset(),)
    if cursor.take_if("&"):
        mask = _bits(cursor)
        negate = negation(cursor)
        return (ast.TcpFlags(mask, _bits(cursor), negate),)
    if cursor.peek() in ("==", "!="):
        negate = cursor.take() == "!="
        first = _bits(cursor)
        if cursor.take_if("/"):
            return (ast.TcpFlags(_bits(cursor), first, negate),)
        # All bits are compared. The client chooses whether to set the congestion bits.
        return (ast.TcpFlags(0xFF, first, negate),)
    first = _bits(cursor)
    if cursor.take_if("/"):
        return (ast.TcpFlags(_bits(cursor), first),)
    # A list without an operator matches any of the flags.
    return (ast.TcpFlags(first, 0, negate=True),)


def _bits(cursor: TokenCursor) -> int:
    """Read flags such as `syn`, `(fin | syn)`, `fin,syn`, `fin | syn`, or a number."""
    bits = 0
    opened = cursor.peek().startswith("(")
    while True:
        word = cursor.take()
        for part in filter(None, re.split(r"[()|,]", word)):
            bits |= int(part, 0) if part[0].isdigit() else _flag(part)
        if opened and word.endswith(")"):
            return bits
        if cursor.take_if("|", ","):
            continue
        if not opened:
            return bits


def _flag(word: str) -> int:
    if word not in _FLAG_BITS:
        raise UnknownSyntax
    return _FLAG_BITS[word]


# ---- connections ---------------------------------------------------------------------------------------------------


def ct(cursor: TokenCursor) -> Expressions:
    """Read a match of `ct state`, `ct status`, `ct mark`, or `ct direction`."""
    cursor.expect("ct")
    what = cursor.take()
    if what == "mark":
        return (_mark(cursor, ast.ConnMarkIs),)
    if what == "direction":
        negate = negation(cursor)
        return (ast.CtDirection((cursor.take() == "original") is not negate),)
    if what not in ("state", "status"):
        raise UnknownSyntax
    exact = cursor.peek() == "!="
    negate = cursor.take_if("!", "!=")
    if cursor.peek() == "&":
        raise UnknownSyntax
    values = _word_list(cursor)
    if not all(value.isalpha() or value == "seen-reply" for value in values):
        raise UnknownSyntax
    if what == "state":
        return (ast.CtState(values, negate),)
    if exact:
        # The whole status is compared, not one bit.
        raise UnknownSyntax
    return (ast.CtStatus(values, negate),)


def _word_list(cursor: TokenCursor) -> tuple[str, ...]:
    braced = cursor.take_if("{")
    values = [cursor.take()]
    while cursor.take_if(","):
        values.append(cursor.take())
    if braced:
        cursor.expect("}")
    return tuple(values)


# ---- marks and random numbers -----------------------------------------------------------------------------------------------


def mark(cursor: TokenCursor) -> Expressions:
    """Read the part after `meta mark`."""
    return (_mark(cursor, ast.MarkIs),)


def _mark(cursor: TokenCursor, kind: type[ast.MarkIs] | type[ast.ConnMarkIs]) -> ast.Expression:
    mask = 0xFFFFFFFF
    if cursor.take_if("&", "and"):
        mask = cursor.number()
    negate = negation(cursor)
    if cursor.peek() == "{":
        values = _word_list(cursor)
        return ast.AnyOf(tuple((kind(int(value, 0), mask),) for value in values), negate)
    value, slash, length = cursor.take().partition("/")
    if slash:
        # nft prints a mask of leading ones as a prefix length.
        if not length.isdigit() or int(length) > 32:
            raise UnknownSyntax
        mask &= 0xFFFFFFFF << (32 - int(length)) & 0xFFFFFFFF
    if not value[:1].isdigit() or cursor.peek() in ("|", "^", "&", "-") or "-" in value:
        raise UnknownSyntax
    return kind(int(value, 0), mask, negate)


_RANDOM_RANGE = 0x80000000


def random(cursor: TokenCursor) -> Expressions:
    """Read the part after `meta random` in `meta random & 2147483647 < N`, nft's form of iptables' statistic match."""
    cursor.expect("&")
    if cursor.number() != _RANDOM_RANGE - 1:
        raise UnknownSyntax
    cursor.expect("<")
    share = cursor.number() / _RANDOM_RANGE
    return (ast.RandomMatch(f"{share:.11f}"),)


# ---- local addresses -----------------------------------------------------------------------------------------------

_TYPES = frozenset(
    ("unspec", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole", "unreachable", "prohibit")
)


def fib(cursor: TokenCursor) -> Expressions:
    """Read `fib daddr type local` and other types. A match that depends on routes or interfaces is undecidable."""
    start = cursor.position
    cursor.expect("fib")
    field = {"saddr": ast.Field.SADDR, "daddr": ast.Field.DADDR}.get(cursor.take())
    qualifiers = []
    while cursor.take_if("."):
        qualifiers.append(cursor.take())
    result = cursor.take()
    if field is None or result not in ("type", "oif", "oifname"):
        raise UnknownSyntax
    if cursor.peek() == "vmap":
        raise UnknownSyntax
    negate = negation(cursor)
    if result != "type":
        cursor.take()
        return (ast.UndecidableMatch("the routes", cursor.slice(start, cursor.position)),)
    types = _word_list(cursor)
    if not _TYPES.issuperset(types):
        raise UnknownSyntax
    plain = ast.IsLocal(field, negate) if types == ("local",) else ast.AddressType(field, types, negate)
    if not qualifiers:
        return (plain,)
    text = cursor.slice(start, cursor.position)
    if negate:
        return (ast.UndecidableMatch("the interface of the address", text),)
    return plain, ast.UndecidableMatch("the interface of the address", text)


# ---- ICMP ----------------------------------------------------------------------------------------------------------


def icmp(cursor: TokenCursor) -> Expressions:
    """Read a match such as `icmp type echo-request`, which includes the protocol."""
    protocol = cursor.take()
    six = protocol == "icmpv6"
    if cursor.take() != "type" or cursor.peek() == "vmap":
        raise UnknownSyntax
    negate = negation(cursor)
    kinds = _NFT_ICMP_6 if six else _NFT_ICMP
    types = tuple(int(word) if word.isdigit() else kinds[word] for word in _word_list(cursor) if _named(word, kinds))
    name = "ipv6-icmp" if six else "icmp"
    return ast.Compare(ast.Field.L4PROTO, (name,)), ast.IcmpType(types, None, negate)


def _named(word: str, kinds: dict[str, int]) -> bool:
    if not word.isdigit() and word not in kinds:
        raise UnknownSyntax
    return True


_NFT_ICMP = {name: number for (six, name), number in ICMP_TYPES.items() if not six}
_NFT_ICMP_6 = {
    **{name: number for (six, name), number in ICMP_TYPES.items() if six},
    "nd-router-solicit": 133,
    "nd-router-advert": 134,
    "nd-neighbor-solicit": 135,
    "nd-neighbor-advert": 136,
    "nd-redirect": 137,
    "mld-listener-query": 130,
    "mld-listener-report": 131,
    "mld-listener-done": 132,
    "mld-listener-reduction": 132,
    "mld2-listener-report": 143,
}


# ---- undecidable matches -------------------------------------------------------------------------------------------

_UNDECIDABLE: dict[tuple[str, ...], tuple[str, bool, bool]] = {
    ("meta", "skuid"): ("the sending process", False, True),
    ("meta", "skgid"): ("the sending process", False, True),
    ("meta", "cgroup"): ("the sending process", False, True),
    ("meta", "pkttype"): ("the link-layer packet type", True, True),
    ("meta", "length"): ("the packet length", True, True),
    ("meta", "priority"): ("the packet priority", True, True),
    ("meta", "cpu"): ("the CPU that handles the packet", True, True),
    ("meta", "time"): ("the time", True, True),
    ("meta", "hour"): ("the time", True, True),
    ("meta", "day"): ("the time", True, True),
    ("meta", "iifgroup"): ("the interface group", True, True),
    ("meta", "oifgroup"): ("the interface group", True, True),
    ("meta", "iiftype"): ("the interface type", True, True),
    ("meta", "ibrname"): ("the bridge port", True, False),
    ("meta", "obrname"): ("the bridge port", True, False),
    ("ip", "ttl"): ("the TTL", True, True),
    ("ip6", "hoplimit"): ("the hop limit", True, True),
    ("ip", "dscp"): ("the DSCP field", True, True),
    ("ip6", "dscp"): ("the DSCP field", True, True),
    ("ip", "length"): ("the packet length", True, True),
    ("ip", "id"): ("the IP identification", True, True),
    ("ip", "frag-off"): ("the fragment offset", True, True),
    ("ip", "ecn"): ("the ECN bits", True, True),
    ("ether", "saddr"): ("the source MAC address", True, False),
    ("ether", "daddr"): ("the destination MAC address", True, False),
    ("ct", "expiration"): ("the remaining lifetime of the connection", True, True),
    ("ct", "helper"): ("the conntrack helper", True, True),
    ("ct", "zone"): ("the conntrack zone", True, True),
    ("ct", "bytes"): ("the traffic of the connection", True, True),
    ("ct", "packets"): ("the traffic of the connection", True, True),
    ("ct", "count"): ("the number of connections", True, True),
    ("socket", "transparent"): ("a matching local socket", True, True),
    ("socket", "mark"): ("a matching local socket", True, True),
    ("rt", "ipsec"): ("IPsec policies", True, True),
    ("meta", "ipsec"): ("IPsec policies", True, True),
}


def undecidable(cursor: TokenCursor) -> Expressions:
    """Read a match that depends on something that no dump contains."""
    known = _UNDECIDABLE.get((cursor.peek(), cursor.peek(1)))
    if known is None or cursor.peek(2) == "set":
        raise UnknownSyntax
    start = cursor.position
    cursor.position += 2
    negate = False
    if cursor.peek() in _COMPARISONS:
        negate = cursor.take() not in ("==", ">", "<", ">=", "<=")
    if cursor.peek() == "{":
        depth = 0
        while True:
            word = cursor.take()
            depth += (word == "{") - (word == "}")
            if not depth:
                break
    elif cursor.peek() not in _ENDS and not cursor.done:
        cursor.take()
        while cursor.peek() in (",", "/", "bytes", "mbytes", "kbytes"):
            cursor.take()
            if cursor.peek() and cursor.peek() not in _ENDS:
                cursor.take()
    subject, forwarded, sent_locally = known
    if negate:
        forwarded = sent_locally = True
    return (ast.UndecidableMatch(subject, cursor.slice(start, cursor.position), forwarded, sent_locally),)


def limit(cursor: TokenCursor) -> Expressions:
    """Read `limit rate [over] 5/second [burst 5 packets]`, `limit name "x"`, or `quota …`."""
    start = cursor.position
    cursor.take()
    if cursor.peek() == "name":
        cursor.position += 2
    else:
        cursor.take()
        while (
            cursor.peek() in ("over", "until", "burst", "packets", "bytes", "kbytes", "mbytes", "used")
            or cursor.peek()[:1].isdigit()
        ):
            cursor.take()
    return (ast.UndecidableMatch("the number of earlier packets", cursor.slice(start, cursor.position)),)


READERS: dict[str, Callable[[TokenCursor], Expressions]] = {
    "fib": fib,
    "icmp": icmp,
    "icmpv6": icmp,
    "limit": limit,
    "quota": limit,
    "socket": undecidable,
    "rt": undecidable,
    "ether": undecidable,
}
