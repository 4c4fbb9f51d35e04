"""The text of `nft list ruleset`, or of a script of table blocks, to typed rules.

Never fails on what others wrote: a rule part that is not known becomes `Unknown` with its text, a set whose key or data
has no form here is left out (a walk then meets a name that it does not know), a table of another family is skipped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from narthex.model.net import IPFamily
from narthex.netfilter.ast import (
    Accept,
    Atom,
    Chain,
    DropPacket,
    ElementData,
    ElementKey,
    Field,
    Goto,
    Hook,
    Jump,
    Key,
    KeyPart,
    Return,
    Rule,
    Ruleset,
    Set,
    Table,
    Verdict,
)
from narthex.netfilter.netlink.elements import networks_between
from narthex.netfilter.nft.print import priority_number
from narthex.netfilter.nft.rule import parse_rule
from narthex.netfilter.nft.words import NotUnderstood, Words, canonical, duration

FAMILIES = {"ip": IPFamily.IPV4, "ip6": IPFamily.IPV6, "inet": None}
_TOKEN = re.compile(r'"[^"]*"|#[^\n]*|[{},;\n]|[^\s{},;"]+')
_DATATYPES: dict[str, KeyPart] = {
    "ipv4_addr": Field.DADDR,
    "ipv6_addr": Field.DADDR,
    "inet_proto": Field.L4PROTO,
    "inet_service": Field.DPORT,
    "ifname": Field.IIFNAME,
}
_ENDPOINT_KEYS = ((Field.DADDR, Field.DPORT), (Field.SADDR, Field.SPORT))


def read_chain(text: str, name: str) -> Chain:
    """A chain from what stands behind its opening brace."""
    return _chain(_Reader(text), name)


def read_set(text: str, name: str) -> Set:
    """A set or map from what stands behind its opening brace; `unsupported` when it is not understood."""
    return _set(_Reader(text), name)


class _Token(NamedTuple):
    text: str
    start: int
    end: int


def parse(text: str) -> Ruleset:
    """All tables of the families ip, ip6 and inet, in their order. Later blocks of a table add to the first."""
    reader = _Reader(text)
    tables: dict[tuple[str, str], Table] = {}
    while (word := reader.next()) is not None:
        if word != "table":
            continue
        family, name = reader.next() or "", reader.next() or ""
        if name == "{":
            # `table NAME {` without a family means ip.
            family, name = "ip", family
        elif reader.next() != "{":
            continue
        if family not in FAMILIES:
            reader.skip_block()
            continue
        block = _table(reader, family, name)
        before = tables.get((family, name))
        tables[family, name] = block if before is None else _merged(before, block)
    return Ruleset(tuple(tables.values()))


def _merged(one: Table, more: Table) -> Table:
    chains = dict(one.chains)
    for name, chain in more.chains.items():
        have = chains.get(name)
        chains[name] = (
            chain if have is None else Chain(name=name, hook=have.hook or chain.hook, rules=have.rules + chain.rules)
        )
    return Table(family=one.family, name=one.name, chains=chains, sets={**one.sets, **more.sets})


class _Reader:
    """Words of the text, one after the other; remembers where they stood so that unknown parts keep their text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens: Iterator[_Token] = (
            _Token(match.group(), match.start(), match.end())
            for match in _TOKEN.finditer(text)
            if not match.group().startswith("#")
        )

    def next(self) -> str | None:
        """The next word that is no end of line, None at the end of the text."""
        for token in self._tokens:
            if token.text not in ("\n", ";"):
                return token.text
        return None

    def skip_block(self) -> None:
        """Pass over what stands between an opening brace just read and the closing one."""
        depth = 1
        for token in self._tokens:
            depth += (token.text == "{") - (token.text == "}")
            if not depth:
                return

    def statement(self) -> Words | None:
        """The words up to the end of a line or `;`, with blocks in braces whole; None at the closing brace."""
        words: list[_Token] = []
        depth = 0
        for token in self._tokens:
            if token.text in ("\n", ";") and not depth:
                if words:
                    break
                continue
            if token.text == "}" and not depth:
                if not words:
                    return None
                # `chain a { accept }` on one line: give the brace back for the next call.
                self._tokens = itertools.chain([token], self._tokens)
                break
            depth += (token.text == "{") - (token.text == "}")
            if token.text != "\n":
                words.append(token)
        if not words:
            return None
        return Words(self.text, tuple(words))


def _table(reader: _Reader, family: str, name: str) -> Table:
    chains: dict[str, Chain] = {}
    sets: dict[str, Set] = {}
    while (word := reader.next()) not in (None, "}"):
        if word == "chain":
            chain_name = reader.next() or ""
            reader.next()
            chains[chain_name] = _chain(reader, chain_name)
        elif word in ("set", "map"):
            set_name = reader.next() or ""
            reader.next()
            one = _set(reader, set_name)
            if not one.unsupported:
                sets[set_name] = one
        elif word == "{":
            reader.skip_block()
    return Table(family=FAMILIES[family], name=name, chains=chains, sets=sets)


