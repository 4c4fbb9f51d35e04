"""Statements of nft: verdicts, rewriting, marks, and what only stands beside a packet's way."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from narthex.model.net import split_port
from narthex.netfilter.ast import (
    Accept,
    CopyMark,
    Counter,
    Dnat,
    DnatMap,
    DnatRange,
    DropPacket,
    Expression,
    Field,
    Goto,
    IgnoredStatement,
    Jump,
    MarkOr,
    MarkXor,
    Masquerade,
    NoTrack,
    RandomMap,
    Redirect,
    RedirectRange,
    RejectPacket,
    Return,
    SetMark,
    Slot,
    Snat,
    UpdateSet,
    Verdict,
)
from narthex.netfilter.nft.words import NotUnderstood, Words

Many = tuple[Expression, ...]

_ALL = 0xFFFFFFFF
_NAT_FLAGS = ("fully-random", "random", "persistent")
PLAIN: dict[str, Verdict] = {"accept": Accept(), "drop": DropPacket(), "return": Return()}


def verdict(words: Words) -> Verdict:
    """A verdict of a map. Raises NotUnderstood."""
    word = words.take()
    if word == "goto":
        return Goto(words.take())
    if word == "jump":
        return Jump(words.take())
    if word not in PLAIN:
        raise NotUnderstood
    return PLAIN[word]


def _target(kind: type[Jump] | type[Goto]) -> Callable[[Words], Many]:
    def read(words: Words) -> Many:
        words.take()
        return (kind(words.take()),)

    return read


def _word(*read: Expression) -> Callable[[Words], Many]:
    def reader(words: Words) -> Many:
        words.take()
        return read

    return reader


def _reject(words: Words) -> Many:
    words.expect("reject")
    if words.peek() != "with":
        return (RejectPacket(),)
    words.take()
    if words.take() == "tcp":
        words.expect("reset")
        return (RejectPacket("tcp reset"),)
    if words.peek() == "type":
        words.take()
    return (RejectPacket(words.take()),)


# ---- rewriting -----------------------------------------------------------------------------------------------------


def _flags(words: Words) -> bool:
    fully = False
    while words.peek() in (*_NAT_FLAGS, ","):
        fully = words.take() == "fully-random" or fully
    return fully


def _masquerade(words: Words) -> Many:
    words.expect("masquerade")
    if words.peek() == "to":
        words.take()
        if not words.take().startswith(":"):
            raise NotUnderstood
    return (Masquerade(_flags(words)),)


def _redirect(words: Words) -> Many:
    words.expect("redirect")
    if words.peek() != "to":
        _flags(words)
        return (RedirectRange(),)
    words.take()
    first, dash, last = words.take().lstrip(":").partition("-")
    _flags(words)
    if not dash:
        return (Redirect(int(first)),)
    return (RedirectRange(int(first), int(last)),)


def _snat(words: Words) -> Many:
    words.expect("snat")
    if words.peek() in ("ip", "ip6"):
        words.take()
    words.expect("to")
    first, last, *_ = _ends(words.take())
    _flags(words)
    if not first:
        raise NotUnderstood
    return (Snat(first, last),)


def _dnat(words: Words) -> Many:
    """`dnat to ADDRESS[:PORT]`, to a range, to what a map holds, or to one that is drawn."""
    words.expect("dnat")
    if words.peek() in ("ip", "ip6"):
        words.take()
    words.expect("to")
    if words.peek() == "numgen" and _has_braces(words):
        return (_drawn(words),)
    if words.peek(1) not in ("", "comment", *_NAT_FLAGS):
        key = words.key()
        words.expect("map")
        if not words.peek().startswith("@"):
            raise NotUnderstood
        return (DnatMap(key, words.take()[1:]),)
    text = words.take()
    flagged = words.peek() in _NAT_FLAGS
    _flags(words)
    if not text[0].isalnum() and text[0] not in "[:":
        raise NotUnderstood
    if "-" in text or flagged or text.startswith(":"):
        return (DnatRange(*_ends(text)),)
    return (_endpoint(text),)


def _endpoint(text: str) -> Dnat:
    if text.startswith("[") and text.endswith("]"):
        return Dnat(text[1:-1])
    if text.startswith("[") or text.count(":") == 1:
        return Dnat(*split_port(text))
    return Dnat(text)


def _ends(text: str) -> tuple[str, str, int | None, int | None]:
    """First and last address, first and last port."""
    ports = ""
    if text.startswith("["):
        text, _, ports = text.rpartition("]:") if "]:" in text else (text.rstrip("]"), "", "")
        text = text.replace("[", "").replace("]", "")
    elif text.count(":") == 1:
        text, _, ports = text.partition(":")
    first, dash, last = text.partition("-")
    ends = [str(ipaddress.ip_address(each)) if each else "" for each in (first, last if dash else first)]
    low, port_dash, high = ports.partition("-")
    if not ports:
        return ends[0], ends[1], None, None
    return ends[0], ends[1], int(low), int(high if port_dash else low)


# ---- draws ---------------------------------------------------------------------------------------------------------


def _has_braces(words: Words) -> bool:
    """Whether a map in braces follows, and not a named one."""
    ahead = 0
    while (word := words.peek(ahead)) not in ("", "map", "vmap"):
        ahead += 1
        if word.startswith("@"):
            return False
    return words.peek(ahead + 1) == "{"


def numbers(words: Words) -> tuple[int, int]:
    """`numgen random mod N [offset M]`: N and M. With `inc` the numbers come in turn, which over many connections is the
    same share."""
    words.expect("numgen")
    if words.take() not in ("random", "inc"):
        raise NotUnderstood
    words.expect("mod")
    mod = words.number()
    offset = 0
    if words.peek() == "offset":
        words.take()
        offset = words.number()
    return mod, offset


def _drawn(words: Words) -> RandomMap:
    """`numgen random mod 2 map { 0 : 10.0.0.1, 1 : 10.0.0.2 . 80 }`."""
    mod, offset = numbers(words)
    words.expect("map")

    def endpoint() -> Dnat:
        address = words.take()
        if words.peek() == ".":
            words.take()
            return Dnat(address, words.number())
        return _endpoint(address)

    return RandomMap(mod, arms(words, mod, offset, endpoint))


def arms(
    words: Words, mod: int, offset: int, read: Callable[[], Verdict | Dnat]
) -> tuple[tuple[int, int, Verdict | Dnat], ...]:
    """`{ 0 : …, 1-3 : … }` as (first, last, what), counted without the offset. Raises NotUnderstood."""
    words.expect("{")
    found: list[tuple[int, int, Verdict | Dnat]] = []
    while words.peek() != "}":
        first, dash, last = words.take().partition("-")
        words.expect(":")
        what = read()
        low, high = int(first) - offset, int(last if dash else first) - offset
        if not 0 <= low <= high < mod or any(low <= end and start <= high for start, end, _ in found):
            raise NotUnderstood
        found.append((low, high, what))
        if words.peek() == ",":
            words.take()
    words.expect("}")
    return tuple(sorted(found, key=lambda arm: arm[0]))


# ---- marks ---------------------------------------------------------------------------------------------------------


def set_mark(words: Words, connection: bool) -> Many:
    """What stands behind `meta mark set` or `ct mark set`."""
    own, other = ("ct", "meta") if connection else ("meta", "ct")
    if words.peek() in ("meta", "ct", "mark"):
        source = words.take()
        if source != "mark":
            words.expect("mark")
        elif connection:
            raise NotUnderstood
        return (_changed(words, connection, source in (own, "mark"), source == other),)
    return (SetMark(words.number(), _ALL, connection),)


def _changed(words: Words, connection: bool, same: bool, copied: bool) -> Expression:
    operator = words.peek()
    if operator not in ("|", "or", "^", "xor", "&", "and"):
        if copied:
            return CopyMark(connection)
        raise NotUnderstood
    words.take()
    bits = words.number()
    further = words.peek()
    if copied:
        if operator in ("&", "and") and further not in ("|", "^", "or", "xor"):
            return CopyMark(connection, bits)
        raise NotUnderstood
    if not same:
        raise NotUnderstood
    if operator in ("|", "or"):
        return SetMark(bits, bits, True) if connection else MarkOr(bits)
    if operator in ("^", "xor"):
        return SetMark(bits, 0, True) if connection else MarkXor(bits)
    value = 0
    if further in ("|", "^", "or", "xor"):
        words.take()
        value = words.number()
        if further in ("|", "or"):
            # `mark & A | B`: what is set by B is cleared first.
            return SetMark(value, ~bits & _ALL | value, connection)
    return SetMark(value, ~bits & _ALL, connection)


# ---- sets and what changes no way ----------------------------------------------------------------------------------


def _update(words: Words) -> Many:
    """`update @set { KEY [timeout T] }`; the set's own timeout is taken for T."""
    words.take()
    name = words.take()
    if not name.startswith("@"):
        raise NotUnderstood
    words.expect("{")
    key = words.key()
    if any(isinstance(part, Slot) for part in key) or not all(isinstance(part, Field) for part in key):
        raise NotUnderstood
    if words.peek() == "timeout":
        words.take()
        words.take()
    words.expect("}")
    return (UpdateSet(key, name[1:]),)


