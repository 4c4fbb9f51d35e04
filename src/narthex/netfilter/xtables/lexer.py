"""Splits the lines of iptables-save into words, and the arguments of matches and targets into options."""

from __future__ import annotations

import re
from collections.abc import Container

from narthex.netfilter.xtables.print import quoted


class SaveTextError(ValueError):
    """Text that is not the output of iptables-save. The message contains the line number."""


class NoEquivalentNode(Exception):
    """A match or target that no node of the AST expresses."""


class ValueWord(str):
    """A word that is a value whatever its content: it was quoted, or follows an option that takes any text."""

    __slots__ = ()


_TEXT_OPTIONS = frozenset(("--comment", "--log-prefix", "--nflog-prefix", "--ulog-prefix", "--string", "--hex-string"))
"""Options whose values may look like options: iptables-save does not quote a text such as `-j`."""
_ESCAPE = re.compile(r"\\(.)")
_PIECE = re.compile(r'"((?:[^"\\]++|\\.)*+)"|"|[^"]++', re.DOTALL)
"""A word in quotes, a quote that is not closed, or what is outside of quotes."""


def split_words(line: str) -> list[str]:
    """Split a line into words. Inside double quotes, a backslash escapes the next character. Raises SaveTextError."""
    words = _split_quoted(line) if '"' in line else line.split()
    for position in range(1, len(words)):
        if words[position - 1] in _TEXT_OPTIONS and type(words[position - 1]) is str:
            words[position] = ValueWord(words[position])
    return words


def _split_quoted(line: str) -> list[str]:
    words: list[str] = []
    if "\\" not in line:
        pieces = line.split('"')
        if not len(pieces) % 2:
            raise SaveTextError("a quote is not closed")
        for number, piece_text in enumerate(pieces):
            if number % 2:
                words.append(ValueWord(piece_text))
            else:
                words += piece_text.split()
        return words
    for piece in _PIECE.finditer(line):
        if piece[1] is not None:
            words.append(ValueWord(_ESCAPE.sub(r"\1", piece[1])))
        elif piece[0] == '"':
            raise SaveTextError("a quote is not closed")
        else:
            words += piece[0].split()
    return words


def is_keyword(word: str, keywords: Container[str]) -> bool:
    """Return True if a word is one of the keywords and not a value that looks like one."""
    return type(word) is str and word in keywords


class Option:
    """`[!] --name value…` of a match or target."""

    __slots__ = ("name", "negate", "values")

    def __init__(self, name: str, negate: bool, values: list[str]) -> None:
        self.name, self.negate, self.values = name, negate, values

    @property
    def value(self) -> str:
        """The only value. Raises NoEquivalentNode if there is not exactly one."""
        if len(self.values) != 1:
            raise NoEquivalentNode
        return str(self.values[0])

    def text(self) -> str:
        """Return the option as written."""
        return " ".join([*(["!"] if self.negate else []), self.name, *(quoted(value) for value in self.values)])


Options = dict[str, Option]
"""Options by name."""


def split_options(words: list[str]) -> list[Option]:
    """Split the words after the name of a match or target into options."""
    options: list[Option] = []
    negate = False
    for word in words:
        if is_keyword(word, ("!",)):
            negate = True
        elif not options or (type(word) is str and word.startswith("--")):
            options.append(Option(word, negate, []))
            negate = False
        else:
            options[-1].values.append(word)
    return options


def only(options: Options, *names: str) -> None:
    """Raise NoEquivalentNode if there are other options, or negated ones."""
    if not options.keys() <= set(names) or any(option.negate for option in options.values()):
        raise NoEquivalentNode


def extension_text(flag: str, name: str, options: list[Option]) -> str:
    """Return a match (flag `-m`) or target (flag `-j`) as written."""
    return " ".join((f"{flag} {quoted(name)}", *(option.text() for option in options)))
