"""Parser for the text of iptables-save, of Narthex, any version of kube-proxy, and other tools.

A match or target becomes a node of the AST if one expresses it, else `Unknown` with its text. Nothing is guessed or
omitted, since a rule without one of its matches is a different rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from narthex.model import IPFamily, address
from narthex.model.lines import MAX_LINE
from narthex.netfilter.ast import Chain, Compare, Dnat, Expression, Field, Rule, Ruleset, Table, Unknown
from narthex.netfilter.xtables.lexer import SaveTextError, is_keyword, split_options, split_words
from narthex.netfilter.xtables.matches import read_match
from narthex.netfilter.xtables.targets import read_target
from narthex.netfilter.xtables.values import default_policy, hook_of, plain_network

CHAIN_OR_RULE = re.compile(r"(?:\[\d+:\d+\] )?-[ANP] \S|:\S+ (?:-|[A-Z]+)(?: \[|$)")
"""A line of a dump or of `iptables -S`, possibly after `grep`."""


def parse_save_text(text: str, family: IPFamily) -> Ruleset:
    """Parse a complete dump of `iptables-save`, with or without counters. Raises SaveTextError."""
    tables: list[Table] = []
    name = ""
    chains: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for number, line in _lines(text):
        if line.startswith("*"):
            name, chains, rules = line[1:].strip(), {}, {}
        elif not name:
            raise SaveTextError(f"line {number}: {line[:60]!r} precedes the first table (such as *nat)")
        elif line == "COMMIT":
            tables.append(_table(family, name, chains, rules))
            name = ""
        else:
            _parse_line(line, number, family, chains, rules)
    if name:
        raise SaveTextError(f"table {name} has no COMMIT: the dump is cut off")
    return Ruleset(tuple(tables))


def parse_rules(text: str, family: IPFamily) -> Mapping[str, tuple[Rule, ...]]:
    """Parse a part of a dump into rules by chain: lines of `grep`, of `iptables -S`, or of a bug report.

    Lines that are neither a rule nor the declaration of a chain are ignored, and so are table headers. Raises SaveTextError
    for an invalid rule.
    """
    chains: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for number, line in _lines(text):
        if CHAIN_OR_RULE.match(line):
            _parse_line(line, number, family, chains, rules)
    return {chain: tuple(rules.get(chain, ())) for chain in chains | dict.fromkeys(rules, "")}


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if line and not line.startswith("#"):
            yield number, line


def _table(family: IPFamily, name: str, policies: dict[str, str], rules: dict[str, list[Rule]]) -> Table:
    for chain in rules:
        policies.setdefault(chain, default_policy(name, chain))
    chains = {
        chain: Chain(name=chain, rules=tuple(rules.get(chain, ())), hook=hook_of(name, chain, policy))
        for chain, policy in policies.items()
    }
    return Table(family=family, name=name, chains=chains)


def _parse_line(line: str, number: int, family: IPFamily, chains: dict[str, str], rules: dict[str, list[Rule]]) -> None:
    try:
        if line.startswith("["):
            line = line.partition("]")[2].lstrip()
        if line.startswith(":"):
            chain, policy = line[1:].split()[:2]
            chains[chain] = policy
            return
        if len(line) > MAX_LINE:
            raise SaveTextError(f"longer than {MAX_LINE} characters")
        words = split_words(line)
        if words[0] == "-A":
            rules.setdefault(words[1], []).append(_rule(words[2:], family))
        elif words[0] == "-N":
            chains[words[1]] = "-"
        elif words[0] == "-P":
            chains[words[1]] = words[2]
        else:
            raise SaveTextError("neither a chain nor a rule")
    except (ValueError, IndexError) as error:
        raise SaveTextError(f"line {number}: {line[:120]!r}: {error}") from None


def long_rule(line: str) -> Unknown:
    """Return what a rule of more than MAX_LINE characters becomes. It is not parsed."""
    return Unknown(f"{line[:120]}... (a rule of {len(line)} characters)")


_REMARK = re.compile(r'(?:[^"#]++|"(?:[^"\\]++|\\.)*+"|(?<!\s)#)*+(?<=\s)#')


def without_remark(line: str) -> str:
    """Return a rule without the remark that a person wrote behind it: `-j ACCEPT  # the API server`."""
    found = _REMARK.match(line)
    return line[: found.end() - 1].rstrip() if found else line


def read_rule(line: str, family: IPFamily) -> Rule:
    """Parse one `-A` line of a dump, with or without counters. Raises SaveTextError for an incomplete line."""
    if len(line) > MAX_LINE:
        raise SaveTextError(f"{line[:120]!r}: longer than {MAX_LINE} characters")
    if "#" in line:
        line = without_remark(line)
    if line[:1] == "[":
        line = line.partition("]")[2].lstrip()
    try:
        return _common_rule(line, family) or _rule(split_words(line)[2:], family)
    except (ValueError, IndexError) as error:
        raise SaveTextError(f"{line[:120]!r}: {error}") from None


# ---- rules of the forms of which a large dump consists --------------------------------------------------------------

_COMMON = re.compile(
    r"-A \S+ (?:(! )?-s ([0-9a-f.:/]+) )?(?:(! )?-d ([0-9a-f.:/]+) )?(?:-p (tcp|udp|sctp) )?"
    r'(?:-m comment --comment (?:"([^"\\]*)"|([\w/.:][^"\s\\]*)) )?'
    r"(?:-m (?:(tcp|udp|sctp) (?:--dport (\d{1,5}) )?|statistic --mode random --probability ([01]\.\d+) ))?"
    r"-j ([A-Z]\S+)(?: --to-destination ([\d.]+):(\d{1,5}))?",
    re.ASCII,
)
"""Rules as kube-proxy's: 99 of 100 in a large dump, which would take three times as long word by word."""


