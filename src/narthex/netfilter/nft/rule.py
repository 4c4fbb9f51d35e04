"""Parser for one nft rule."""

from __future__ import annotations

import re
from collections.abc import Callable

from narthex.model import networks_between
from narthex.netfilter import ast
from narthex.netfilter.nft import matches as nft_matches
from narthex.netfilter.nft import statements as nft_statements
from narthex.netfilter.nft.cursor import HASHES, TokenCursor, UnknownSyntax, canonical
from narthex.netfilter.nft.matches import Expressions, negation

_RESUME = frozenset(
    {"accept", "drop", "return", "jump", "goto", "reject", "counter", "masquerade", "dnat", "comment", "log", "snat"}
)
"""Words that start a known expression anywhere, so that parsing can continue after an unknown part."""
_PORTS = (ast.Field.DPORT, ast.Field.SPORT, ast.Field.ORIG_DPORT, ast.Field.ORIG_SPORT)
_ADDRESSES = (ast.Field.SADDR, ast.Field.DADDR, ast.Field.ORIG_SADDR, ast.Field.ORIG_DADDR)
_PORT_RANGE = re.compile(r"(\d+)-(\d+)")
_NAT = ("dnat", "snat")


def parse_rule(cursor: TokenCursor) -> ast.Rule:
    """Parse a rule. Each unknown part becomes one `Unknown`."""
    expressions: list[ast.Expression] = []
    comment = ""
    while not cursor.done:
        start = cursor.position
        if cursor.take_if("comment"):
            comment = cursor.take().strip('"') if not cursor.done else ""
            continue
        try:
            expressions += _READERS.get(cursor.peek(), _field_match)(cursor)
        except (UnknownSyntax, ValueError):
            cursor.position = start
            _pass_over(cursor)
            expressions.append(ast.Unknown(cursor.slice(start, cursor.position)))
    return ast.Rule(tuple(expressions), comment)


def _pass_over(cursor: TokenCursor) -> None:
    """Skip at least one word, up to the next word outside of braces that starts a known expression."""
    depth = 0
    while not cursor.done:
        word = cursor.take()
        depth += (word == "{") - (word == "}")
        following = cursor.peek()
        # `dnat` is also a status bit.
        if not depth and following in _RESUME and (following not in _NAT or cursor.peek(1) in ("to", "ip", "ip6")):
            return


# ---- comparisons of a key ----------------------------------------------------------------------------------------


def _field_match(cursor: TokenCursor) -> Expressions:
    """Read a comparison of a key, or a match that cannot be decided."""
    if cursor.peek() == "numgen" or (cursor.peek() in HASHES and "vmap" in cursor.texts()):
        return (_drawn(cursor),)
    try:
        return _compared(cursor)
    except UnknownSyntax:
        return nft_matches.undecidable(cursor)


def _compared(cursor: TokenCursor) -> Expressions:
    start = cursor.position
    try:
        key = cursor.key()
    except UnknownSyntax:
        cursor.position = start
        raise
    negate = negation(cursor)
    if cursor.peek().startswith("@"):
        return (ast.InSet(key, cursor.take()[1:], negate),)
    if not negate and cursor.take_if("vmap"):
        if cursor.peek().startswith("@"):
            return (ast.VerdictMap(key, cursor.take()[1:]),)
        return (_inline_map(lambda: [_alternative(key, cursor)], cursor),)
    if not all(isinstance(part, ast.Field) for part in key):
        cursor.position = start
        raise UnknownSyntax
    if cursor.peek() in ("<", ">", "<=", ">="):
        return (_ordered(key, cursor),)
    if len(key) == 1 and isinstance(key[0], ast.Field):
        return (_compare(key[0], cursor, negate),)
    alternatives = tuple(_alternative(key, cursor) for _ in cursor.items())
    return (ast.AnyOf(alternatives, negate),)


def _ordered(key: ast.Key, cursor: TokenCursor) -> ast.Expression:
    if len(key) != 1 or key[0] not in _PORTS:
        raise UnknownSyntax
    operator, number = cursor.take(), cursor.number()
    first, last = {"<": (0, number - 1), "<=": (0, number), ">": (number + 1, 65535), ">=": (number, 65535)}[operator]
    assert isinstance(key[0], ast.Field)
    return ast.PortRange(key[0], first, last)


