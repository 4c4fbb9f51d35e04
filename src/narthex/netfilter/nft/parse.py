"""Parser for the text of `nft list ruleset`, and for scripts of table blocks.

Parsing never fails on foreign rules. An unknown part of a rule becomes `Unknown` with its text, a set whose key or data is
not supported is omitted (a walk then fails on its name), and a table of another family is skipped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from narthex.model import IPFamily, networks_between
from narthex.netfilter import ast
from narthex.netfilter.cuts import CUT, gap_rule, is_cut_mark
from narthex.netfilter.nft.cursor import Lexer, TokenCursor, UnknownSyntax, canonical, duration
from narthex.netfilter.nft.print import priority_number
from narthex.netfilter.nft.rule import parse_rule
from narthex.netfilter.nft.statements import verdict

FAMILIES = {"ip": IPFamily.IPV4, "ip6": IPFamily.IPV6, "inet": None}
_DATATYPES: dict[str, ast.KeyPart] = {
    "ipv4_addr": ast.Field.DADDR,
    "ipv6_addr": ast.Field.DADDR,
    "inet_proto": ast.Field.L4PROTO,
    "inet_service": ast.Field.DPORT,
    "ifname": ast.Field.IIFNAME,
    # nft's JSON has no type for a number drawn with numgen. The rules that look it up have the range.
    "integer": ast.Slot(0xFFFFFFFF),
}
_ENDPOINT_KEYS = ((ast.Field.DADDR, ast.Field.DPORT), (ast.Field.SADDR, ast.Field.SPORT))


def parse_ruleset(text: str) -> ast.Ruleset:
    """Parse all tables of the families ip, ip6, and inet, in order. Blocks of the same table are merged."""
    lexer = Lexer(text)
    tables: dict[tuple[str, str], list[ast.Table]] = {}
    while (word := lexer.next()) is not None:
        if word != "table":
            continue
        family, name = lexer.next() or "", lexer.next() or ""
        if name == "{":
            # `table NAME {` without a family means ip.
            family, name = "ip", family
        elif lexer.next() != "{":
            continue
        if family not in FAMILIES:
            lexer.skip_block()
            continue
        tables.setdefault((family, name), []).append(_table(lexer, family, name))
    return ast.Ruleset(tuple(map(_merged, tables.values())))


def parse_chain(text: str, name: str) -> ast.Chain:
    """Parse the text after the opening brace of a chain."""
    return _chain(Lexer(text), name)


def parse_set(text: str, name: str) -> ast.Set:
    """Parse the text after the opening brace of a set or map. The result is `unsupported` if it is not understood."""
    return _set(Lexer(text), name)


def _merged(blocks: list[ast.Table]) -> ast.Table:
    """Return one table with the content of its blocks."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    alike: dict[str, list[ast.Chain]] = {}
    for block in blocks:
        for name, chain in block.chains.items():
            alike.setdefault(name, []).append(chain)
    chains = {
        name: ast.Chain(
            name=name,
            hook=next((each.hook for each in found if each.hook), None),
            rules=tuple(rule for each in found for rule in each.rules),
        )
        for name, found in alike.items()
    }
    sets = {name: one for block in blocks for name, one in block.sets.items()}
    return ast.Table(family=first.family, name=first.name, chains=chains, sets=sets)


def _table(lexer: Lexer, family: str, name: str) -> ast.Table:
    chains: dict[str, ast.Chain] = {}
    sets: dict[str, ast.Set] = {}
    while (word := lexer.next()) not in (None, "}"):
        if word == "chain":
            chain_name = lexer.next() or ""
            lexer.next()
            chains[chain_name] = _chain(lexer, chain_name)
        elif word in ("set", "map"):
            set_name = lexer.next() or ""
            lexer.next()
            one = _set(lexer, set_name)
            if not one.unsupported:
                sets[set_name] = one
        elif word == "{":
            lexer.skip_block()
    return ast.Table(family=FAMILIES[family], name=name, chains=chains, sets=sets)


def _chain(lexer: Lexer, name: str) -> ast.Chain:
    hook: ast.Hook | None = None
    rules: list[ast.Rule] = []
    while (cursor := lexer.statement()) is not None:
        first = cursor.peek()
        if first == "type" and not rules and hook is None:
            hook = _hook(cursor.texts())
        elif first == "policy" and hook is not None:
            hook = ast.Hook(type=hook.type, hook=hook.hook, priority=hook.priority, policy=cursor.at(1))
        elif first.startswith(("..", "…", "[..", "[…")) and is_cut_mark(" ".join(cursor.texts())):
            rules.append(gap_rule())
        elif not (first == "comment" and not rules) and first != "flags":
            rules.append(parse_rule(cursor))
    return ast.Chain(name=name, rules=tuple(rules), hook=hook)


def _hook(texts: list[str]) -> ast.Hook | None:
    """Parse `type filter hook prerouting [device x] priority dstnat - 10`."""
    try:
        at = texts.index("priority")
        return ast.Hook(type=texts[1], hook=texts[3], priority=priority_number(texts[at + 1 :]))
    except (ValueError, KeyError, IndexError):
        return None