def _common_rule(line: str, family: IPFamily) -> Rule | None:
    """Parse a rule of a common form as `_rule` does; None for any other form, and for invalid values."""
    found = _COMMON.fullmatch(line)
    if found is None:
        return None
    not_from, source, not_to, destination, protocol, comment, bare, match, port, probability, target, to, to_port = (
        found.groups()
    )
    expressions: list[Expression] = []
    try:
        if source:
            expressions.append(Compare(Field.SADDR, (plain_network(source),), bool(not_from)))
        if destination:
            expressions.append(Compare(Field.DADDR, (plain_network(destination),), bool(not_to)))
        rewritten = Dnat(address(to), int(to_port)) if to and family is IPFamily.IPV4 else None
    except ValueError:
        return None
    if protocol:
        expressions.append(_PROTOCOLS[protocol])
    if match:
        expressions += _plain_match((match, "--dport", port) if port else (match,))
    elif probability:
        expressions += _plain_match(("statistic", "--mode", "random", "--probability", probability))
    if to is None:
        expressions.append(read_target("-j", target, [], family))
    elif target == "DNAT" and rewritten is not None and 0 < int(to_port) <= 65535:
        expressions.append(rewritten)
    else:
        return None
    return Rule(tuple(expressions), comment or bare or "")


_PROTOCOLS = {name: Compare(Field.L4PROTO, (name,)) for name in ("tcp", "udp", "sctp")}

# ---- rules ---------------------------------------------------------------------------------------------------------

_FIELD_OPTIONS = {
    "-s": Field.SADDR,
    "--source": Field.SADDR,
    "-d": Field.DADDR,
    "--destination": Field.DADDR,
    "-i": Field.IIFNAME,
    "--in-interface": Field.IIFNAME,
    "-o": Field.OIFNAME,
    "--out-interface": Field.OIFNAME,
    "-p": Field.L4PROTO,
    "--protocol": Field.L4PROTO,
}
_FIELD_ORDER = {Field.SADDR: 0, Field.DADDR: 1, Field.IIFNAME: 2, Field.OIFNAME: 3, Field.L4PROTO: 4}
_MATCH = ("-m", "--match")
_TARGET = ("-j", "-g", "--jump", "--goto")
_STARTS = frozenset((*_FIELD_OPTIONS, *_MATCH, *_TARGET, "-f", "-c"))


