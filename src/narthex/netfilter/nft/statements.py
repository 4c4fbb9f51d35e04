"""Statements of nft: verdicts, NAT, marks, set updates, and statements that do not affect the path of a packet."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from narthex.model import split_port
from narthex.netfilter import ast
from narthex.netfilter.nft.cursor import HASHES, TokenCursor, UnknownSyntax
from narthex.netfilter.xtables.values import destination_range

Expressions = tuple[ast.Expression, ...]

_ALL = 0xFFFFFFFF
_NAT_FLAGS = ("fully-random", "random", "persistent")
VERDICTS: dict[str, ast.Verdict] = {"accept": ast.Accept(), "drop": ast.DropPacket(), "return": ast.Return()}


def verdict(cursor: TokenCursor) -> ast.Verdict:
    """Read a verdict of a map. Raises UnknownSyntax."""
    word = cursor.take()
    if word == "goto":
        return ast.Goto(cursor.take())
    if word == "jump":
        return ast.Jump(cursor.take())
    if word not in VERDICTS:
        raise UnknownSyntax
    return VERDICTS[word]


def _call(kind: type[ast.Jump] | type[ast.Goto]) -> Callable[[TokenCursor], Expressions]:
    def read(cursor: TokenCursor) -> Expressions:
        """Read the keyword and its argument."""
        cursor.take()
        return (kind(cursor.take()),)

    return read


def _constant(*expressions: ast.Expression) -> Callable[[TokenCursor], Expressions]:
    def read(cursor: TokenCursor) -> Expressions:
        """Skip the keyword and return the expressions that it stands for."""
        cursor.take()
        return expressions

    return read


def _reject(cursor: TokenCursor) -> Expressions:
    cursor.expect("reject")
    if not cursor.take_if("with"):
        return (ast.RejectPacket(),)
    if cursor.take() == "tcp":
        cursor.expect("reset")
        return (ast.RejectPacket("tcp reset"),)
    cursor.take_if("type")
    return (ast.RejectPacket(cursor.take()),)


# ---- NAT -----------------------------------------------------------------------------------------------------------


def _flags(cursor: TokenCursor) -> bool:
    fully = False
    while cursor.peek() in (*_NAT_FLAGS, ","):
        fully = cursor.take() == "fully-random" or fully
    return fully


def _masquerade(cursor: TokenCursor) -> Expressions:
    cursor.expect("masquerade")
    if cursor.take_if("to") and not cursor.take().startswith(":"):
        raise UnknownSyntax
    return (ast.Masquerade(_flags(cursor)),)


def _redirect(cursor: TokenCursor) -> Expressions:
    cursor.expect("redirect")
    if not cursor.take_if("to"):
        _flags(cursor)
        return (ast.RedirectRange(),)
    first, dash, last = cursor.take().lstrip(":").partition("-")
    _flags(cursor)
    if not dash:
        return (ast.Redirect(int(first)),)
    return (ast.RedirectRange(int(first), int(last)),)


def _snat(cursor: TokenCursor) -> Expressions:
    cursor.expect("snat")
    cursor.take_if("ip", "ip6")
    cursor.expect("to")
    first, last, *_ = destination_range(cursor.take())
    fully_random = _flags(cursor)
    if not first:
        raise UnknownSyntax
    return (ast.Snat(first, last, fully_random),)


def _dnat(cursor: TokenCursor) -> Expressions:
    """Read `dnat to ADDRESS[:PORT]`, or to a range, the value of a map, or a random choice."""
    cursor.expect("dnat")
    cursor.take_if("ip", "ip6")
    cursor.expect("to")
    if cursor.peek() in ("numgen", *HASHES) and _has_braces(cursor):
        return (_random_dnat(cursor),)
    if cursor.peek(1) not in ("", "comment", *_NAT_FLAGS):
        key = cursor.key()
        cursor.expect("map")
        if not cursor.peek().startswith("@"):
            raise UnknownSyntax
        return (ast.DnatMap(key, cursor.take()[1:]),)
    text = cursor.take()
    flagged = cursor.peek() in _NAT_FLAGS
    _flags(cursor)
    if not text[0].isalnum() and text[0] not in "[:":
        raise UnknownSyntax
    if "-" in text or flagged or text.startswith(":"):
        return (ast.DnatRange(*destination_range(text)),)
    return (_endpoint(text),)


def _endpoint(text: str) -> ast.Dnat:
    if text.startswith("[") and text.endswith("]"):
        return ast.Dnat(text[1:-1])
    if text.startswith("[") or text.count(":") == 1:
        return ast.Dnat(*split_port(text))
    return ast.Dnat(text)


# ---- random numbers ---------------------------------------------------------------------------------------------------------


_LONGEST_KEY = 64
"""Tokens of a key before `map`; the kernel's keys have at most 16 components."""


