"""One rule in nft's words to typed expressions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from narthex.netfilter.ast import (
    AnyOf,
    Atom,
    Compare,
    Expression,
    Field,
    Goto,
    IgnoredStatement,
    InlineVerdictMap,
    InSet,
    Key,
    PortRange,
    RandomGoto,
    RandomMap,
    Rule,
    Slot,
    Unknown,
    Verdict,
    VerdictMap,
)
from narthex.netfilter.netlink.elements import networks_between
from narthex.netfilter.nft import matches as nft_matches
from narthex.netfilter.nft import statements as nft_statements
from narthex.netfilter.nft.matches import Many, negation
from narthex.netfilter.nft.words import NotUnderstood, Words, canonical

_RESUME = frozenset(
    {"accept", "drop", "return", "jump", "goto", "reject", "counter", "masquerade", "dnat", "comment", "log", "snat"}
)
"""Words that begin something known wherever they stand, so that reading can go on behind an unknown part."""
_PORTS = (Field.DPORT, Field.SPORT, Field.ORIG_DPORT, Field.ORIG_SPORT)
_ADDRESSES = (Field.SADDR, Field.DADDR, Field.ORIG_SADDR, Field.ORIG_DADDR)
_PORT_RANGE = re.compile(r"(\d+)-(\d+)")
_NAT = ("dnat", "snat")


def parse_rule(words: Words) -> Rule:
    """The rule; parts that are not known become one `Unknown` each."""
    expressions: list[Expression] = []
    comment = ""
    while not words.done:
        start = words.position
        if words.peek() == "comment":
            words.take()
            comment = words.take().strip('"') if not words.done else ""
            continue
        try:
            expressions += _READERS.get(words.peek(), _field_match)(words)
        except (NotUnderstood, ValueError):
            words.position = start
            _pass_over(words)
            expressions.append(Unknown(words.slice(start, words.position)))
    return Rule(tuple(expressions), comment)


def _pass_over(words: Words) -> None:
    """Go on to the next word that begins something known, but at least one word, and never into braces."""
    depth = 0
    while not words.done:
        word = words.take()
        depth += (word == "{") - (word == "}")
        following = words.peek()
        # `dnat` is a status bit too.
        if not depth and following in _RESUME and (following not in _NAT or words.peek(1) in ("to", "ip", "ip6")):
            return


# ---- a key and what it is compared with ----------------------------------------------------------------------------


def _field_match(words: Words) -> Many:
    """A key, then what it is compared with."""
    if words.peek() == "numgen":
        return (_spread(words),)
    try:
        return _compared(words)
    except NotUnderstood:
        return nft_matches.circumstance(words)


def _compared(words: Words) -> Many:
    start = words.position
    try:
        key = words.key()
    except NotUnderstood:
        words.position = start
        raise
    negate = negation(words)
    if words.peek().startswith("@"):
        return (InSet(key, words.take()[1:], negate),)
    if words.peek() == "vmap" and not negate:
        words.take()
        if words.peek().startswith("@"):
            return (VerdictMap(key, words.take()[1:]),)
        return (_switch(lambda: _ways(key, words), words),)
    if any(isinstance(part, Slot) for part in key):
        raise NotUnderstood
    if words.peek() in ("<", ">", "<=", ">="):
        return (_ordered(key, words),)
    if len(key) == 1 and isinstance(key[0], Field):
        return (_compare(key[0], words, negate),)
    words.expect("{")
    ways: list[Many] = []
    while words.peek() != "}":
        ways += _ways(key, words)
        if words.peek() == ",":
            words.take()
    words.expect("}")
    return (AnyOf(tuple(ways), negate),)


def _ordered(key: Key, words: Words) -> Expression:
    if len(key) != 1 or key[0] not in _PORTS:
        raise NotUnderstood
    operator, number = words.take(), words.number()
    first, last = {
        "<": (0, number - 1),
        "<=": (0, number),
        ">": (number + 1, 65535),
        ">=": (number, 65535),
    }[operator]
    assert isinstance(key[0], Field)
    return PortRange(key[0], first, last)


def _ways(key: Key, words: Words) -> list[Many]:
    """One element of a set in braces, part by part, as matches that all have to hold; a range may take several."""
    parts: list[tuple[Expression, ...]] = []
    for number, field in enumerate(key):
        if number:
            words.expect(".")
        if not isinstance(field, Field):
            raise NotUnderstood
        parts.append((_one(field, words.take()),))
    return [tuple(itertools.chain(*parts))]


def _one(field: Field, text: str) -> Expression:
    """A field compared with one value or range."""
    ports = _PORT_RANGE.fullmatch(text)
    if ports and field in _PORTS:
        return PortRange(field, int(ports[1]), int(ports[2]))
    if field in _ADDRESSES and "-" in text:
        first, _, last = text.partition("-")
        return Compare(field, networks_between(first, last))
    return Compare(field, (_value(field, text),))


def _compare(field: Field, words: Words, negate: bool) -> Expression:
    if words.peek() != "{":
        one = _one(field, words.take())
        if isinstance(one, PortRange):
            return PortRange(field, one.first, one.last, negate)
        assert isinstance(one, Compare)
        return Compare(field, one.values, negate)
    words.take()
    found = [_one(field, words.take())]
    while words.peek() == ",":
        words.take()
        if words.peek() != "}":
            found.append(_one(field, words.take()))
    words.expect("}")
    if any(isinstance(one, PortRange) for one in found):
        return AnyOf(tuple((one,) for one in found), negate)
    values = tuple(value for one in found if isinstance(one, Compare) for value in one.values)
    return Compare(field, values, negate)


def _value(field: Field, text: str) -> Atom:
    if field in _PORTS:
        if not text.isdigit():
            raise NotUnderstood
        return int(text)
    if field in (Field.IIFNAME, Field.OIFNAME):
        return text.strip('"')
    if text.startswith(("@", "$", "<", ">", "&", "|", "{")) or ("-" in text and field is not Field.L4PROTO):
        raise NotUnderstood
    return canonical(text)


# ---- maps in braces ------------------------------------------------------------------------------------------------


def _switch(ways: Callable[[], list[Many]], words: Words) -> InlineVerdictMap:
    """`KEY vmap { VALUE : VERDICT, … }`."""
    words.expect("{")
    found: list[tuple[Many, Verdict]] = []
    while words.peek() != "}":
        mine = ways()
        while words.peek() == "counter":
            nft_statements.READERS["counter"](words)
        words.expect(":")
        verdict = nft_statements.verdict(words)
        found += ((way, verdict) for way in mine)
        if words.peek() == ",":
            words.take()
    words.expect("}")
    return InlineVerdictMap(tuple(found))


def _spread(words: Words) -> Expression:
    """`numgen random mod N vmap { 0 : goto a, 1 : goto b }`, or in a named map."""
    if words.peek(1) == "random":
        start = words.position
        key = words.key_or_none()
        if key is not None and words.peek() == "vmap" and words.peek(1).startswith("@"):
            words.take()
            return VerdictMap(key, words.take()[1:])
        words.position = start
    mod, offset = nft_statements.numbers(words)
    words.expect("vmap")
    found = nft_statements.arms(words, mod, offset, lambda: nft_statements.verdict(words))
    chains = [what.chain for _, _, what in found if isinstance(what, Goto)]
    if len(chains) == len(found) == mod:
        return RandomGoto(tuple(chains))
    return RandomMap(mod, found)


def _state_switch(words: Words) -> Many:
    """`ct state vmap { established : accept, … }`."""
    words.expect("ct")
    words.expect("state")
    words.expect("vmap")

    def ways() -> list[Many]:
        from narthex.netfilter.ast import CtState

        states = [words.take()]
        while words.peek() == "," and words.peek(1) in _STATES and words.peek(2) in (",", ":"):
            words.take()
            states.append(words.take())
        return [(CtState((state,)),) for state in states]

    return (_switch(ways, words),)


_STATES = ("new", "established", "related", "invalid", "untracked")


# ---- words that begin a match --------------------------------------------------------------------------------------


def _transport(words: Words) -> Many:
    """`tcp dport 80`: the protocol is part of the match."""
    protocol = words.take()
    what = words.take()
    if what == "flags" and protocol == "tcp":
        return nft_matches.tcp_flags(words)
    if what == "option":
        return _option(words)
    field = {"dport": Field.DPORT, "sport": Field.SPORT}.get(what)
    if field is None or words.peek() in (".", "<", ">", "<=", ">=", "&"):
        raise NotUnderstood
    ours = Compare(Field.L4PROTO, (protocol,))
    if words.peek() == "vmap" and not words.peek(1).startswith("@"):
        words.take()
        return ours, _switch(lambda: _ways((field,), words), words)
    if words.peek() == "vmap":
        words.take()
        return ours, VerdictMap((field,), words.take()[1:])
    negate = negation(words)
    if words.peek().startswith("@"):
        return ours, InSet((field,), words.take()[1:], negate)
    return ours, _compare(field, words, negate)


def _option(words: Words) -> Many:
    """`tcp option maxseg size set rt mtu`."""
    words.position -= 2
    start = words.position
    if [words.peek(ahead) for ahead in range(5)] != ["tcp", "option", "maxseg", "size", "set"]:
        raise NotUnderstood
    words.position += 5
    if words.take() == "rt":
        words.take()
    return (IgnoredStatement(words.slice(start, words.position)),)


def _ct(words: Words) -> Many:
    if words.peek(1) == "original":
        return _compared(words)
    if words.peek(1) == "state" and words.peek(2) == "vmap":
        return _state_switch(words)
    if words.peek(1) == "mark" and words.peek(2) == "set":
        words.position += 3
        return nft_statements.set_mark(words, connection=True)
    if words.peek(2) == "set":
        start = words.position
        words.position += 4
        return (IgnoredStatement(words.slice(start, words.position)),)
    if words.peek(1) in ("state", "status", "mark", "direction"):
        return nft_matches.ct(words)
    return nft_matches.circumstance(words)


def _meta(words: Words) -> Many:
    """Marks, draws and what is set; other `meta` words are fields."""
    what = words.peek(1)
    if what == "mark":
        words.take()
        return _mark(words)
    if what == "random":
        words.position += 2
        return nft_matches.random(words)
    if words.peek(2) == "set":
        start = words.position
        words.position += 4
        return (IgnoredStatement(words.slice(start, min(words.position, words.length))),)
    return _field_match(words)


def _mark(words: Words) -> Many:
    words.expect("mark")
    if words.peek() == "set":
        words.take()
        return nft_statements.set_mark(words, connection=False)
    return nft_matches.mark(words)


_READERS: dict[str, Callable[[Words], Many]] = {
    **nft_matches.READERS,
    **nft_statements.READERS,
    "ct": _ct,
    "meta": _meta,
    "mark": _mark,
    "tcp": _transport,
    "udp": _transport,
    "sctp": _transport,
}
