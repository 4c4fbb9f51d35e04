"""One pass over the lines of `nft list ruleset` that finds each chain, set, and map. They are parsed when accessed.

Tables that are not formatted as nft prints them (a script, an indented copy) are parsed immediately, token by token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from narthex.model import ipv6_text
from narthex.netfilter.ast import Atom, Chain, ElementData, ElementKey, Goto, Jump, Set, Table
from narthex.netfilter.cuts import CUT, gap_rule, is_cut_mark
from narthex.netfilter.lazy import IndexedTable, LazyChains, LazyMapping, base_chains
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


BARE_BLOCK = re.compile(r"\s*(?:chain|set|map) [^\s{]+ \{(?:\s*#.*)?\s*$")
"""The first line of a chain, set, or map, which a user may have copied without its table."""
_KUBE_PROXY = re.compile(
    r"^\s*(?:chain|set|map) (?:(?:service|endpoint|external|firewall|affinity)-[A-Z0-9]{8}|services |service-ips |service-nodeports |nodeport-ips |cluster-ips |mark-for-masquerade |masquerading |no-endpoint-|firewall-ips |nat-(?:prerouting|output|postrouting) )",
    re.MULTILINE,
)
_ADDRESS_6 = re.compile(r"ip6 [sd]addr|ipv6_addr")


_CHAIN = re.compile(r"chain ([^\s{]+) \{(?:\s*#.*)?$")
_BETWEEN_BLOCKS = (
    "comment ",
    "flags ",
    "flowtable ",
    "counter ",
    "quota ",
    "limit ",
    "secmark ",
    "synproxy ",
    "ct ",
    "chain ",
    "set ",
    "map ",
    "#",
    "...",
    "…",
)
"""Beginnings of lines between the chains and sets of a table."""
_NO_RULES = ("type ", "policy ", "comment ", "flags ", "#")
"""Beginnings of lines of a chain that are no rules."""


class _Ends:
    """Recognizes where a table without its last brace ends: at another table, a code fence, or a shell command."""

    def __init__(self, lines: Sequence[str], is_command: Callable[[str], bool]) -> None:
        self._lines = lines
        self._is_command = is_command

    def at(self, number: int) -> bool:
        """Return True if something else begins at a line."""
        line = self._lines[number]
        if not line or line[0] == "\t":
            return False
        return HEAD.match(line) is not None or line.lstrip().startswith("```") or self._is_command(line.strip())


def index(lines: Sequence[str], start: int, is_command: Callable[[str], bool] = lambda _line: False) -> IndexedTable:
    """Index the table that starts at a line that HEAD matches."""
    ends = _Ends(lines, is_command)
    head = HEAD.match(lines[start])
    assert head is not None
    family, name = head[1] or "ip", head[2]
    chains: dict[str, _Span] = {}
    sets: dict[str, _Span] = {}
    number, count = start + 1, len(lines)
    rules = cut = 0
    while number < count:
        line = lines[number]
        if line[:1] == "}":
            table = _table(lines, family, name, chains, sets, cut) if family in FAMILIES else None
            return IndexedTable(table, rules, number + 1, [])
        block = _BLOCK.match(line)
        if block is None:
            if is_cut_mark(line):
                cut = cut or number + 1
            elif line.strip() and not line.startswith(("\tcomment ", "\tflags ", "#", "\t#")):
                return _parse_at_once(lines, start, ends)
            number += 1
            continue
        end = number + 1
        while end < count and lines[end] != "\t}":
            if not lines[end].startswith("\t\t") and lines[end].strip() and not is_cut_mark(lines[end]):
                return _parse_at_once(lines, start, ends)
            end += 1
        if end >= count:
            break
        kind = block[1]
        if block[2] in (chains if kind == "chain" else sets):
            # The end of this table and the beginning of the next are missing.
            cut = cut or number + 1
        span = _Span(number + 1, end)
        if kind == "chain":
            chains[block[2] or ""] = span
            rules += end - number - 1 - _header_lines(lines, span)
        elif kind in ("set", "map"):
            sets[block[2] or ""] = span
        number = end + 1
    return _parse_at_once(lines, start, ends)


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
    lines: Sequence[str],
    family: str,
    name: str,
    chain_spans: dict[str, _Span],
    set_spans: dict[str, _Span],
    cut: int = 0,
) -> Table:
    def build_chain(chain: str) -> Chain:
        """Parse the lines of one chain."""
        span = chain_spans[chain]
        return parse_chain("\n".join(lines[span.first : span.end]) + "\n}\n", chain)

    def numbers(chain: str) -> list[int]:
        """Return the line numbers, from 1, of the lines after a chain's header."""
        span = chain_spans[chain]
        return list(range(span.first + _header_lines(lines, span) + 1, span.end + 1))

    bases = tuple(
        chain
        for chain, span in chain_spans.items()
        if any(lines[n].startswith("\t\ttype ") for n in range(span.first, min(span.first + 2, span.end)))
    )
    chains = LazyChains(chain_spans, build_chain, bases, numbers, lambda number: lines[number - 1].strip())
    sets = LazyMapping(set_spans, lambda one: _set(lines, set_spans[one], one))
    return Table(family=FAMILIES[family], name=name, chains=chains, sets=sets, partial=_cut_text(cut, name))


def _cut_text(line: int, name: str) -> str:
    return f"the text is cut in line {line}, in table {name}" if line else ""