def _alternative(key: ast.Key, cursor: TokenCursor) -> Expressions:
    """Read one element of an anonymous set as matches that must all match."""
    parts: list[ast.Expression] = []
    for number, field in enumerate(key):
        if number:
            cursor.expect(".")
        if not isinstance(field, ast.Field):
            raise UnknownSyntax
        parts.append(_comparison(field, cursor.take()))
    return tuple(parts)


def _comparison(field: ast.Field, text: str) -> ast.Expression:
    """Return the comparison of a field with one value or range."""
    ports = _PORT_RANGE.fullmatch(text)
    if ports and field in _PORTS:
        return ast.PortRange(field, int(ports[1]), int(ports[2]))
    if field in _ADDRESSES and "-" in text:
        first, _, last = text.partition("-")
        return ast.Compare(field, networks_between(first, last))
    return ast.Compare(field, (_value(field, text),))


def _compare(field: ast.Field, cursor: TokenCursor, negate: bool) -> ast.Expression:
    if cursor.peek() != "{":
        one = _comparison(field, cursor.take())
        if isinstance(one, ast.PortRange):
            return ast.PortRange(field, one.first, one.last, negate)
        assert isinstance(one, ast.Compare)
        return ast.Compare(field, one.values, negate)
    found = [_comparison(field, cursor.take()) for _ in cursor.items()]
    if not found:
        raise UnknownSyntax
    if any(isinstance(one, ast.PortRange) for one in found):
        return ast.AnyOf(tuple((one,) for one in found), negate)
    values = tuple(value for one in found if isinstance(one, ast.Compare) for value in one.values)
    return ast.Compare(field, values, negate)


def _value(field: ast.Field, text: str) -> ast.Atom:
    if field in _PORTS:
        if not text.isdigit():
            raise UnknownSyntax
        return int(text)
    if field in (ast.Field.IIFNAME, ast.Field.OIFNAME):
        return text.strip('"')
    if text.startswith(("@", "$", "<", ">", "&", "|", "{")) or ("-" in text and field is not ast.Field.L4PROTO):
        raise UnknownSyntax
    return canonical(text)


# ---- anonymous maps ------------------------------------------------------------------------------------------------


def _inline_map(read_key: Callable[[], list[Expressions]], cursor: TokenCursor) -> ast.InlineVerdictMap:
    """Read the map of `KEY vmap { VALUE : VERDICT, … }`. `read_key` reads the alternatives of one element."""
    arms: list[tuple[Expressions, ast.Verdict]] = []
    for _ in cursor.items():
        alternatives = read_key()
        while cursor.peek() == "counter":
            nft_statements.READERS["counter"](cursor)
        cursor.expect(":")
        verdict = nft_statements.verdict(cursor)
        arms += ((alternative, verdict) for alternative in alternatives)
    return ast.InlineVerdictMap(tuple(arms))


def _drawn(cursor: TokenCursor) -> ast.Expression:
    """Read `numgen random mod N vmap { 0 : goto a, 1 : goto b }`, or the same with a hash or a named map."""
    if cursor.peek() != "numgen" or cursor.peek(1) == "random":
        start = cursor.position
        key = cursor.key_or_none()
        if key is not None and cursor.peek() == "vmap" and cursor.peek(1).startswith("@"):
            cursor.take()
            return ast.VerdictMap(key, cursor.take()[1:])
        cursor.position = start
    mod, offset, by = nft_statements.drawn(cursor)
    cursor.expect("vmap")
    arms = nft_statements.arms(cursor, mod, offset, lambda: nft_statements.verdict(cursor))
    chains = [what.chain for _, _, what in arms if isinstance(what, ast.Goto)]
    if by is None and len(chains) == len(arms) == mod:
        return ast.RandomGoto(tuple(chains))
    return ast.RandomMap(mod, arms, by)


def _state_map(cursor: TokenCursor) -> Expressions:
    """Read `ct state vmap { established : accept, … }`."""
    cursor.expect("ct")
    cursor.expect("state")
    cursor.expect("vmap")

    def read_states() -> list[Expressions]:
        """Read the states that share a verdict; a comma before a name that is no state belongs to the map."""
        states = [cursor.take()]
        while cursor.peek() == "," and cursor.peek(1) in _STATES and cursor.peek(2) in (",", ":"):
            cursor.take()
            states.append(cursor.take())
        return [(ast.CtState((state,)),) for state in states]

    return (_inline_map(read_states, cursor),)


