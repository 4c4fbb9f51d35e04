"""Text of iptables-save to typed rules: our own, kube-proxy's of any age, and anybody else's.

A match or target becomes a node of the AST where one says the same; otherwise its text is kept as `Unknown`. Nothing is
guessed and nothing is left out, since a rule without one of its matches is another rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from narthex.model.net import IPFamily
from narthex.netfilter.ast import Chain, Compare, Expression, Field, Rule, Ruleset, Table, Unknown
from narthex.netfilter.xtables.extensions import read_match, read_target
from narthex.netfilter.xtables.values import builtin_chains, hook_of, plain_network
from narthex.netfilter.xtables.words import SaveTextError, is_word, split_options, split_words


def parse(text: str, family: IPFamily) -> Ruleset:
    """All tables of a whole dump, as `iptables-save` prints it, with or without figures. Raises SaveTextError."""
    tables: list[Table] = []
    name = ""
    chains: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for number, line in _lines(text):
        if line.startswith("*"):
            name, chains, rules = line[1:].strip(), {}, {}
        elif not name:
            raise SaveTextError(f"line {number}: {line[:60]!r} stands before the first table, which *nat would begin")
        elif line == "COMMIT":
            tables.append(_table(family, name, chains, rules))
            name = ""
        else:
            _take(line, number, family, chains, rules)
    if name:
        raise SaveTextError(f"table {name} has no COMMIT: the dump is cut off")
    return Ruleset(tuple(tables))


def parse_rules(text: str, family: IPFamily) -> Mapping[str, tuple[Rule, ...]]:
    """The rules in a fragment of a dump, by chain: lines of `grep`, of `iptables -S`, of a bug report.

    Lines that are neither a rule nor a chain's declaration are passed over, and so are table headers.
    Raises SaveTextError for a rule that cannot be read.
    """
    chains: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for number, line in _lines(text):
        if _CHAIN_OR_RULE.match(line):
            _take(line, number, family, chains, rules)
    return {chain: tuple(rules.get(chain, ())) for chain in chains | dict.fromkeys(rules, "")}


_CHAIN_OR_RULE = re.compile(r"(?:\[\d+:\d+\] )?-[ANP] \S|:\S+ (?:-|[A-Z]+)(?: \[|$)")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if line and not line.startswith("#"):
            yield number, line


def _table(family: IPFamily, name: str, policies: dict[str, str], rules: dict[str, list[Rule]]) -> Table:
    for chain in rules:
        policies.setdefault(chain, "ACCEPT" if chain in builtin_chains(name) else "-")
    chains = {
        chain: Chain(name=chain, rules=tuple(rules.get(chain, ())), hook=hook_of(name, chain, policy))
        for chain, policy in policies.items()
    }
    return Table(family=family, name=name, chains=chains)


def _take(line: str, number: int, family: IPFamily, chains: dict[str, str], rules: dict[str, list[Rule]]) -> None:
    """One line inside a table."""
    try:
        if line.startswith("["):
            line = line.partition("]")[2].lstrip()
        if line.startswith(":"):
            chain, policy = line[1:].split()[:2]
            chains[chain] = policy
            return
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


def read_rule(line: str, family: IPFamily) -> Rule:
    """One `-A` line of a dump, with or without figures. Raises SaveTextError for one that is cut off or torn."""
    if line.startswith("["):
        line = line.partition("]")[2].lstrip()
    try:
        return _rule(split_words(line)[2:], family)
    except (ValueError, IndexError) as error:
        raise SaveTextError(f"{line[:120]!r}: {error}") from None


# ---- a rule --------------------------------------------------------------------------------------------------------

_BASIC = {
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
_RANK = {Field.SADDR: 0, Field.DADDR: 1, Field.IIFNAME: 2, Field.OIFNAME: 3, Field.L4PROTO: 4}
_MATCH = ("-m", "--match")
_TARGET = ("-j", "-g", "--jump", "--goto")
_STARTS = frozenset((*_BASIC, *_MATCH, *_TARGET, "-f", "-c"))


def _rule(words: list[str], family: IPFamily) -> Rule:
    basics: list[Compare] = []
    rest: list[Expression] = []
    comment = ""
    position = 0
    while position < len(words):
        negate = is_word(words[position], ("!",))
        position += negate
        word = words[position]
        # The word behind `-m`, `-j` or `-s` belongs to it, whatever it is; `-f` stands alone.
        end = _segment_end(words, position + (1 if word == "-f" else 2))
        if word in _BASIC:
            try:
                basics.append(_basic(_BASIC[word], words[position + 1 : end], negate))
            except ValueError:
                rest.append(_unknown(words[position:end], negate))
        elif word in _MATCH:
            asked = tuple(words[position + 1 : end])
            if asked[0] == "comment":
                comment = split_options(words[position + 2 : end])[0].value
            elif any(type(each) is not str for each in asked):
                rest += read_match(asked[0], split_options(words[position + 2 : end]))
            else:
                rest += _plain_match(asked)
        elif word in _TARGET:
            rest.append(read_target(word, words[position + 1], split_options(words[position + 2 : end]), family))
        elif word != "-c":
            rest.append(_unknown(words[position:end], negate))
        position = end
    basics.sort(key=lambda compare: _RANK[compare.field])
    return Rule((*basics, *rest), comment)


@lru_cache(maxsize=4096)
def _plain_match(words: tuple[str, ...]) -> tuple[Expression, ...]:
    """A match without quoted words: most of a large dump's are the same few."""
    return tuple(read_match(words[0], split_options(list(words[1:]))))


def _segment_end(words: list[str], position: int) -> int:
    """Where the next match, address or target begins."""
    while position < len(words):
        if is_word(words[position], _STARTS):
            return position
        if is_word(words[position], ("!",)) and position + 1 < len(words) and is_word(words[position + 1], _STARTS):
            return position
        position += 1
    return position


def _unknown(words: list[str], negate: bool) -> Unknown:
    return Unknown(" ".join((*(["!"] if negate else []), *words)))


def _basic(field: Field, values: list[str], negate: bool) -> Compare:
    # `-s ! 10.0.0.1` is how iptables wrote it before 1.4.
    if values[:1] == ["!"]:
        negate, values = True, values[1:]
    if len(values) != 1:
        raise ValueError("one value is wanted")
    value = values[0]
    if field in (Field.SADDR, Field.DADDR):
        value = plain_network(value)
    elif field in (Field.IIFNAME, Field.OIFNAME):
        value = value[:-1] + "*" if value.endswith("+") else value
    elif field is Field.L4PROTO:
        value = value.lower()
    return Compare(field, (value,), negate)