def _chain(reader: _Reader, name: str) -> Chain:
    hook: Hook | None = None
    rules: list[Rule] = []
    while (words := reader.statement()) is not None:
        first = words.peek()
        if first == "type" and not rules and hook is None:
            hook = _hook(words)
        elif first == "policy" and hook is not None:
            hook = Hook(type=hook.type, hook=hook.hook, priority=hook.priority, policy=words.at(1))
        elif not (first == "comment" and not rules) and first != "flags":
            rules.append(parse_rule(words))
    return Chain(name=name, rules=tuple(rules), hook=hook)


def _hook(words: Words) -> Hook | None:
    """`type filter hook prerouting [device x] priority dstnat - 10`."""
    texts = words.texts()
    try:
        at = texts.index("priority")
        return Hook(type=texts[1], hook=texts[3], priority=priority_number(texts[at + 1 :]))
    except (ValueError, KeyError, IndexError):
        return None


def _set(reader: _Reader, name: str) -> Set:
    """A set or map; `unsupported` when its key, its data or one of its elements has no form here."""
    keys: dict[str, object] = {}
    elements: Words | None = None
    key: Key | None = None
    data = ""
    types = ""
    while (words := reader.statement()) is not None:
        match words.peek():
            case "typeof" | "type":
                try:
                    key, data = _types(words)
                except NotUnderstood:
                    types = " ".join(words.texts())
            case "flags":
                texts = words.texts()
                keys["interval"], keys["dynamic"] = "interval" in texts, "dynamic" in texts
            case "timeout":
                keys["timeout"] = duration(words.at(1))
            case "size":
                keys["size"] = int(words.at(1)) if words.at(1).isdigit() else 0
            case "counter":
                keys["counter"] = True
            case "elements":
                elements = words
    if key is None or types:
        return Set(name=name, key=(), unsupported=types or "it does not say what it holds")
    try:
        parsed = {} if elements is None or keys.get("dynamic") else dict(_elements(elements, data))
    except NotUnderstood:
        return Set(name=name, key=(), unsupported="its elements")
    return Set(name=name, key=key, data=data, elements=parsed, **keys)  # type: ignore[arg-type]


def _types(words: Words) -> tuple[Key, str]:
    """`typeof ip daddr . th dport : verdict` or `type ipv4_addr : verdict`."""
    old_form = words.take() == "type"
    key = _datatypes(words) if old_form else words.key()
    if words.done:
        return key, ""
    words.expect(":")
    if words.peek() == "verdict":
        return key, "verdict"
    value = _datatypes(words) if old_form else words.key()
    if value in _ENDPOINT_KEYS:
        return key, "endpoint"
    raise NotUnderstood


def _datatypes(words: Words) -> Key:
    parts: list[KeyPart] = []
    while not words.done and words.peek() != ":":
        word = words.take()
        if word != ".":
            if word not in _DATATYPES:
                raise NotUnderstood
            parts.append(_DATATYPES[word])
    return tuple(parts)


def _elements(words: Words, data: str) -> Iterator[tuple[ElementKey, ElementData]]:
    """`elements = { KEY [counter …] [timeout …] [: DATA], … }`."""
    words.expect("elements")
    words.expect("=")
    words.expect("{")
    while words.peek() != "}":
        atoms = [_atoms(words.take())]
        while words.peek() == ".":
            words.take()
            atoms.append(_atoms(words.take()))
        while words.peek() not in (":", ",", "}"):
            # Counters, time left and comments are no part of what an element is.
            words.take()
        value: ElementData = None
        if words.peek() == ":":
            words.take()
            value = _data(words, data)
        elif data:
            raise NotUnderstood
        for key in itertools.product(*atoms):
            yield key, value
        if words.peek() == ",":
            words.take()


def _data(words: Words, data: str) -> ElementData:
    if data == "verdict":
        return _verdict(words)
    if data != "endpoint":
        raise NotUnderstood
    address = words.take()
    words.expect(".")
    port = words.take()
    if not port.isdigit():
        raise NotUnderstood
    return canonical(address), int(port)


_PLAIN: dict[str, Verdict] = {"accept": Accept(), "drop": DropPacket(), "return": Return()}


def _verdict(words: Words) -> Verdict:
    word = words.take()
    if word == "goto":
        return Goto(words.take())
    if word == "jump":
        return Jump(words.take())
    if word not in _PLAIN:
        raise NotUnderstood
    return _PLAIN[word]


def _atoms(text: str) -> tuple[Atom, ...]:
    """One component: usually one value; a range of addresses is the networks that make it up."""
    if text.isdigit():
        return (int(text),)
    text = text.strip('"')
    first, dash, last = text.partition("-")
    if dash and first.isdigit() and last.isdigit():
        return (text,)
    if dash and ("." in first or ":" in first):
        try:
            return networks_between(first, last)
        except ValueError:
            raise NotUnderstood from None
    return (canonical(text),)
