"""One rule in nft's words to typed expressions."""

from __future__ import annotations

import re
from collections.abc import Callable

from narthex.model.net import split_port
from narthex.netfilter.ast import (
    Accept,
    Atom,
    Compare,
    Counter,
    CtState,
    CtStatus,
    Dnat,
    DnatMap,
    DropPacket,
    Expression,
    Field,
    Goto,
    InSet,
    IsLocal,
    Jump,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    PortRange,
    RejectPacket,
    Remember,
    Return,
    Rule,
    Slot,
    Spread,
    TcpReset,
    Unknown,
    VerdictMap,
)
from narthex.netfilter.nft_words import NotUnderstood, Words, canonical

Many = tuple[Expression, ...]

_RESUME = frozenset({"accept", "drop", "return", "jump", "goto", "reject", "counter", "masquerade", "dnat", "comment"})
"""Words that begin something known wherever they stand, so that reading can go on behind an unknown part."""
_PORT_RANGE = re.compile(r"(\d+)-(\d+)")


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
        if not depth and following in _RESUME and (following != "dnat" or words.peek(1) in ("to", "ip", "ip6")):
            return


def _field_match(words: Words) -> Many:
    """A key, then what it is compared with."""
    key = words.key()
    negate = _negation(words)
    if words.peek().startswith("@"):
        return (InSet(key, words.take()[1:], negate),)
    if words.peek() == "vmap" and not negate:
        words.take()
        if words.peek().startswith("@"):
            return (VerdictMap(key, words.take()[1:]),)
        return (_spread(key, words),)
    if len(key) != 1 or not isinstance(key[0], Field):
        raise NotUnderstood
    return (_compare(key[0], words, negate),)


def _transport(words: Words) -> Many:
    """`tcp dport 80`: the protocol is part of the match."""
    protocol = words.take()
    if words.peek() == "flags":
        return _flags(protocol, words)
    field = {"dport": Field.DPORT, "sport": Field.SPORT}.get(words.take())
    if field is None or words.peek() in (".", "vmap") or words.peek().startswith("@"):
        raise NotUnderstood
    return Compare(Field.L4PROTO, (protocol,)), _compare(field, words, _negation(words))


_RESET = ("rst",), ("rst", "/", "rst"), ("&", "rst", "==", "rst")
"""What may follow `tcp flags` to mean a reset."""


def _flags(protocol: str, words: Words) -> Many:
    words.expect("flags")
    for form in _RESET:
        following = tuple(words.peek(ahead) for ahead in range(len(form) + 1))
        if protocol == "tcp" and following[:-1] == form and following[-1] not in (",", "/", "|", "&", "==", "!="):
            words.position += len(form)
            return (TcpReset(),)
    raise NotUnderstood


def _negation(words: Words) -> bool:
    if words.peek() in ("!=", "=="):
        return words.take() == "!="
    return False


def _compare(field: Field, words: Words, negate: bool) -> Compare | PortRange:
    if words.peek() != "{":
        text = words.take()
        ports = _PORT_RANGE.fullmatch(text)
        if ports and field in (Field.DPORT, Field.SPORT):
            return PortRange(field, int(ports[1]), int(ports[2]), negate)
        return Compare(field, (_value(field, text),), negate)
    words.take()
    values = [_value(field, words.take())]
    while words.peek() == ",":
        words.take()
        if words.peek() != "}":
            values.append(_value(field, words.take()))
    words.expect("}")
    return Compare(field, tuple(values), negate)


def _value(field: Field, text: str) -> Atom:
    if field in (Field.DPORT, Field.SPORT):
        if not text.isdigit():
            raise NotUnderstood
        return int(text)
    if field in (Field.IIFNAME, Field.OIFNAME):
        return text.strip('"')
    if text.startswith(("@", "$", "<", ">", "&", "|")) or ("-" in text and field is not Field.L4PROTO):
        raise NotUnderstood
    return canonical(text)


def _spread(key: tuple[object, ...], words: Words) -> Spread:
    """`numgen random mod N vmap { 0 : goto a, 1 : goto b }`, every number once."""
    if len(key) != 1 or not isinstance(key[0], Slot):
        raise NotUnderstood
    words.expect("{")
    chains: dict[int, str] = {}
    while words.peek() != "}":
        number = words.number()
        words.expect(":")
        words.expect("goto")
        chains[number] = words.take()
        if words.peek() == ",":
            words.take()
    words.expect("}")
    if sorted(chains) != list(range(key[0].mod)):
        raise NotUnderstood
    return Spread(tuple(chains[number] for number in range(key[0].mod)))


