"""A Corefile's outline: lines of words, and which lines stand in whose braces. What the words mean is none of its business.

Words are separated by blanks. `"…"` makes one word of anything (`\\"` is a quote in it), `#` outside of quotes begins
a comment, and a backslash at the end of a line joins the next one. `{` as the last word of a line opens a block, which
`}` alone on its line closes. `{$NAME}` and `{%NAME%}` in a word stand for variables; what they stand for is never read
as syntax.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

import msgspec

from narthex.dns.corefile.settings import Position
from narthex.model.problem import Problem, ProblemCollector, quoted

MOST_EXPANSIONS = 1000
"""Imports in one Corefile; more can only be a circle."""

Load = Callable[[str], tuple[tuple[str, str], ...]]
"""Paths and texts of the files that a pattern means, by name; none when a pattern with a wildcard meets nothing.
Raises OSError, also for a plain path that is not there."""

_VARIABLE = re.compile(r"\{%([^%{}]+)%\}|\{\$([^{}]+)\}")
_WILDCARDS = "*?["


class Word(msgspec.Struct, frozen=True):
    """One word of a line."""

    text: str
    literal: bool = False
    """It was quoted or holds a variable's value: never syntax."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A line, and its block if it has one."""

    words: tuple[Word, ...]
    """At least one."""
    where: Position
    children: tuple[Node, ...] | None = None

    @property
    def name(self) -> str:
        """The first word."""
        return self.words[0].text

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words behind it."""
        return tuple(word.text for word in self.words[1:])


class Outline:
    """Reads a file and all it imports. Faults are noted; what can be read is read all the same."""

    def __init__(self, load: Load, environment: Mapping[str, str]) -> None:
        self._load = load
        self._environment = environment
        self._snippets: dict[str, tuple[Node, ...]] = {}
        self._expansions = 0
        self._noted: dict[Problem, Position] = {}
        self.imported: list[str] = []
        """Paths and patterns of the imports met, as they were looked up."""

    def read(self, path: str, text: str) -> tuple[Node, ...]:
        """The top level of a file, imports replaced by what they stand for, snippets taken out."""
        return self._expand(_braceless(self._nodes(path, text, top=True)), top=True, within=(path,))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All that was noted, each once, by place."""
        places = {where.file: number for number, where in reversed([*enumerate(self._noted.values())])}
        return tuple(sorted(self._noted, key=lambda each: (places[self._noted[each].file], self._noted[each].line)))

    def error(self, where: Position, message: str) -> None:
        """Note a fault."""
        self._note(where, message, error=True)

    def warning(self, where: Position, message: str) -> None:
        """Note what works, but probably not as meant."""
        self._note(where, message, error=False)

    def _note(self, where: Position, message: str, *, error: bool) -> None:
        report = ProblemCollector(str(where))
        (report.error if error else report.warning)("", message)
        self._noted.setdefault(report.problems[0], where)

    def _nodes(self, path: str, text: str, *, top: bool) -> tuple[Node, ...]:
        lines = [(words, where) for words, where in self._lines(path, text) if words]
        if top:
            lines = _joined(lines)
        stack: list[tuple[tuple[Word, ...], Position, list[Node]]] = []
        found: list[Node] = []
        for words, where in lines:
            opens = len(words) > 1 and words[-1] == Word("{")
            if words == (Word("}"),):
                if not stack:
                    self.error(where, "} closes nothing")
                    continue
                opening, begun, before = stack.pop()
                node = Node(words=opening, where=begun, children=tuple(found))
                found = [*before, node]
                continue
            for word in words[:-1] if opens else words:
                if word in (Word("{"), Word("}")) or (not word.literal and re.search(r"[^{]\{$", word.text)):
                    self.error(
                        where,
                        f"{quoted(word.text)}: {{ must be a word of its own at the end of a line, }} alone on one",
                    )
            if opens:
                stack.append((words[:-1], where, found))
                found = []
            else:
                found.append(Node(words=words, where=where))
        while stack:
            opening, begun, before = stack.pop()
            self.error(begun, f"the {{ behind {quoted(opening[-1].text)} is never closed")
            found = [*before, Node(words=opening, where=begun, children=tuple(found))]
        return tuple(found)

    def _lines(self, path: str, text: str) -> list[tuple[tuple[Word, ...], Position]]:
        """Its lines' words. A quoted word may go on over several lines; the position is the first one's."""
        lines: list[tuple[tuple[Word, ...], Position]] = []
        words: list[Word] = []
        number = begun = 1
        text = text.removeprefix("\ufeff")
        for match in _LEXEME.finditer(text):
            kind, lexeme = match.lastgroup, match[0]
            if kind == "end":
                lines.append((tuple(words), Position(path, begun)))
                words = []
                begun = number + 1
            elif kind == "word":
                words.append(self._word(lexeme))
            elif kind == "quoted":
                words.append(self._word(lexeme[1:-1].replace('\\"', '"'), literal=True))
            elif kind == "open":
                self.error(Position(path, number), 'the " is never closed')
            number += lexeme.count("\n")
        lines.append((tuple(words), Position(path, begun)))
        return lines

    def _word(self, text: str, *, literal: bool = False) -> Word:
        expanded = _VARIABLE.sub(lambda match: self._environment.get(match[1] or match[2], ""), text)
        return Word(expanded, literal or expanded != text)

    def _expand(self, nodes: tuple[Node, ...], *, top: bool, within: tuple[str, ...]) -> tuple[Node, ...]:
        found: list[Node] = []
        for node in nodes:
            first = node.words[0]
            if top and len(node.words) == 1 and re.fullmatch(r"\(.*\)", first.text):
                self._define(first.text[1:-1], node)
            elif first == Word("import"):
                found += self._import(node, top=top, within=within)
            elif node.children is None:
                found.append(node)
            else:
                inside = self._expand(node.children, top=False, within=within)
                found.append(msgspec.structs.replace(node, children=inside))
        return tuple(found)

    def _define(self, name: str, node: Node) -> None:
        if not name or node.children is None:
            self.error(node.where, "a snippet is written (NAME) { … }")
        elif name in self._snippets:
            self.error(node.where, f"snippet {quoted(name)} is there already")
        else:
            self._snippets[name] = node.children

    def _import(self, node: Node, *, top: bool, within: tuple[str, ...]) -> tuple[Node, ...]:
        if node.children is not None or len(node.words) != 2 or not node.arguments[0]:
            self.error(node.where, "import takes one argument: a snippet, a file, or a pattern of files")
            return ()
        what = node.arguments[0]
        self._expansions += 1
        if self._expansions > MOST_EXPANSIONS or f"({what})" in within:
            self.error(node.where, f"import {quoted(what)} goes round in a circle")
            return ()
        if what in self._snippets:
            return self._expand(self._snippets[what], top=top, within=(*within, f"({what})"))
        pattern = posixpath.normpath(posixpath.join(posixpath.dirname(node.where.file), what))
        if sum(pattern.count(char) for char in _WILDCARDS) > 1 or "[" in pattern:
            self.error(node.where, f"import {quoted(what)}: one * or ? is allowed, no more")
            return ()
        self.imported.append(pattern)
        try:
            files = self._load(pattern)
        except OSError as error:
            self.error(
                node.where, f"import {quoted(what)}: {error.strerror or error}; there is no such snippet, either"
            )
            return ()
        if not files:
            self.warning(node.where, f"import {quoted(what)}: no file is named so")
        found: list[Node] = []
        for path, text in files:
            if path in within:
                self.error(node.where, f"import {quoted(what)} goes round in a circle")
                continue
            nodes = self._nodes(path, text, top=top)
            found += self._expand(_braceless(nodes) if top else nodes, top=top, within=(*within, path))
        return tuple(found)