_STATES = ("new", "established", "related", "invalid", "untracked")


# ---- expressions by first word --------------------------------------------------------------------------------------


def _transport(cursor: TokenCursor) -> Expressions:
    """Read a match such as `tcp dport 80`, which includes the protocol."""
    protocol = cursor.take()
    name = cursor.take()
    if name == "flags" and protocol == "tcp":
        return nft_matches.tcp_flags(cursor)
    if name == "option":
        return _option(cursor)
    field = {"dport": ast.Field.DPORT, "sport": ast.Field.SPORT}.get(name)
    if field is None or cursor.peek() in (".", "<", ">", "<=", ">=", "&"):
        raise UnknownSyntax
    protocol_match = ast.Compare(ast.Field.L4PROTO, (protocol,))
    if cursor.take_if("vmap"):
        if cursor.peek().startswith("@"):
            return protocol_match, ast.VerdictMap((field,), cursor.take()[1:])
        return protocol_match, _inline_map(lambda: [_alternative((field,), cursor)], cursor)
    negate = negation(cursor)
    if cursor.peek().startswith("@"):
        return protocol_match, ast.InSet((field,), cursor.take()[1:], negate)
    return protocol_match, _compare(field, cursor, negate)


def _option(cursor: TokenCursor) -> Expressions:
    """Read `tcp option maxseg size set rt mtu`."""
    cursor.position -= 2
    start = cursor.position
    if [cursor.peek(ahead) for ahead in range(5)] != ["tcp", "option", "maxseg", "size", "set"]:
        raise UnknownSyntax
    cursor.position += 5
    if cursor.take() == "rt":
        cursor.take()
    return (ast.IgnoredStatement(cursor.slice(start, cursor.position)),)


def _ct(cursor: TokenCursor) -> Expressions:
    if cursor.peek(1) == "original":
        return _compared(cursor)
    if cursor.peek(1) == "state" and cursor.peek(2) == "vmap":
        return _state_map(cursor)
    if cursor.peek(1) == "mark" and cursor.peek(2) == "set":
        cursor.position += 3
        return nft_statements.set_mark(cursor, connection=True)
    if cursor.peek(2) == "set":
        start = cursor.position
        cursor.position += 4
        return (ast.IgnoredStatement(cursor.slice(start, cursor.position)),)
    if cursor.peek(1) in ("state", "status", "mark", "direction"):
        return nft_matches.ct(cursor)
    return nft_matches.undecidable(cursor)


def _meta(cursor: TokenCursor) -> Expressions:
    """Read marks, random numbers, and assignments. Other `meta` expressions are fields."""
    name = cursor.peek(1)
    if name == "mark":
        cursor.take()
        return _mark(cursor)
    if name == "random":
        cursor.position += 2
        return nft_matches.random(cursor)
    if cursor.peek(2) == "set":
        start = cursor.position
        cursor.position += 4
        return (ast.IgnoredStatement(cursor.slice(start, min(cursor.position, cursor.length))),)
    return _field_match(cursor)


def _mark(cursor: TokenCursor) -> Expressions:
    cursor.expect("mark")
    if cursor.take_if("set"):
        return nft_statements.set_mark(cursor, connection=False)
    return nft_matches.mark(cursor)


def _xt(cursor: TokenCursor) -> Expressions:
    """Read an extension of iptables that this nft could not decode: `xt match "recent"`, `xt target DNAT`."""
    cursor.expect("xt")
    kind, name = cursor.take(), cursor.take().strip('"')
    if kind not in ("match", "target", "watcher"):
        raise UnknownSyntax
    if (kind, name) == ("match", "comment"):
        return ()
    return (
        ast.Undecoded(f"the nft that printed the rules {ast.NOT_DECODED} the {kind} {name} of iptables in this rule"),
    )


_READERS: dict[str, Callable[[TokenCursor], Expressions]] = {
    **nft_matches.READERS,
    **nft_statements.READERS,
    "ct": _ct,
    "xt": _xt,
    "meta": _meta,
    "mark": _mark,
    "tcp": _transport,
    "udp": _transport,
    "sctp": _transport,
}
