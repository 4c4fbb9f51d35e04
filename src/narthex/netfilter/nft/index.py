"""One pass over the lines of `nft list ruleset`: where each chain, set and map stands. They are read later.

Tables in another shape than nft prints (a script by hand, an indented copy) are read at once, word by word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from narthex.netfilter.ast import Chain, Set, Table
from narthex.netfilter.lazy import Lazy, LazyChains
from narthex.netfilter.nft.elements import plain_elements
from narthex.netfilter.nft.parse import FAMILIES, parse, read_chain, read_set
from narthex.netfilter.xtables.index import Trouble

HEAD = re.compile(r"\s*table (?:(ip|ip6|inet|arp|bridge|netdev) )?([^\s{]+) \{(?:\s*#.*)?\s*$")
"""The first line of a table."""
_BLOCK = re.compile(
    r"\t(chain|set|map|flowtable|counter|quota|limit|secmark|synproxy|ct \w+)(?: ([^\s{]+))? \{(?:\s*#.*)?$"
)


class Found(NamedTuple):
    """What a table's block holds; no table for a family that carries no IP packets."""

    table: Table | None
    rules: int
    next: int
    troubles: list[Trouble]


class _Span(NamedTuple):
    kind: str
    first: int
    """Index of the first line inside."""
    behind: int


def index(lines: Sequence[str], start: int) -> Found:
    """The table that begins at this index, with a line that HEAD matches."""
    head = HEAD.match(lines[start])
    assert head is not None
    family, name = head[1] or "ip", head[2]
    spans: dict[str, _Span] = {}
    others: dict[str, _Span] = {}
    number, count = start + 1, len(lines)
    rules = 0
    while number < count:
        line = lines[number]
        if line[:1] == "}":
            table = _table(lines, family, name, spans, others) if family in FAMILIES else None
            return Found(table, rules, number + 1, [])
        block = _BLOCK.match(line)
        if block is None:
            if line.strip() and not line.startswith(("\tcomment ", "\tflags ", "#", "\t#")):
                return _word_by_word(lines, start)
            number += 1
            continue
        behind = number + 1
        while behind < count and lines[behind] != "\t}":
            if not lines[behind].startswith("\t\t") and lines[behind].strip():
                return _word_by_word(lines, start)
            behind += 1
        if behind >= count:
            break
        kind = block[1]
        span = _Span(kind, number + 1, behind)
        if kind == "chain":
            spans[block[2] or ""] = span
            rules += behind - number - 1 - _heads(lines, span)
        elif kind in ("set", "map"):
            others[block[2] or ""] = span
        number = behind + 1
    return _word_by_word(lines, start)


def _heads(lines: Sequence[str], span: _Span) -> int:
    """How many lines of a chain say what it is, before its rules."""
    heads = 0
    for number in range(span.first, span.behind):
        line = lines[number]
        if not line.strip() or line.startswith(("\t\ttype ", "\t\tcomment ", "\t\tpolicy ", "\t\tflags ")):
            heads += 1
            continue
        break
    return heads


def _table(lines: Sequence[str], family: str, name: str, spans: dict[str, _Span], others: dict[str, _Span]) -> Table:
    def chain(called: str) -> Chain:
        span = spans[called]
        return read_chain("\n".join(lines[span.first : span.behind]) + "\n}\n", called)

    def numbers(called: str) -> list[int]:
        span = spans[called]
        return list(range(span.first + _heads(lines, span) + 1, span.behind + 1))

    def one(called: str) -> Set:
        return _set(lines, others[called], called)

    bases = tuple(
        called
        for called, span in spans.items()
        if any(lines[n].startswith("\t\ttype ") for n in range(span.first, min(span.first + 2, span.behind)))
    )
    chains = LazyChains(spans, chain, bases, numbers, lambda number: lines[number - 1].strip())
    return Table(family=FAMILIES[family], name=name, chains=chains, sets=Lazy(others, one))


def _set(lines: Sequence[str], span: _Span, name: str) -> Set:
    inside = lines[span.first : span.behind]
    at = next((n for n, line in enumerate(inside) if line.startswith("\t\telements = {")), len(inside))
    head = read_set("\n".join(inside[:at]) + "\n}\n", name)
    if at == len(inside) or head.dynamic or head.unsupported:
        return head
    text = "\n".join(inside[at:])
    elements = plain_elements(text, head.data)
    if elements is not None:
        return Set(
            name=name,
            key=head.key,
            data=head.data,
            interval=head.interval,
            timeout=head.timeout,
            size=head.size,
            counter=head.counter,
            elements=elements,
        )
    return read_set("\n".join(inside) + "\n}\n", name)


def _word_by_word(lines: Sequence[str], start: int) -> Found:
    """A table in a shape of its own: its end is where its braces close."""
    depth = 0
    for number in range(start, len(lines)):
        bare = _QUOTED.sub("", lines[number]).partition("#")[0]
        depth += bare.count("{") - bare.count("}")
        if depth <= 0:
            tables = parse("\n".join(lines[start : number + 1])).tables
            return Found(tables[0] if tables else None, _count(tables), number + 1, [])
    tables = parse("\n".join(lines[start:])).tables
    trouble = (len(lines), f"the table that begins in line {start + 1} has no end: the dump is cut off")
    return Found(tables[0] if tables else None, _count(tables), len(lines), [trouble])


_QUOTED = re.compile(r'"[^"]*"')


def _count(tables: tuple[Table, ...]) -> int:
    return sum(len(chain.rules) for table in tables for chain in table.chains.values())