def _has_braces(cursor: TokenCursor) -> bool:
    """Return True if an anonymous map follows, not a named one."""
    ahead = 0
    while (word := cursor.peek(ahead)) not in ("", "map", "vmap"):
        ahead += 1
        if ahead > _LONGEST_KEY:
            return False
        if word.startswith("@"):
            return False
    return cursor.peek(ahead + 1) == "{"


def drawn(cursor: TokenCursor) -> tuple[int, int, ast.HashedFields | None]:
    """Read `numgen random mod N [offset M]`, or a hash. Return N, M, and the hash.

    `inc` takes the numbers in turn, which over many connections gives the same shares.
    """
    if cursor.peek() in HASHES:
        by = cursor.hashed()
        return by.mod, by.offset, by
    cursor.expect("numgen")
    if cursor.take() not in ("random", "inc"):
        raise UnknownSyntax
    cursor.expect("mod")
    mod = cursor.number()
    return mod, cursor.number() if cursor.take_if("offset") else 0, None


def _random_dnat(cursor: TokenCursor) -> ast.RandomMap:
    """Read `numgen random mod 2 map { 0 : 10.0.0.1, 1 : 10.0.0.2 . 80 }`, or the same with a hash."""
    mod, offset, by = drawn(cursor)
    cursor.expect("map")

    def endpoint() -> ast.Dnat:
        """Read one value of the map: `address . port`, or an address alone."""
        address = cursor.take()
        if cursor.take_if("."):
            return ast.Dnat(address, cursor.number())
        return _endpoint(address)

    return ast.RandomMap(mod, arms(cursor, mod, offset, endpoint), by)


def arms(
    cursor: TokenCursor, mod: int, offset: int, read: Callable[[], ast.Verdict | ast.Dnat]
) -> tuple[tuple[int, int, ast.Verdict | ast.Dnat], ...]:
    """Read `{ 0 : …, 1-3 : … }` as (first, last, action), without the offset. Raises UnknownSyntax."""
    found: list[tuple[int, int, ast.Verdict | ast.Dnat]] = []
    for _ in cursor.items():
        first, dash, last = cursor.take().partition("-")
        cursor.expect(":")
        action = read()
        low, high = int(first) - offset, int(last if dash else first) - offset
        if not 0 <= low <= high < mod:
            raise UnknownSyntax
        found.append((low, high, action))
    found.sort(key=lambda arm: arm[0])
    if any(before[1] >= after[0] for before, after in itertools.pairwise(found)):
        raise UnknownSyntax
    return tuple(found)


# ---- marks ---------------------------------------------------------------------------------------------------------


def set_mark(cursor: TokenCursor, connection: bool) -> Expressions:
    """Read the part after `meta mark set` or `ct mark set`."""
    own, other = ("ct", "meta") if connection else ("meta", "ct")
    if cursor.peek() in ("meta", "ct", "mark"):
        source = cursor.take()
        if source != "mark":
            cursor.expect("mark")
        elif connection:
            raise UnknownSyntax
        return (_mark_change(cursor, connection, source in (own, "mark"), source == other),)
    return (ast.SetMark(cursor.number(), _ALL, connection),)


