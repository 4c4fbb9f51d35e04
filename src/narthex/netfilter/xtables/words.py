"""Words and options of an iptables-save line."""

from __future__ import annotations

import re
from collections.abc import Container

from narthex.netfilter.xtables.print import quoted


class SaveTextError(ValueError):
    """The text is not what iptables-save prints; the message says in which line."""


class Misread(Exception):
    """This match or target has no node that says the same."""


class Text(str):
    """A word that is a value whatever it looks like: it stood in quotes, or behind an option that takes any text."""

    __slots__ = ()


_TEXT_OPTIONS = frozenset(("--comment", "--log-prefix", "--nflog-prefix", "--ulog-prefix", "--string", "--hex-string"))
"""iptables-save leaves out the quotes of a text such as `-j`, which has no odd character."""


def split_words(line: str) -> list[str]:
    """Words of a line; inside double quotes a backslash keeps the next character as it is."""
    words = _split_quoted(line) if '"' in line else line.split()
    for position in range(1, len(words)):
        if words[position - 1] in _TEXT_OPTIONS and type(words[position - 1]) is str:
            words[position] = Text(words[position])
    return words


def _split_quoted(line: str) -> list[str]:
    words: list[str] = []
    for number, part in enumerate(_unescaped_quotes(line)):
        if number % 2:
            words.append(Text(_ESCAPE.sub(r"\1", part)))
        else:
            words += part.split()
    return words


_ESCAPE = re.compile(r"\\(.)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def _unescaped_quotes(line: str) -> list[str]:
    """The line cut at its quoted words: outside, inside, outside, …"""
    parts = _QUOTED.split(line)
    if any('"' in part for part in parts[::2]):
        raise SaveTextError("a quote is not closed")
    return parts


def is_word(word: str, words: Container[str]) -> bool:
    """Whether a word is one of these by its meaning, and not only a text that reads like it."""
    return type(word) is str and word in words


class Option:
    """`[!] --name value…` inside a match or target."""

    __slots__ = ("name", "negate", "values")

    def __init__(self, name: str, negate: bool, values: list[str]) -> None:
        self.name, self.negate, self.values = name, negate, values

    @property
    def value(self) -> str:
        """The only value. Raises Misread when there is none, or more."""
        if len(self.values) != 1:
            raise Misread
        return str(self.values[0])

    def text(self) -> str:
        """As it stood."""
        return " ".join([*(["!"] if self.negate else []), self.name, *(quoted(value) for value in self.values)])


def split_options(words: list[str]) -> list[Option]:
    """What stands behind the name of a match or target."""
    options: list[Option] = []
    negate = False
    for word in words:
        if is_word(word, ("!",)):
            negate = True
        elif not options or (type(word) is str and word.startswith("--")):
            options.append(Option(word, negate, []))
            negate = False
        else:
            options[-1].values.append(word)
    return options