# ---- sets and maps -------------------------------------------------------------------------------------------------


def _set(lexer: Lexer, name: str) -> ast.Set:
    properties: dict[str, object] = {}
    elements: TokenCursor | None = None
    key: ast.Key | None = None
    data = ""
    unknown_types = ""
    while (cursor := lexer.statement()) is not None:
        match cursor.peek():
            case "typeof" | "type":
                try:
                    key, data = _types(cursor)
                except UnknownSyntax:
                    unknown_types = " ".join(cursor.texts())
            case "flags":
                texts = cursor.texts()
                properties["interval"], properties["dynamic"] = "interval" in texts, "dynamic" in texts
            case "timeout":
                properties["timeout"] = duration(cursor.at(1))
            case "size":
                properties["size"] = int(cursor.at(1)) if cursor.at(1).isdigit() else 0
            case "counter":
                properties["counter"] = True
            case "elements":
                elements = cursor
            case word if word not in _SET_WORDS and "." in cursor.texts():
                unknown_types = CUT
    if key is None or unknown_types:
        return ast.Set(name=name, key=(), unsupported=unknown_types or "it does not say what it holds")
    comments: dict[ast.ElementKey, str] = {}
    try:
        parsed = {} if elements is None or properties.get("dynamic") else dict(_elements(elements, data, comments))
    except UnknownSyntax:
        return ast.Set(name=name, key=(), unsupported="its elements")
    return ast.Set(name=name, key=key, data=data, elements=parsed, comments=comments, **properties)  # type: ignore[arg-type]


def _types(cursor: TokenCursor) -> tuple[ast.Key, str]:
    """Parse `typeof ip daddr . th dport : verdict` or `type ipv4_addr : verdict` into key and `Set.data`."""
    read_key = _datatypes if cursor.take() == "type" else TokenCursor.key
    key = read_key(cursor)
    if cursor.done:
        return key, ""
    cursor.expect(":")
    if cursor.peek() == "verdict":
        return key, "verdict"
    if read_key(cursor) in _ENDPOINT_KEYS:
        return key, "endpoint"
    raise UnknownSyntax


def _datatypes(cursor: TokenCursor) -> ast.Key:
    parts: list[ast.KeyPart] = []
    while not cursor.done and cursor.peek() != ":":
        word = cursor.take()
        if word != ".":
            if word not in _DATATYPES:
                raise UnknownSyntax
            parts.append(_DATATYPES[word])
    return tuple(parts)


_SET_WORDS = ("comment", "gc-interval", "auto-merge", "policy", "limit", "quota", "last", "ct")
"""Statements of sets that do not matter here. Any other with a concatenation is a line of elements without the first one."""
_MAX_KEYS = 4096
"""Keys that the ranges of one element may stand for: a range of IPv6 addresses is up to 254 networks, and the ranges of a
concatenation multiply."""
_MAX_RANGE_KEYS = 500_000
"""Keys that all ranges of a set may stand for: enough for the networks of all countries, and half a second of work."""


def _elements(
    cursor: TokenCursor, data: str, comments: dict[ast.ElementKey, str]
) -> Iterator[tuple[ast.ElementKey, ast.ElementData]]:
    """Parse `elements = { KEY [counter …] [timeout …] [comment …] [: DATA], … }`, and fill `comments`."""
    of_ranges = 0
    cursor.expect("elements")
    cursor.expect("=")
    for _ in cursor.items():
        atoms = [_atoms(cursor.take())]
        while cursor.take_if("."):
            atoms.append(_atoms(cursor.take()))
        comment = ""
        while cursor.peek() not in (":", ",", "}"):
            # Counters and remaining timeouts are not part of an element.
            if cursor.take() == "comment":
                comment = cursor.take().strip('"')
        value: ast.ElementData = None
        if cursor.take_if(":"):
            value = _data(cursor, data)
        elif data:
            raise UnknownSyntax
        keys = math.prod(map(len, atoms))
        of_ranges += keys if keys > 1 else 0
        if keys > _MAX_KEYS or of_ranges > _MAX_RANGE_KEYS:
            raise UnknownSyntax
        for key in itertools.product(*atoms):
            if comment:
                comments[key] = comment
            yield key, value


def _data(cursor: TokenCursor, data: str) -> ast.ElementData:
    if data == "verdict":
        return verdict(cursor)
    if data != "endpoint":
        raise UnknownSyntax
    address = cursor.take()
    cursor.expect(".")
    port = cursor.take()
    if not port.isdigit():
        raise UnknownSyntax
    return canonical(address), int(port)


def _atoms(text: str) -> tuple[ast.Atom, ...]:
    """Return the values of one component. A range of addresses becomes the networks that cover it."""
    if text.isdigit():
        return (int(text),)
    text = text.strip('"')
    if ".." in text:
        # A user cut the elements.
        raise UnknownSyntax
    first, dash, last = text.partition("-")
    if dash and first.isdigit() and last.isdigit():
        return (text,)
    if dash and ("." in first or ":" in first):
        try:
            return networks_between(first, last)
        except ValueError:
            raise UnknownSyntax from None
    return (canonical(text),)
