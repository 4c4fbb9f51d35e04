"""Matches of nft that are more than a field compared with a value."""

from __future__ import annotations

import re
from collections.abc import Callable

from narthex.netfilter.ast import (
    AddressType,
    AnyOf,
    Compare,
    ConnMarkIs,
    CtDirection,
    CtState,
    CtStatus,
    Expression,
    Field,
    IcmpType,
    IsLocal,
    MarkIs,
    RandomMatch,
    TcpFlags,
    TcpReset,
    UndecidableMatch,
)
from narthex.netfilter.nft.words import NotUnderstood, Words
from narthex.netfilter.xtables.values import ICMP_TYPES

Many = tuple[Expression, ...]

_COMPARISONS = ("==", "!=", "<", ">", "<=", ">=")
_ENDS = frozenset(
    ("counter", "accept", "drop", "return", "jump", "goto", "log", "limit", "comment", "reject", "continue")
)


def negation(words: Words) -> bool:
    """`!=`, `==`, or neither."""
    if words.peek() in ("!=", "=="):
        return words.take() == "!="
    return False


# ---- TCP flags -----------------------------------------------------------------------------------------------------

_FLAG_BITS = {"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32, "ecn": 64, "ece": 64, "cwr": 128}
_RESET = ("rst",), ("rst", "/", "rst"), ("&", "rst", "==", "rst")
"""What may follow `tcp flags` to mean a reset."""


def tcp_flags(words: Words) -> Many:
    """What stands behind `tcp flags`."""
    for form in _RESET:
        following = tuple(words.peek(ahead) for ahead in range(len(form) + 1))
        if following[:-1] == form and following[-1] not in (",", "/", "|", "&", "==", "!="):
            words.position += len(form)
            return (TcpReset(),)
    if words.peek() == "&":
        words.take()
        mask = _bits(words)
        negate = negation(words)
        return (TcpFlags(mask, _bits(words), negate),)
    if words.peek() in ("==", "!="):
        negate = words.take() == "!="
        first = _bits(words)
        if words.peek() == "/":
            words.take()
            return (TcpFlags(_bits(words), first, negate),)
        # All bits are compared; whether the client sets those for congestion is its choice.
        return (TcpFlags(0xFF, first, negate),)
    first = _bits(words)
    if words.peek() == "/":
        words.take()
        return (TcpFlags(_bits(words), first),)
    # A list without an operator asks for any of them.
    return (TcpFlags(first, 0, negate=True),)


def _bits(words: Words) -> int:
    """`syn`, `(fin | syn)`, `fin,syn`, `fin | syn`, a number."""
    bits = 0
    opened = words.peek().startswith("(")
    while True:
        word = words.take()
        for part in filter(None, re.split(r"[()|,]", word)):
            bits |= int(part, 0) if part[0].isdigit() else _flag(part)
        if opened and word.endswith(")"):
            return bits
        if words.peek() in ("|", ","):
            words.take()
            continue
        if not opened:
            return bits


def _flag(word: str) -> int:
    if word not in _FLAG_BITS:
        raise NotUnderstood
    return _FLAG_BITS[word]


# ---- connections ---------------------------------------------------------------------------------------------------


def ct(words: Words) -> Many:
    """`ct state`, `ct status`, `ct mark`, `ct direction`."""
    words.expect("ct")
    what = words.take()
    if what == "mark":
        return (_mark(words, ConnMarkIs),)
    if what == "direction":
        negate = negation(words)
        return (CtDirection((words.take() == "original") is not negate),)
    if what not in ("state", "status"):
        raise NotUnderstood
    exact = words.peek() == "!="
    negate = words.peek() in ("!", "!=")
    if negate:
        words.take()
    if words.peek() == "&":
        raise NotUnderstood
    values = _word_list(words)
    if not all(value.isalpha() or value == "seen-reply" for value in values):
        raise NotUnderstood
    if what == "state":
        return (CtState(values, negate),)
    if exact:
        # The whole status word is compared, which is another question than one bit.
        raise NotUnderstood
    return (CtStatus(values, negate),)


def _word_list(words: Words) -> tuple[str, ...]:
    braced = words.peek() == "{"
    if braced:
        words.take()
    values = [words.take()]
    while words.peek() == ",":
        words.take()
        values.append(words.take())
    if braced:
        words.expect("}")
    return tuple(values)


# ---- marks and draws -----------------------------------------------------------------------------------------------


def mark(words: Words) -> Many:
    """What stands behind `meta mark`."""
    return (_mark(words, MarkIs),)


def _mark(words: Words, kind: type[MarkIs] | type[ConnMarkIs]) -> Expression:
    mask = 0xFFFFFFFF
    if words.peek() in ("&", "and"):
        words.take()
        mask = words.number()
    negate = negation(words)
    if words.peek() == "{":
        values = _word_list(words)
        return AnyOf(tuple((kind(int(value, 0), mask),) for value in values), negate)
    value, slash, length = words.take().partition("/")
    if slash:
        # nft lists a mask whose ones all lead as the length of a prefix.
        mask &= 0xFFFFFFFF << (32 - int(length)) & 0xFFFFFFFF
    if not value[:1].isdigit() or words.peek() in ("|", "^", "&", "-") or "-" in value:
        raise NotUnderstood
    return kind(int(value, 0), mask, negate)


_DRAWN = 0x80000000


def random(words: Words) -> Many:
    """`meta random & 2147483647 < N`, which nft makes of iptables' statistic."""
    words.expect("&")
    if words.number() != _DRAWN - 1:
        raise NotUnderstood
    words.expect("<")
    share = words.number() / _DRAWN
    return (RandomMatch(f"{share:.11f}"),)


# ---- addresses of this machine -------------------------------------------------------------------------------------

_TYPES = frozenset(
    ("unspec", "unicast", "local", "broadcast", "anycast", "multicast", "blackhole", "unreachable", "prohibit")
)


def fib(words: Words) -> Many:
    """`fib daddr type local` and other types; what depends on routes and interfaces is a circumstance."""
    start = words.position
    words.expect("fib")
    field = {"saddr": Field.SADDR, "daddr": Field.DADDR}.get(words.take())
    where = []
    while words.peek() == ".":
        words.take()
        where.append(words.take())
    result = words.take()
    if field is None or result not in ("type", "oif", "oifname"):
        raise NotUnderstood
    if words.peek() == "vmap":
        raise NotUnderstood
    negate = negation(words)
    if result != "type":
        words.take()
        return (UndecidableMatch("the routes", words.slice(start, words.position)),)
    types = _word_list(words)
    if not _TYPES.issuperset(types):
        raise NotUnderstood
    plain = IsLocal(field, negate) if types == ("local",) else AddressType(field, types, negate)
    if not where:
        return (plain,)
    text = words.slice(start, words.position)
    if negate:
        return (UndecidableMatch("which interface has the address", text),)
    return plain, UndecidableMatch("which interface has the address", text)


# ---- ICMP ----------------------------------------------------------------------------------------------------------


def icmp(words: Words) -> Many:
    """`icmp type echo-request`; the protocol is part of the match."""
    protocol = words.take()
    six = protocol == "icmpv6"
    if words.take() != "type" or words.peek() == "vmap":
        raise NotUnderstood
    negate = negation(words)
    kinds = _NFT_ICMP_6 if six else _NFT_ICMP
    types = tuple(int(word) if word.isdigit() else kinds[word] for word in _word_list(words) if _named(word, kinds))
    name = "ipv6-icmp" if six else "icmp"
    return Compare(Field.L4PROTO, (name,)), IcmpType(types, None, negate)


def _named(word: str, kinds: dict[str, int]) -> bool:
    if not word.isdigit() and word not in kinds:
        raise NotUnderstood
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


# ---- what no dump tells --------------------------------------------------------------------------------------------

_ABOUT: dict[tuple[str, ...], tuple[str, bool, bool]] = {
    ("meta", "skuid"): ("which process sends", False, True),
    ("meta", "skgid"): ("which process sends", False, True),
    ("meta", "cgroup"): ("which process sends", False, True),
    ("meta", "pkttype"): ("how the link addressed it", True, True),
    ("meta", "length"): ("the packet's length", True, True),
    ("meta", "priority"): ("the packet's class", True, True),
    ("meta", "cpu"): ("the processor that takes it", True, True),
    ("meta", "time"): ("the time of day", True, True),
    ("meta", "hour"): ("the time of day", True, True),
    ("meta", "day"): ("the time of day", True, True),
    ("meta", "iifgroup"): ("the group of the interface", True, True),
    ("meta", "oifgroup"): ("the group of the interface", True, True),
    ("meta", "iiftype"): ("the kind of the interface", True, True),
    ("meta", "ibrname"): ("which port of a bridge it passes", True, False),
    ("meta", "obrname"): ("which port of a bridge it passes", True, False),
    ("ip", "ttl"): ("the packet's time to live", True, True),
    ("ip6", "hoplimit"): ("the packet's hop limit", True, True),
    ("ip", "dscp"): ("the packet's class of service", True, True),
    ("ip6", "dscp"): ("the packet's class of service", True, True),
    ("ip", "length"): ("the packet's length", True, True),
    ("ip", "id"): ("a number that the sender draws", True, True),
    ("ip", "frag-off"): ("whether it is a fragment", True, True),
    ("ip", "ecn"): ("the packet's congestion bits", True, True),
    ("ether", "saddr"): ("the sender's hardware address", True, False),
    ("ether", "daddr"): ("the hardware address that it came to", True, False),
    ("ct", "expiration"): ("how old the connection is", True, True),
    ("ct", "helper"): ("helpers of connection tracking", True, True),
    ("ct", "zone"): ("the connection's zone", True, True),
    ("ct", "bytes"): ("how much the connection has carried", True, True),
    ("ct", "packets"): ("how much the connection has carried", True, True),
    ("ct", "count"): ("how many connections there are", True, True),
    ("socket", "transparent"): ("whether a socket waits for it", True, True),
    ("socket", "mark"): ("whether a socket waits for it", True, True),
    ("rt", "ipsec"): ("IPsec policies", True, True),
    ("meta", "ipsec"): ("IPsec policies", True, True),
}


def circumstance(words: Words) -> Many:
    """A match of which no dump tells whether it matches: what it asks, and the value."""
    about = _ABOUT.get((words.peek(), words.peek(1)))
    if about is None or words.peek(2) == "set":
        raise NotUnderstood
    start = words.position
    words.position += 2
    negate = False
    if words.peek() in _COMPARISONS:
        negate = words.take() not in ("==", ">", "<", ">=", "<=")
    if words.peek() == "{":
        depth = 0
        while True:
            word = words.take()
            depth += (word == "{") - (word == "}")
            if not depth:
                break
    elif words.peek() not in _ENDS and not words.done:
        words.take()
        while words.peek() in (",", "/", "bytes", "mbytes", "kbytes"):
            words.take()
            if words.peek() and words.peek() not in _ENDS:
                words.take()
    subject, forwarded, made_here = about
    if negate:
        forwarded = made_here = True
    return (UndecidableMatch(subject, words.slice(start, words.position), forwarded, made_here),)


def limit(words: Words) -> Many:
    """`limit rate [over] 5/second [burst 5 packets]`, `limit name "x"`, `quota …`."""
    start = words.position
    words.take()
    if words.peek() == "name":
        words.position += 2
    else:
        words.take()
        while (
            words.peek() in ("over", "until", "burst", "packets", "bytes", "kbytes", "mbytes", "used")
            or words.peek()[:1].isdigit()
        ):
            words.take()
    return (UndecidableMatch("how many packets came before", words.slice(start, words.position)),)


READERS: dict[str, Callable[[Words], Many]] = {
    "fib": fib,
    "icmp": icmp,
    "icmpv6": icmp,
    "limit": limit,
    "quota": limit,
    "socket": circumstance,
    "rt": circumstance,
    "ether": circumstance,
}