def _counter(words: Words) -> Many:
    words.expect("counter")
    if words.peek() == "packets":
        words.take()
        words.number()
        words.expect("bytes")
        words.number()
    elif words.peek() == "name":
        words.position += 2
    return (Counter(),)


_LOG_OPTIONS = ("prefix", "level", "group", "snaplen", "queue-threshold", "flags")


def _log(words: Words) -> Many:
    start = words.position
    words.expect("log")
    while words.peek() in _LOG_OPTIONS:
        if words.take() == "flags" and words.peek() in ("tcp", "ip"):
            words.take()
        words.take()
        while words.peek() == ",":
            words.position += 2
    return (IgnoredStatement(words.slice(start, words.position)),)


def _aside(count: int) -> Callable[[Words], Many]:
    """So many words that change nothing of a packet's way."""

    def read(words: Words) -> Many:
        start = words.position
        for _ in range(count):
            words.take()
        return (IgnoredStatement(words.slice(start, words.position)),)

    return read


def _flow(words: Words) -> Many:
    return _aside(3)(words)


def _xt(words: Words) -> Many:
    """What nft says of iptables' extensions that it cannot put into its own words: little more than the name."""
    start = words.position
    words.expect("xt")
    kind = words.take()
    name = words.take().strip('"')
    if kind == "match" and name == "comment":
        return ()
    if kind == "target" and name in ("LOG", "NFLOG", "TRACE", "TCPMSS"):
        return (IgnoredStatement(words.slice(start, words.position)),)
    if kind == "target" and name == "MASQUERADE":
        return (Masquerade(fully_random=False),)
    raise NotUnderstood


READERS: dict[str, Callable[[Words], Many]] = {
    "jump": _target(Jump),
    "goto": _target(Goto),
    "accept": _word(Accept()),
    "drop": _word(DropPacket()),
    "return": _word(Return()),
    "continue": _word(),
    "reject": _reject,
    "masquerade": _masquerade,
    "redirect": _redirect,
    "snat": _snat,
    "dnat": _dnat,
    "notrack": _word(NoTrack()),
    "update": _update,
    "add": _update,
    "counter": _counter,
    "log": _log,
    "flow": _flow,
    "xt": _xt,
}
