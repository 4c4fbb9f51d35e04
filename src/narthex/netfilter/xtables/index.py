"""One pass over the lines of an iptables-save dump: which lines belong to which chain. Rules are read later.

The pass finds what is wrong with a line as such (neither chain nor rule, torn quotes, cut off); what a line asks for, and
whether that is understood, shows when its chain is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Chain, Rule, Table, Unknown
from narthex.netfilter.lazy import LazyChains
from narthex.netfilter.xtables.parse import read_rule
from narthex.netfilter.xtables.values import builtin_chains, hook_of
from narthex.netfilter.xtables.words import SaveTextError

Trouble = tuple[int, str]
"""A line's number, from 1, and what is wrong with it."""

_HANGING = (" -j", " -g", " -m", " !", "--comment")
_COUNTERS = re.compile(r"\[\d+:\d+\] ")
_QUOTES = re.compile(r'(?:[^"]|"(?:[^"\\]|\\.)*")*')


class Found(NamedTuple):
    """What a section of a dump holds."""

    table: Table
    rules: int
    next: int
    """Index of the line behind the section."""
    troubles: list[Trouble]


class Lines:
    """Rules by chain, as spans of a text's lines."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines
        self.policies: dict[str, str] = {}
        self.spans: dict[str, list[int]] = {}
        """Chain to [first, behind last, first, …], indexes of lines."""
        self.rules = 0

    def add(self, chain: str, first: int, behind: int) -> None:
        """Rules of a chain that stand together."""
        self.spans.setdefault(chain, []).extend((first, behind))
        self.rules += behind - first

    def table(self, name: str, family: IPFamily, legacy: bool = False) -> Table:
        """The table, to be read chain by chain."""
        policies = self.policies
        for chain in self.spans:
            policies.setdefault(chain, "ACCEPT" if chain in builtin_chains(name) else "-")

        def numbers(chain: str) -> list[int]:
            spans = self.spans.get(chain, [])
            return [n + 1 for at in range(0, len(spans), 2) for n in range(spans[at], spans[at + 1])]

        def make(chain: str) -> Chain:
            rules = tuple(rule_or_text(self.lines[number - 1].strip(), family) for number in numbers(chain))
            return Chain(name=chain, rules=rules, hook=hook_of(name, chain, policies[chain]))

        bases = tuple(chain for chain in policies if hook_of(name, chain) is not None)
        chains = LazyChains(policies, make, bases, numbers, lambda number: self.lines[number - 1].strip())
        return Table(family=family, name=name, chains=chains, legacy=legacy)


def rule_or_text(line: str, family: IPFamily) -> Rule:
    """A rule; a torn line stays a rule that nobody understands."""
    try:
        return read_rule(line, family)
    except SaveTextError:
        return Rule((Unknown(line),))


def index(lines: Sequence[str], start: int, family: IPFamily, legacy: bool = False) -> Found:
    """The section that begins with `*nat` at this index."""
    name = lines[start].strip()[1:]
    held = Lines(lines)
    troubles: list[Trouble] = []
    number, count = start + 1, len(lines)
    chain, first = "", number
    done = False
    while number < count:
        line = lines[number]
        at = 0 if line[:3] == "-A " else line.find("-A ") if line[:1] == "[" else -1
        if at >= 0:
            end = line.find(" ", at + 3)
            here = line[at + 3 : end] if end > 0 else line[at + 3 :]
            if here != chain:
                if chain:
                    held.add(chain, first, number)
                chain, first = here, number
            if "\\" in line or line.count('"') & 1 or line.endswith(_HANGING) or not here:
                _check(line, number, troubles)
            number += 1
            continue
        if chain:
            held.add(chain, first, number)
            chain = ""
        if line[:1] == ":" and " " in line:
            # `:KUBE-SVC-… - [0:0]`: there are as many of these as chains.
            name_end = line.find(" ")
            policy_end = line.find(" ", name_end + 1)
            held.policies[line[1:name_end]] = line[name_end + 1 : policy_end if policy_end > 0 else None].strip()
            number += 1
            continue
        bare = _COUNTERS.sub("", line.strip(), count=1)
        if bare.startswith("-A "):
            _check(bare, number, troubles)
            held.add((bare.split(None, 2)[1:2] or [""])[0], number, number + 1)
        elif bare == "COMMIT":
            number += 1
            done = True
            break
        elif bare.startswith(("*", "# Completed", "# Generated")):
            break
        elif bare.startswith(":") and len(bare.split()) >= 2:
            words = bare[1:].split()
            held.policies[words[0]] = words[1]
        elif bare and not bare.startswith("#"):
            troubles.append((number + 1, f"{bare[:120]!r} is neither a chain nor a rule"))
        number += 1
    if chain:
        held.add(chain, first, number)
    if not done:
        troubles.append((number, f"table {name} has no COMMIT: the dump is cut off"))
    return Found(held.table(name, family, legacy), held.rules, number, troubles)


def _check(line: str, number: int, troubles: list[Trouble]) -> None:
    if not _QUOTES.fullmatch(line):
        troubles.append((number + 1, f"{line[:120]!r}: a quote is not closed"))
    elif line.endswith(_HANGING) or len(line.split(None, 2)) < 2:
        troubles.append((number + 1, f"{line[:120]!r}: the rule is cut off"))