_LEXEME = re.compile(
    r"""(?P<end>\n)
    | (?P<blank>(?:\\\r?\n|[^\S\n])+)
    | (?P<comment>\#[^\n]*)
    | (?P<quoted>"(?:\\"|[^"])*")
    | (?P<open>"[^"]*)
    | (?P<word>(?:(?!\\\r?\n)[^\s\#])+)
    | (?P<stray>\\)""",
    re.VERBOSE,
)


def _joined(lines: list[tuple[tuple[Word, ...], Position]]) -> list[tuple[tuple[Word, ...], Position]]:
    """At the top level, keys go on behind a comma, and `{` may stand on the line below them."""
    found: list[tuple[tuple[Word, ...], Position]] = []
    depth = 0
    for words, where in lines:
        goes_on = found and depth == 0 and (found[-1][0][-1].text.endswith(",") or words == (Word("{"),))
        if goes_on and found[-1][0] != (Word("}"),):
            found[-1] = ((*found[-1][0], *words), found[-1][1])
        else:
            found.append((words, where))
        depth += words[-1] == Word("{")
        depth -= words == (Word("}"),)
    return found


def _braceless(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """A file of a single server block may leave its braces out: the first line is the keys, all others the block."""
    for number, node in enumerate(nodes):
        if node.children is None and node.words[0] != Word("import"):
            rest = nodes[number + 1 :]
            return (*nodes[:number], msgspec.structs.replace(node, children=rest))
        if node.children is not None and not node.name.startswith("("):
            break
    return nodes
