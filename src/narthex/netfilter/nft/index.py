"""One pass over the lines of `nft list ruleset` that finds each chain, set, and map. They are parsed when accessed.

Tables that are not formatted as nft prints them (a script, an indented copy) are parsed immediately, token by token.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from narthex.netfilter.ast import Atom, Chain, ElementData, ElementKey, Goto, Jump, Set, Table
from narthex.netfilter.lazy import IndexedTable, LazyChains, LazyMapping
from narthex.netfilter.nft.parse import FAMILIES, parse_chain, parse_ruleset, parse_set
from narthex.netfilter.nft.statements import VERDICTS

HEAD = re.compile(r"\s*table (?:(ip|ip6|inet|arp|bridge|netdev) )?([^\s{]+) \{(?:\s*#.*)?\s*$")
"""The first line of a table."""
_BLOCK = re.compile(
    r"\t(chain|set|map|flowtable|counter|quota|limit|secmark|synproxy|ct \w+)(?: ([^\s{]+))? \{(?:\s*#.*)?$"
)


class _Span(NamedTuple):
    """The lines inside a block. The end is exclusive."""

    first: int
    end: int


def index(lines: Sequence[str], start: int) -> IndexedTable:
    """Index the table that starts at a line that HEAD matches."""
    head = HEAD.match(lines[start])
    assert head is not None
    family, name = head[1] or "ip", head[2]
    chains: dict[str, _Span] = {}
    sets: dict[str, _Span] = {}
    number, count = start + 1, len(lines)
    rules = 0
    while number < count:
        line = lines[number]
        if line[:1] == "}":
            table = _table(lines, family, name, chains, sets) if family in FAMILIES else None
            return IndexedTable(table, rules, number + 1, [])
        block = _BLOCK.match(line)
        if block is None:
            if line.strip() and not line.startswith(("\tcomment ", "\tflags ", "#", "\t#")):
                return _parse_at_once(lines, start)
            number += 1
            continue
        end = number + 1
        while end < count and lines[end] != "\t}":
            if not lines[end].startswith("\t\t") and lines[end].strip():
                return _parse_at_once(lines, start)
            end += 1
        if end >= count:
            break
        kind = block[1]
        span = _Span(number + 1, end)
        if kind == "chain":
            chains[block[2] or ""] = span
            rules += end - number - 1 - _header_lines(lines, span)
        elif kind in ("set", "map"):
            sets[block[2] or ""] = span
        number = end + 1
    return _parse_at_once(lines, start)


def _header_lines(lines: Sequence[str], span: _Span) -> int:
    """Return the number of lines of a chain before its rules."""
    count = 0
    for number in range(span.first, span.end):
        line = lines[number]
        if not line.strip() or line.startswith(("\t\ttype ", "\t\tcomment ", "\t\tpolicy ", "\t\tflags ")):
            count += 1
            continue
        break
    return count


def _table(
    lines: Sequence[str], family: str, name: str, chain_spans: dict[str, _Span], set_spans: dict[str, _Span]
) -> Table:
    def build_chain(chain: str) -> Chain:
        span = chain_spans[chain]
        return parse_chain("\n".join(lines[span.first : span.end]) + "\n}\n", chain)

    def numbers(chain: str) -> list[int]:
        span = chain_spans[chain]
        return list(range(span.first + _header_lines(lines, span) + 1, span.end + 1))

    bases = tuple(
        chain
        for chain, span in chain_spans.items()
        if any(lines[n].startswith("\t\ttype ") for n in range(span.first, min(span.first + 2, span.end)))
    )
    chains = LazyChains(chain_spans, build_chain, bases, numbers, lambda number: lines[number - 1].strip())
    sets = LazyMapping(set_spans, lambda one: _set(lines, set_spans[one], one))
    return Table(family=FAMILIES[family], name=name, chains=chains, sets=sets)


def _set(lines: Sequence[str], span: _Span, name: str) -> Set:
    inside = lines[span.first : span.end]
    at = next((n for n, line in enumerate(inside) if line.startswith("\t\telements = {")), len(inside))
    header = parse_set("\n".join(inside[:at]) + "\n}\n", name)
    if at == len(inside) or header.dynamic or header.unsupported:
        return header
    elements = _plain_elements("\n".join(inside[at:]), header.data)
    if elements is not None:
        return msgspec.structs.replace(header, elements=elements)
    return parse_set("\n".join(inside) + "\n}\n", name)


def _parse_at_once(lines: Sequence[str], start: int) -> IndexedTable:
    """Parse a table whose end is where its braces close."""
    depth = 0
    for number in range(start, len(lines)):
        bare = _QUOTED.sub("", lines[number]).partition("#")[0]
        depth += bare.count("{") - bare.count("}")
        if depth <= 0:
            tables = parse_ruleset("\n".join(lines[start : number + 1])).tables
            return IndexedTable(tables[0] if tables else None, _rule_count(tables), number + 1, [])
    tables = parse_ruleset("\n".join(lines[start:])).tables
    problem = (len(lines), f"the table that begins in line {start + 1} has no end: the dump is cut off")
    return IndexedTable(tables[0] if tables else None, _rule_count(tables), len(lines), [problem])


_QUOTED = re.compile(r'"[^"]*"')


def _rule_count(tables: tuple[Table, ...]) -> int:
    return sum(len(chain.rules) for table in tables for chain in table.chains.values())


# ---- elements -----------------------------------------------------------------------------------------------------


def _plain_elements(text: str, data: str) -> dict[ElementKey, ElementData] | None:
    """Parse `elements = { … }` without a lexer, for large sets.

    Returns None if it contains anything other than addresses, networks, numbers, words, and verdicts.
    """
    if '"' in text:
        return None
    inside = text.partition("{")[2].rpartition("}")[0]
    if "{" in inside:
        return None
    elements: dict[ElementKey, ElementData] = {}
    for part in inside.split(","):
        key_text, colon, value = part.partition(" : ")
        if bool(colon) is not bool(data):
            if not part.strip():
                continue
            return None
        # Counters and remaining timeouts follow the key and are not part of it.
        words = key_text.split()
        key: list[Atom] = []
        expected = True
        for word in words:
            if word == ".":
                expected = True
            elif expected:
                atom = _atom(word)
                if atom is None:
                    return None
                key.append(atom)
                expected = False
            else:
                break
        if not colon:
            elements[tuple(key)] = None
            continue
        parsed = _data(value.split(), data)
        if parsed is None:
            return None
        elements[tuple(key)] = parsed
    return elements


def _atom(word: str) -> Atom | None:
    if word.isdigit():
        return int(word)
    if "-" in word or "*" in word:
        return None
    if ":" in word and "." in word:
        try:
            return str(ipaddress.IPv6Address(word))
        except ValueError:
            return None
    return word


def _data(words: list[str], data: str) -> ElementData:
    if data == "verdict":
        if len(words) == 2 and words[0] in ("goto", "jump"):
            return Goto(words[1]) if words[0] == "goto" else Jump(words[1])
        return VERDICTS.get(words[0]) if len(words) == 1 else None
    if len(words) == 3 and words[1] == "." and words[2].isdigit():
        address = _atom(words[0])
        return (address, int(words[2])) if isinstance(address, str) else None
    return None