def _set(lines: Sequence[str], span: _Span, name: str) -> Set:
    inside = lines[span.first : span.end]
    at = next((n for n, line in enumerate(inside) if line.startswith("\t\telements = {")), len(inside))
    header = parse_set("\n".join(inside[:at]) + "\n}\n", name)
    if at == len(inside) or header.dynamic or header.unsupported:
        return header
    if not _closed(inside[at:]):
        return Set(name=name, key=(), unsupported=CUT)
    elements = _plain_elements("\n".join(inside[at:]), header.data)
    if elements is not None:
        return msgspec.structs.replace(header, elements=elements)
    return parse_set("\n".join(inside) + "\n}\n", name)


def _closed(elements: Sequence[str]) -> bool:
    """Return True if the line that opens the elements has its end. The lines between the two may be any number."""
    text = "".join(elements)
    return text.count("{") <= text.count("}")


def _parse_at_once(lines: Sequence[str], start: int, ends: _Ends) -> IndexedTable:
    """Parse a table whose end is where its braces close, or where something else begins."""
    depth = cut = 0
    opened = ""
    number = start
    while number < len(lines) and not (number > start and ends.at(number)):
        bare = _QUOTED.sub("", lines[number]).partition("#")[0]
        begins = BARE_BLOCK.match(lines[number])
        if depth == 1 and begins:
            opened = bare.split()[1]
        elif number > start and (begins if depth > 1 else depth == 1 and _is_stray(bare)):
            cut = cut or number + 1
        depth += bare.count("{") - bare.count("}")
        if is_cut_mark(lines[number]) and depth < 2:
            cut = cut or number + 1
        if depth <= 0:
            tables = parse_ruleset("\n".join(lines[start : number + 1])).tables
            table = _with_lines(_cut(tables[0], cut), lines, start, number) if tables else None
            return IndexedTable(table, _rule_count(tables), number + 1, [])
        number += 1
    tables = parse_ruleset("\n".join(lines[start:number])).tables
    problem = (number, f"the table that begins in line {start + 1} has no end: the dump is cut off")
    table = None
    if tables:
        table = _with_lines(_cut(tables[0], number, opened if depth > 1 else ""), lines, start, number)
    return IndexedTable(table, _rule_count(tables), number, [problem])


def _is_stray(line: str) -> bool:
    """Return True for a line of a chain or a set outside of both: the line that begins it is missing."""
    return line.strip() not in ("", "}", "}}") and not line.lstrip().startswith(_BETWEEN_BLOCKS)


def _with_lines(table: Table, lines: Sequence[str], first: int, end: int) -> Table:
    """Return a table with the lines of its rules, for each chain whose rules are one line each."""
    numbers: dict[str, list[int]] = {}
    inside: list[int] | None = None
    for number in range(first, end):
        line = lines[number].strip()
        begins = _CHAIN.match(line)
        if begins is not None:
            inside = numbers[begins[1]] = []
        elif line.startswith("}"):
            inside = None
        elif inside is not None and line and not line.startswith(_NO_RULES) and not is_cut_mark(line):
            inside.append(number + 1)

    def lines_of(chain: str) -> list[int]:
        """Return the line of each rule of a chain, or nothing if not every line is a rule."""
        found = numbers.get(chain, [])
        return found if len(found) == len(table.chains[chain].rules) else []

    bases = tuple(chain.name for chain in base_chains(table.chains))
    chains = LazyChains(
        table.chains, table.chains.__getitem__, bases, lines_of, lambda number: lines[number - 1].strip()
    )
    return msgspec.structs.replace(table, chains=chains)


def _cut(table: Table, line: int, opened: str = "") -> Table:
    """Return a table that is cut in a line, which is in the block `opened` or outside of all blocks."""
    if not line:
        return table
    chains, sets = dict(table.chains), dict(table.sets)
    if opened in chains:
        chain = chains[opened]
        # The last statement may be incomplete, so it is not what the kernel has.
        chains[opened] = msgspec.structs.replace(chain, rules=(*chain.rules[:-1], gap_rule()))
    elif opened:
        sets[opened] = Set(name=opened, key=(), unsupported=CUT)
    return msgspec.structs.replace(table, chains=chains, sets=sets, partial=_cut_text(line, table.name))


def index_bare_blocks(
    lines: Sequence[str], start: int, is_command: Callable[[str], bool] = lambda _line: False
) -> IndexedTable:
    """Parse chains, sets, and maps that a user copied without their table. They belong to one table."""
    ends = _Ends(lines, is_command)
    depth, number, last = 0, start, start
    while number < len(lines) and not ends.at(number):
        if depth == 0 and lines[number].strip() and not BARE_BLOCK.match(lines[number]):
            break
        bare = _QUOTED.sub("", lines[number]).partition("#")[0]
        depth += bare.count("{") - bare.count("}")
        number += 1
        if lines[number - 1].strip():
            last = number
    text = "\n".join(lines[start:last])
    family = "ip6" if _ADDRESS_6.search(text) else "ip"
    name = "kube-proxy" if _KUBE_PROXY.search(text) else "(not named)"
    tables = parse_ruleset(f"table {family} {name.replace(' ', '-')} {{\n{text}\n" + "}" * (depth + 1)).tables
    table = msgspec.structs.replace(
        _with_lines(tables[0], lines, start, last),
        name=name,
        partial=f"the input contains only a part of table {name}, from line {start + 1} on",
    )
    return IndexedTable(table, _rule_count(tables), max(last, start + 1), [])


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
    if "-" in word or "*" in word or ".." in word:
        return None
    if ":" in word and "." in word:
        try:
            return ipv6_text(word)
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