def _rule(words: list[str], family: IPFamily) -> Rule:
    compares: list[Compare] = []
    rest: list[Expression] = []
    comment = ""
    position = 0
    while position < len(words):
        negate = is_keyword(words[position], ("!",))
        position += negate
        word = words[position]
        # The word after `-m`, `-j` or `-s` is its argument, whatever it is; `-f` has none.
        end = _segment_end(words, position + (1 if word == "-f" else 2))
        if word in _FIELD_OPTIONS:
            after = _options_start(words, position + 2, end)
            try:
                compares.append(_compare(_FIELD_OPTIONS[word], words[position + 1 : after], negate))
            except ValueError:
                rest.append(_unknown(words[position:after], negate))
            if after < end:
                # `-p tcp --dport 80` loads the match `tcp` by itself, wherever the options are.
                rest += read_match(_protocol(compares, rest), split_options(words[after:end]))
        elif word in _MATCH:
            match = tuple(words[position + 1 : end])
            if match[0] == "comment":
                comment = _comment(match)
            elif len(match) > _CACHED_WORDS or any(type(each) is not str for each in match):
                rest += read_match(match[0], split_options(words[position + 2 : end]))
            else:
                rest += _plain_match(match)
        elif word in _TARGET:
            options = split_options(words[position + 2 : end]) if end > position + 2 else []
            rest.append(read_target(word, words[position + 1], options, family))
        elif word != "-c":
            rest.append(_unknown(words[position:end], negate))
        position = end
    compares.sort(key=lambda compare: _FIELD_ORDER[compare.field])
    return Rule((*compares, *rest), comment)


def _comment(match: tuple[str, ...]) -> str:
    """Return the text of `comment --comment TEXT`. Raises ValueError for any other form."""
    if len(match) != 3:
        raise ValueError("a comment is one text")
    return str(match[2])


_CACHED_WORDS = 16
"""Longest match in words that is cached, so that the cache stays small whatever a dump contains."""


@lru_cache(maxsize=4096)
def _plain_match(words: tuple[str, ...]) -> tuple[Expression, ...]:
    """Parse a match without quoted words. Most matches of a large dump are the same few."""
    return tuple(read_match(words[0], split_options(list(words[1:]))))


def _options_start(words: list[str], position: int, end: int) -> int:
    """Return the position of the first option of a match in `words[position:end]`, or `end`."""
    for at in range(position, end):
        word = words[at]
        if type(word) is str and word.startswith("--"):
            return at - 1 if is_keyword(words[at - 1], ("!",)) else at
    return end


def _protocol(compares: list[Compare], rest: list[Expression]) -> str:
    """Return the protocol that a rule matches, or ""."""
    found = (each for each in (*compares, *rest) if isinstance(each, Compare))
    values = next((each.values for each in found if each.field is Field.L4PROTO and not each.negate), ())
    return str(values[0]) if len(values) == 1 else ""


def _segment_end(words: list[str], position: int) -> int:
    """Return the position of the next option that starts a match, a compared field, or a target."""
    for number in range(position, len(words)):
        word = words[number]
        # Few words are in the sets, so that these are looked at first: this loop takes a tenth of the time for a large dump.
        if (word in _STARTS and is_keyword(word, _STARTS)) or (
            word == "!"
            and is_keyword(word, ("!",))
            and number + 1 < len(words)
            and is_keyword(words[number + 1], _STARTS)
        ):
            return number
    return max(position, len(words))


def _unknown(words: list[str], negate: bool) -> Unknown:
    return Unknown(" ".join((*(["!"] if negate else []), *words)))


def _compare(field: Field, values: list[str], negate: bool) -> Compare:
    # iptables before 1.4 wrote `-s ! 10.0.0.1`.
    if values[:1] == ["!"]:
        negate, values = True, values[1:]
    if len(values) != 1:
        raise ValueError("expected one value")
    value = values[0]
    if field in (Field.SADDR, Field.DADDR):
        value = plain_network(value)
    elif field in (Field.IIFNAME, Field.OIFNAME):
        value = value[:-1] + "*" if value.endswith("+") else value
    elif field is Field.L4PROTO:
        value = value.lower()
    return Compare(field, (value,), negate)