def _mark_change(cursor: TokenCursor, connection: bool, same: bool, copied: bool) -> ast.Expression:
    operator = cursor.peek()
    if operator not in ("|", "or", "^", "xor", "&", "and"):
        if copied:
            return ast.CopyMark(connection)
        raise UnknownSyntax
    cursor.take()
    bits = cursor.number()
    further = cursor.peek()
    if copied:
        if operator in ("&", "and") and further not in ("|", "^", "or", "xor"):
            return ast.CopyMark(connection, bits)
        raise UnknownSyntax
    if not same:
        raise UnknownSyntax
    if operator in ("|", "or"):
        return ast.SetMark(bits, bits, True) if connection else ast.MarkOr(bits)
    if operator in ("^", "xor"):
        return ast.SetMark(bits, 0, True) if connection else ast.MarkXor(bits)
    value = 0
    if cursor.take_if("|", "^", "or", "xor"):
        value = cursor.number()
        if further in ("|", "or"):
            # `mark & A | B`: the bits of B are cleared before they are set.
            return ast.SetMark(value, ~bits & _ALL | value, connection)
    return ast.SetMark(value, ~bits & _ALL, connection)


# ---- sets and ignored statements ----------------------------------------------------------------------------------


def _update(cursor: TokenCursor) -> Expressions:
    """Read `update @set { KEY [timeout T] }`. T is ignored in favor of the timeout of the set."""
    cursor.take()
    name = cursor.take()
    if not name.startswith("@"):
        raise UnknownSyntax
    cursor.expect("{")
    key = cursor.key()
    if not all(isinstance(part, ast.Field) for part in key):
        raise UnknownSyntax
    if cursor.take_if("timeout"):
        cursor.take()
    cursor.expect("}")
    return (ast.UpdateSet(key, name[1:]),)


def _counter(cursor: TokenCursor) -> Expressions:
    cursor.expect("counter")
    if cursor.take_if("packets"):
        cursor.number()
        cursor.expect("bytes")
        cursor.number()
    elif cursor.peek() == "name":
        cursor.position += 2
    return (ast.Counter(),)


_LOG_OPTIONS = ("prefix", "level", "group", "snaplen", "queue-threshold", "flags")


def _log(cursor: TokenCursor) -> Expressions:
    start = cursor.position
    cursor.expect("log")
    while cursor.peek() in _LOG_OPTIONS:
        if cursor.take() == "flags" and cursor.peek() in ("tcp", "ip"):
            cursor.take()
        cursor.take()
        while cursor.peek() == ",":
            cursor.position += 2
    return (ast.IgnoredStatement(cursor.slice(start, cursor.position)),)


def _ignored(count: int) -> Callable[[TokenCursor], Expressions]:
    """Return a reader of an ignored statement of `count` words."""

    def read(cursor: TokenCursor) -> Expressions:
        """Read the statement's tokens and keep their text."""
        start = cursor.position
        for _ in range(count):
            cursor.take()
        return (ast.IgnoredStatement(cursor.slice(start, cursor.position)),)

    return read


def _xt(cursor: TokenCursor) -> Expressions:
    """Read an iptables extension that nft cannot translate, of which it prints little more than the name."""
    start = cursor.position
    cursor.expect("xt")
    kind = cursor.take()
    name = cursor.take().strip('"')
    if kind == "match" and name == "comment":
        return ()
    if kind == "target" and name in ("LOG", "NFLOG", "TRACE", "TCPMSS"):
        return (ast.IgnoredStatement(cursor.slice(start, cursor.position)),)
    if kind == "target" and name == "MASQUERADE":
        return (ast.Masquerade(fully_random=False),)
    raise UnknownSyntax


READERS: dict[str, Callable[[TokenCursor], Expressions]] = {
    "jump": _call(ast.Jump),
    "goto": _call(ast.Goto),
    "accept": _constant(ast.Accept()),
    "drop": _constant(ast.DropPacket()),
    "return": _constant(ast.Return()),
    "continue": _constant(),
    "reject": _reject,
    "masquerade": _masquerade,
    "redirect": _redirect,
    "snat": _snat,
    "dnat": _dnat,
    "notrack": _constant(ast.NoTrack()),
    "update": _update,
    "add": _update,
    "counter": _counter,
    "log": _log,
    "flow": _ignored(3),
    "xt": _xt,
}