def _fib(words: Words) -> Many:
    words.expect("fib")
    field = {"saddr": Field.SADDR, "daddr": Field.DADDR}.get(words.take())
    words.expect("type")
    negate = _negation(words)
    words.expect("local")
    if field is None:
        raise NotUnderstood
    return (IsLocal(field, negate),)


def _ct(words: Words) -> Many:
    words.expect("ct")
    what = words.take()
    if what not in ("state", "status"):
        raise NotUnderstood
    exact = words.peek() == "!="
    negate = words.peek() in ("!", "!=")
    if negate:
        words.take()
    values = _word_list(words)
    if not all(value.isalpha() for value in values):
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


def _meta(words: Words) -> Many:
    """Marks; all other `meta` words are fields."""
    if words.peek(1) != "mark":
        return _field_match(words)
    words.take()
    return _mark(words)


def _mark(words: Words) -> Many:
    words.expect("mark")
    if words.peek() == "set":
        words.take()
        if words.peek() == "meta":
            words.take()
        words.expect("mark")
        operator = words.take()
        bits = words.number()
        if operator in ("|", "or"):
            return (MarkOr(bits),)
        if operator in ("^", "xor"):
            return (MarkXor(bits),)
        raise NotUnderstood
    mask = 0xFFFFFFFF
    if words.peek() in ("&", "and"):
        words.take()
        mask = words.number()
    negate = _negation(words)
    value, slash, length = words.take().partition("/")
    if slash:
        # nft lists a mask whose ones all lead as the length of a prefix.
        mask &= 0xFFFFFFFF << (32 - int(length)) & 0xFFFFFFFF
    return (MarkIs(int(value, 0), mask, negate),)


def _target(kind: type[Jump] | type[Goto]) -> Callable[[Words], Many]:
    def read(words: Words) -> Many:
        words.take()
        return (kind(words.take()),)

    return read


def _word(one: Expression) -> Callable[[Words], Many]:
    def read(words: Words) -> Many:
        words.take()
        return (one,)

    return read


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


def _masquerade(words: Words) -> Many:
    words.expect("masquerade")
    fully = False
    while words.peek() in ("fully-random", "random", "persistent", ","):
        fully = words.take() == "fully-random" or fully
    if words.peek() == "to":
        raise NotUnderstood
    return (Masquerade(fully),)


def _dnat(words: Words) -> Many:
    """`dnat to ADDRESS[:PORT]`, or to what a map holds."""
    words.expect("dnat")
    if words.peek() in ("ip", "ip6"):
        words.take()
    words.expect("to")
    if words.peek(1) not in ("", "comment"):
        key = words.key()
        words.expect("map")
        if not words.peek().startswith("@"):
            raise NotUnderstood
        return (DnatMap(key, words.take()[1:]),)
    text = words.take()
    if "-" in text or (not text[0].isalnum() and text[0] != "["):
        raise NotUnderstood
    if text.startswith("[") and text.endswith("]"):
        return (Dnat(text[1:-1]),)
    if text.startswith("[") or text.count(":") == 1:
        return (Dnat(*split_port(text)),)
    return (Dnat(text),)


def _update(words: Words) -> Many:
    """`update @set { KEY [timeout T] }`; the set's own timeout is taken for T."""
    words.expect("update")
    name = words.take()
    if not name.startswith("@"):
        raise NotUnderstood
    words.expect("{")
    key = words.key()
    if words.peek() == "timeout":
        words.take()
        words.take()
    words.expect("}")
    return (Remember(key, name[1:]),)


def _counter(words: Words) -> Many:
    words.expect("counter")
    if words.peek() == "packets":
        words.take()
        words.number()
        words.expect("bytes")
        words.number()
    elif words.peek() == "name":
        raise NotUnderstood
    return (Counter(),)


_READERS: dict[str, Callable[[Words], Many]] = {
    "fib": _fib,
    "ct": _ct,
    "meta": _meta,
    "mark": _mark,
    "tcp": _transport,
    "udp": _transport,
    "sctp": _transport,
    "jump": _target(Jump),
    "goto": _target(Goto),
    "accept": _word(Accept()),
    "drop": _word(DropPacket()),
    "return": _word(Return()),
    "reject": _reject,
    "masquerade": _masquerade,
    "dnat": _dnat,
    "update": _update,
    "counter": _counter,
}
