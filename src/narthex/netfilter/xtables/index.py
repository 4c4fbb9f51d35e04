"""One pass over an iptables-save dump that finds the lines of each chain. Rules are parsed when a chain is accessed.

The pass reports invalid lines (neither chain nor rule, an open quote, a truncated rule). Whether the matches and the target
of a rule are understood is known only when its chain is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from narthex.model import BoundedProblems, IPFamily, omitted_text
from narthex.model.lines import MAX_LINE
from narthex.netfilter.ast import Chain, Rule, Table, Unknown
from narthex.netfilter.cuts import ENDS, gap_rule, is_cut_mark
from narthex.netfilter.lazy import IndexedTable, LazyChains, LineProblem
from narthex.netfilter.xtables.lexer import SaveTextError
from narthex.netfilter.xtables.parse import long_rule, read_rule
from narthex.netfilter.xtables.values import default_policy, hook_of

_INCOMPLETE = (" -j", " -g", " -m", " !", "--comment")
"""Endings of a truncated rule."""
_COUNTERS = re.compile(r"\[\d+:\d+\] ")
_QUOTES = re.compile(r'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+')


class RuleSpans:
    """The rules of a table by chain, as spans of lines."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines
        self.policies: dict[str, str] = {}
        self.spans: dict[str, list[int]] = {}
        """Chain to [first, end, first, …], indexes of lines. The end is exclusive."""
        self.rules = 0
        self.cut = 0
        """Number of the first line, from 1, where the text is cut."""
        self.after_cut = False
        """The first rule after a cut has not been seen yet."""
        self.open_end = ""
        """The chain whose last rules may be missing, since the text ends after it."""
        self.problems: BoundedProblems[LineProblem] = BoundedProblems(lambda count: (0, omitted_text(count)))

    def add(self, chain: str, first: int, end: int) -> None:
        """Add consecutive rules of a chain."""
        if self.after_cut and chain not in self.spans:
            # Lines before the first one of this chain may be missing, too.
            self.spans[chain] = [self.cut - 1, self.cut]
        self.after_cut = False
        self.spans.setdefault(chain, []).extend((first, end))
        self.rules += end - first

    def declare(self, line: str) -> None:
        """Add the chain of a line such as `:KUBE-SVC-… - [0:0]`. A large dump has as many of these as chains."""
        name_end = line.find(" ")
        policy_end = line.find(" ", name_end + 1)
        self.policies[line[1:name_end]] = line[name_end + 1 : policy_end if policy_end > 0 else None].strip()

    def add_cut(self, chain: str, number: int) -> None:
        """Add a line after a rule of a chain that says that lines were left out."""
        if chain:
            self.spans.setdefault(chain, []).extend((number, number + 1))
        self.cut = number + 1
        self.after_cut = True

    def end(self, name: str, chain: str, number: int) -> None:
        """Report that the table ends after a chain, without COMMIT."""
        self.cut = self.cut or number
        self.open_end = chain
        self.problems.append((number, f"table {name} has no COMMIT: the dump is cut off"))

    def check(self, line: str, number: int) -> None:
        """Report a rule with an open quote, or one that is truncated."""
        if len(line) > MAX_LINE:
            self.problems.append((number + 1, f"{line[:120]!r}: longer than {MAX_LINE} characters, not read"))
        elif not _QUOTES.fullmatch(line):
            self.problems.append((number + 1, f"{line[:120]!r}: a quote is not closed"))
        elif line.endswith(_INCOMPLETE) or len(line.split(None, 2)) < 2:
            self.problems.append((number + 1, f"{line[:120]!r}: the rule is cut off"))

    def table(self, name: str, family: IPFamily, legacy: bool = False) -> Table:
        """Return the table. Its chains are parsed when they are accessed."""
        policies = self.policies
        for chain in self.spans:
            policies.setdefault(chain, default_policy(name, chain))

        def numbers(chain: str) -> list[int]:
            """Return the line number, from 1, of each rule of a chain."""
            spans = self.spans.get(chain, [])
            return [n + 1 for at in range(0, len(spans), 2) for n in range(spans[at], spans[at + 1])]

        def build(chain: str) -> Chain:
            """Parse the rules of a chain; mark where the dump may have cut off further rules."""
            spans = self.spans.get(chain, [])
            lines = [line for at in range(0, len(spans), 2) for line in self.lines[spans[at] : spans[at + 1]]]
            rules = tuple([rule_or_text(line.strip(), family) for line in lines])
            if self.cut and (not rules or chain == self.open_end):
                rules = (*rules, gap_rule())
            return Chain(
                name=chain, rules=rules, hook=hook_of(name, chain, policies[chain]) if chain in bases else None
            )

        partial = f"the text is cut in line {self.cut}, in table {name}" if self.cut else ""
        bases = tuple(chain for chain in policies if hook_of(name, chain) is not None)
        chains = LazyChains(policies, build, bases, numbers, lambda number: self.lines[number - 1].strip())
        return Table(family=family, name=name, chains=chains, legacy=legacy, partial=partial)


