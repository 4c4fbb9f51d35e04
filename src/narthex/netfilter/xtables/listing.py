"""`iptables -L`: a chain's block of a listing to rules.

Each line is put into the words of iptables-save and read as such; what has no words stays `Unknown`. Without `-v` the
listing leaves interfaces out, so every rule gets an `OmittedMatch` that says so. `column -t`, long dashes and stars of a wiki, and
a comment that was broken into two lines, are borne with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from narthex.model.net import IPFamily
from narthex.netfilter.ast import OmittedMatch, Rule, Unknown
from narthex.netfilter.dump.transcript import Command, command_of
from narthex.netfilter.xtables.listed_words import save_words
from narthex.netfilter.xtables.parse import read_rule
from narthex.netfilter.xtables.words import SaveTextError

CHAIN = re.compile(r"\**Chain\s+(\S+)\s+\(\s*(?:policy\s+(\w+)[^)]*|\d+\s+references?|[^)]*references?[^)]*)\)\s*\**$")
"""A listing's first line."""
_HEAD = re.compile(r"(?:num\s+)?(?:pkts\s+bytes\s+)?target\s+prot\s+opt\b")
_DASHES = ("--", "—", "–", "-f", "!f", "-", "----")
_LEFT_OUT = re.compile(r"\.{3,}$|…$|\(.*(?:omitted|省略).*\)$")
NO_INTERFACES = "iptables -L without -v leaves out the interfaces that a rule asks for"


class Line:
    """A rule of a listing."""

    __slots__ = ("number", "rule", "text")

    def __init__(self, number: int, text: str, rule: Rule) -> None:
        self.number, self.text, self.rule = number, text, rule


class Columns:
    """Which columns stand before the target, and whether interfaces are told."""

    def __init__(self, head: str = "") -> None:
        words = head.split()
        self.before = (words[:1] == ["num"]) + 2 * ("pkts" in words)
        self.interfaces = "in" in words and "out" in words


class Listing:
    """One chain of a listing."""

    def __init__(self, lines: Sequence[str], start: int, command: Command, family: IPFamily) -> None:
        head = CHAIN.match(lines[start].strip())
        assert head is not None
        self.chain = head[1]
        self.policy = head[2] or "-"
        self.line = start + 1
        self.rules: list[Line] = []
        self.whole = not command.filtered
        self.next = self._read(lines, start + 1, family)

    def _read(self, lines: Sequence[str], number: int, family: IPFamily) -> int:
        columns = Columns()
        while number < len(lines):
            text = lines[number].strip().strip("*").strip()
            if not text:
                # Blogs and mails put empty lines anywhere; a listing ends where the next thing begins.
                number += 1
                if _is_rule_line(_peek(lines, number), columns):
                    continue
                break
            if CHAIN.match(text) or text.startswith("```") or command_of(lines[number].strip()) is not None:
                break
            if _HEAD.match(text):
                columns = Columns(text)
            elif _LEFT_OUT.search(text) and not _is_rule_line(text, columns):
                self.whole = False
            elif text.startswith("#"):
                pass
            elif _is_rule_line(text, columns):
                text, number = _whole(lines, number, text)
                self.rules.append(Line(number + 1, text, read_line(text, columns, family)))
            else:
                break
            number += 1
        return number


def loose(lines: Sequence[str], number: int, family: IPFamily) -> tuple[Line, int]:
    """A rule without its chain's head, as `grep` leaves it, and the index behind it."""
    text, last = _whole(lines, number, lines[number].strip().strip("*").strip())
    return Line(last + 1, text, read_line(text, Columns(), family)), last + 1


def _whole(lines: Sequence[str], number: int, text: str) -> tuple[str, int]:
    """A rule with the rest of a comment that was broken into two lines, and the last line's index."""
    behind = number + 1
    if "/*" in text and "*/" not in text and behind < len(lines):
        return text + lines[behind].strip().strip("*").strip(), behind
    return text, number


def _peek(lines: Sequence[str], number: int) -> str:
    return lines[number].strip() if number < len(lines) else ""


def _is_rule_line(text: str, columns: Columns) -> bool:
    return _parts(text, columns) is not None


def is_rule_line(text: str) -> bool:
    """Whether a line is a listing's rule, as `grep` leaves it, without a head."""
    return _parts(text, Columns()) is not None


def _parts(text: str, columns: Columns) -> tuple[str, str, list[str], str] | None:
    """Target, protocol, the columns behind the options, and the rest."""
    words = text.split()
    before = columns.before
    if not before and len(words) > 5 and words[0].isdigit():
        # Without its head: numbers of lines, figures, or both.
        before = next((n for n in range(1, 4) if not words[n].rstrip("KMGT").isdigit() or n == 3), 0)
    words = words[before:]
    at = next((n for n in range(1, min(3, len(words))) if words[n] in _DASHES), None)
    wanted = 4 if columns.interfaces else 2
    if at is None or len(words) < at + 1 + wanted:
        return None
    behind = words[at + 1 : at + 1 + wanted]
    rest = text.split(None, before + at + 1 + wanted)
    return (
        words[0] if at == 2 else "",
        words[at - 1],
        behind,
        rest[-1] if len(rest) > before + at + 1 + wanted else "",
    )


def read_line(text: str, columns: Columns, family: IPFamily) -> Rule:
    """A rule of a listing."""
    parts = _parts(text, columns)
    if parts is None:
        return Rule((Unknown(text),))
    target, protocol, behind, rest = parts
    try:
        words = save_words(target, protocol, behind, rest)
        rule = read_rule(f"-A X{words.text}", family)
    except (SaveTextError, ValueError):
        return Rule((Unknown(text),))
    unknown = tuple(Unknown(each) for each in words.unknown)
    unshown = () if columns.interfaces else (OmittedMatch(NO_INTERFACES),)
    last = rule.expressions[-1:] if words.has_target else ()
    matches = rule.expressions[: len(rule.expressions) - len(last)]
    return Rule((*unshown, *matches, *unknown, *last), rule.comment)