def rule_or_text(line: str, family: IPFamily) -> Rule:
    """Parse a rule. An invalid line becomes a rule with one `Unknown`."""
    if (line[:3] != "-A " or line[-1] in ENDS) and is_cut_mark(line):
        return gap_rule()
    try:
        return read_rule(line, family)
    except SaveTextError:
        return Rule((Unknown(line) if len(line) <= MAX_LINE else long_rule(line),))


def index(
    lines: Sequence[str],
    start: int,
    family: IPFamily,
    legacy: bool = False,
    is_command: Callable[[str], bool] = lambda _line: False,
) -> IndexedTable:
    """Index the table that starts at a line such as `*nat`. It ends at COMMIT, at another table, or at a shell command."""
    name = lines[start].strip()[1:].strip()
    spans = RuleSpans(lines)
    number, count = start + 1, len(lines)
    chain, first = "", number
    latest, complete = "", False
    while number < count:
        line = lines[number]
        at = 0 if line[:3] == "-A " else line.find("-A ") if line[:1] == "[" else -1
        if at >= 0:
            end = line.find(" ", at + 3)
            here = line[at + 3 : end] if end > 0 else line[at + 3 :]
            if here != chain:
                if chain:
                    spans.add(chain, first, number)
                chain, first = here, number
            if "\\" in line or line.count('"') & 1 or line.endswith(_INCOMPLETE) or not here or len(line) > MAX_LINE:
                spans.check(line, number)
            number += 1
            continue
        if chain:
            spans.add(chain, first, number)
            latest, chain = chain, ""
        ended = False
        if line[:1] == ":" and " " in line:
            spans.declare(line)
        elif is_cut_mark(line):
            spans.add_cut(latest, number)
        elif is_command(line.strip()):
            ended = True
        else:
            complete, ended = _unusual_line(line, number, spans)
        number += complete or not ended
        if ended:
            break
    if chain:
        spans.add(chain, first, number)
    if not complete:
        spans.end(name, chain or latest, number)
    return IndexedTable(
        spans.table(name, family, legacy), spans.rules, number, spans.problems.kept, spans.problems.omitted
    )


def _unusual_line(line: str, number: int, spans: RuleSpans) -> tuple[bool, bool]:
    """Add a line that is not in the format of iptables-save. Return whether it is COMMIT, and whether the table ends."""
    bare = _COUNTERS.sub("", line.strip(), count=1)
    if bare.startswith("-A "):
        spans.check(bare, number)
        spans.add((bare.split(None, 2)[1:2] or [""])[0], number, number + 1)
    elif bare == "COMMIT":
        return True, True
    elif bare.startswith(("*", "# Completed", "# Generated", "```")):
        return False, True
    elif bare.startswith(":") and len(bare.split()) >= 2:
        words = bare[1:].split()
        spans.policies[words[0]] = words[1]
    elif bare and not bare.startswith("#"):
        spans.problems.append((number + 1, f"{bare[:120]!r} is neither a chain nor a rule"))
    return False, False
