r"""The syntax of Corefiles: words, lines, blocks, snippets, and imports. The meaning of words is not considered here.

Words are separated by blanks. `"…"` quotes a word (`\"` is a quote in it), `#` outside quotes starts a comment, and a
backslash at the end of a line joins the next one. `{` as the last word of a line opens a block, which `}` alone on its line
closes. `{$NAME}` and `{%NAME%}` in a word are replaced by environment variables, whose values are never syntax.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

import msgspec

from narthex.dns.corefile.settings import CorefilePosition
from narthex.model import MAX_PROBLEMS, Problem, ProblemCollector, ProblemList, quoted

MAX_EXPANSIONS = 1000
"""Limit of imports in one Corefile; more are taken for a cycle."""
MAX_DEPTH = 20
"""Levels of blocks: those of servers, plugins, and options are three."""
MAX_LINES = 100_000
"""Lines of a Corefile with all imports, of which each can contain the same snippet again."""

LoadFiles = Callable[[str], tuple[tuple[str, str], ...]]
"""Returns paths and texts of the files that a pattern matches, sorted by path. Raises OSError, also if a path without
wildcards does not exist."""

_VARIABLE = re.compile(r"\{%([^%{}]+)%\}|\{\$([^{}]+)\}")
_WILDCARDS = "*?["


class CorefileWord(msgspec.Struct, frozen=True):
    """One word of a line."""

    text: str
    literal: bool = False
    """True if it was quoted or contains the value of a variable, so that it is never syntax."""


class CorefileNode(msgspec.Struct, frozen=True, kw_only=True):
    """A line with its block, if it has one."""

    words: tuple[CorefileWord, ...]
    """At least one word."""
    where: CorefilePosition
    children: tuple[CorefileNode, ...] | None = None

    @property
    def name(self) -> str:
        """The first word."""
        return self.words[0].text

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words after the first one."""
        return tuple(word.text for word in self.words[1:])


class CorefileReader:
    """Reads a Corefile and the files it imports. Collects errors and continues after them."""

    def __init__(self, load: LoadFiles, environment: Mapping[str, str]) -> None:
        self._load = load
        self._environment = environment
        self._snippets: dict[str, tuple[CorefileNode, ...]] = {}
        self._expansions = 0
        self._expanded = 0
        self._noted: dict[Problem, CorefilePosition] = {}
        self._unlisted = ProblemList(0)
        self.imported: list[str] = []
        """Paths and patterns of all imports so far."""

    def read(self, path: str, text: str) -> tuple[CorefileNode, ...]:
        """Return the top level of a file with imports expanded and snippet definitions removed."""
        return self._expand(_add_braces(self._nodes(path, text, top=True)), top=True, within=(path,))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All errors and warnings without duplicates, sorted by position."""
        order = {where.file: number for number, where in reversed([*enumerate(self._noted.values())])}
        kept = sorted(self._noted, key=lambda each: (order[self._noted[each].file], self._noted[each].line))
        return ProblemList(MAX_PROBLEMS).extend((*kept, *self._unlisted.problems)).problems

    def error(self, where: CorefilePosition, message: str) -> None:
        """Report an error."""
        self._note(where, message, error=True)

    def warning(self, where: CorefilePosition, message: str) -> None:
        """Report a warning."""
        self._note(where, message, error=False)

    def _note(self, where: CorefilePosition, message: str, *, error: bool) -> None:
        if len(self._noted) >= MAX_PROBLEMS:
            self._unlisted.count("error" if error else "warning")
            return
        report = ProblemCollector(str(where))
        (report.error if error else report.warning)("", message)
        self._noted.setdefault(report.problems[0], where)

    def _nodes(self, path: str, text: str, *, top: bool) -> tuple[CorefileNode, ...]:
        lines = [(words, where) for words, where in self._lines(path, text) if words]
        if top:
            lines = _join_key_lines(lines)
        stack: list[tuple[tuple[CorefileWord, ...], CorefilePosition, list[CorefileNode]]] = []
        found: list[CorefileNode] = []
        for words, where in lines:
            opens = len(words) > 1 and words[-1] == CorefileWord("{")
            if words == (CorefileWord("}"),):
                if not stack:
                    self.error(where, "} closes nothing")
                    continue
                opening, begun, before = stack.pop()
                before.append(CorefileNode(words=opening, where=begun, children=tuple(found)))
                found = before
                continue
            for word in words[:-1] if opens else words:
                if word in (CorefileWord("{"), CorefileWord("}")) or (
                    not word.literal and re.search(r"[^{]\{$", word.text)
                ):
                    self.error(
                        where,
                        f"{quoted(word.text)}: {{ must be a word of its own at the end of a line, }} alone on one",
                    )
            if opens and len(stack) >= MAX_DEPTH:
                self.error(where, f"blocks are nested more than {MAX_DEPTH} levels deep; the rest is not read")
                break
            if opens:
                stack.append((words[:-1], where, found))
                found = []
            else:
                found.append(CorefileNode(words=words, where=where))
        while stack:
            opening, begun, before = stack.pop()
            self.error(begun, f"the {{ behind {quoted(opening[-1].text)} is never closed")
            before.append(CorefileNode(words=opening, where=begun, children=tuple(found)))
            found = before
        return tuple(found)

    def _lines(self, path: str, text: str) -> list[tuple[tuple[CorefileWord, ...], CorefilePosition]]:
        """Return the words of each line. A quoted word may span lines; the position is that of the first line."""
        lines: list[tuple[tuple[CorefileWord, ...], CorefilePosition]] = []
        words: list[CorefileWord] = []
        number = begun = 1
        text = text.removeprefix("\ufeff")
        for match in _LEXEME.finditer(text):
            kind, lexeme = match.lastgroup, match[0]
            if kind == "end":
                lines.append((tuple(words), CorefilePosition(path, begun)))
                words = []
                begun = number + 1
            elif kind == "word":
                words.append(self._word(lexeme))
            elif kind == "quoted":
                words.append(self._word(lexeme[1:-1].replace('\\"', '"'), literal=True))
            elif kind == "open":
                self.error(CorefilePosition(path, number), 'the " is never closed')
            number += lexeme.count("\n")
        lines.append((tuple(words), CorefilePosition(path, begun)))
        return lines

    def _word(self, text: str, *, literal: bool = False) -> CorefileWord:
        expanded = _VARIABLE.sub(lambda match: self._environment.get(match[1] or match[2], ""), text)
        return CorefileWord(expanded, literal or expanded != text)

    def _expand(
        self, nodes: tuple[CorefileNode, ...], *, top: bool, within: tuple[str, ...]
    ) -> tuple[CorefileNode, ...]:
        found: list[CorefileNode] = []
        for node in nodes:
            self._expanded += 1
            if self._expanded > MAX_LINES:
                self.error(node.where, f"there are more than {MAX_LINES} lines with all imports; the rest is not read")
                break
            first = node.words[0]
            if top and len(node.words) == 1 and re.fullmatch(r"\(.*\)", first.text):
                self._define(first.text[1:-1], node)
            elif first == CorefileWord("import"):
                found += self._import(node, top=top, within=within)
            elif node.children is None:
                found.append(node)
            else:
                inside = self._expand(node.children, top=False, within=within)
                found.append(msgspec.structs.replace(node, children=inside))
        return tuple(found)

    def _define(self, name: str, node: CorefileNode) -> None:
        if not name or node.children is None:
            self.error(node.where, "a snippet is written (NAME) { … }")
        elif name in self._snippets:
            self.error(node.where, f"snippet {quoted(name)} is there already")
        else:
            self._snippets[name] = node.children

    def _import(self, node: CorefileNode, *, top: bool, within: tuple[str, ...]) -> tuple[CorefileNode, ...]:
        if node.children is not None or len(node.words) != 2 or not node.arguments[0]:
            self.error(node.where, "import takes one argument: a snippet, a file, or a pattern of files")
            return ()
        what = node.arguments[0]
        self._expansions += 1
        if self._expansions > MAX_EXPANSIONS or f"({what})" in within:
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
        found: list[CorefileNode] = []
        for path, text in files:
            if path in within:
                self.error(node.where, f"import {quoted(what)} goes round in a circle")
                continue
            nodes = self._nodes(path, text, top=top)
            found += self._expand(_add_braces(nodes) if top else nodes, top=top, within=(*within, path))
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


def _join_key_lines(
    lines: list[tuple[tuple[CorefileWord, ...], CorefilePosition]],
) -> list[tuple[tuple[CorefileWord, ...], CorefilePosition]]:
    """Join the lines of keys at the top level: after a trailing comma, and with `{` on a line of its own."""
    found: list[tuple[list[CorefileWord], CorefilePosition]] = []
    depth = 0
    for words, where in lines:
        goes_on = found and depth == 0 and (found[-1][0][-1].text.endswith(",") or words == (CorefileWord("{"),))
        if goes_on and found[-1][0] != [CorefileWord("}")]:
            found[-1][0].extend(words)
        else:
            found.append(([*words], where))
        depth += words[-1] == CorefileWord("{")
        depth -= words == (CorefileWord("}"),)
    return [(tuple(words), where) for words, where in found]


def _add_braces(nodes: tuple[CorefileNode, ...]) -> tuple[CorefileNode, ...]:
    """Add the omitted braces of a file with a single server block: its first line holds the keys."""
    for number, node in enumerate(nodes):
        if node.children is None and node.words[0] != CorefileWord("import"):
            rest = nodes[number + 1 :]
            return (*nodes[:number], msgspec.structs.replace(node, children=rest))
        if node.children is not None and not node.name.startswith("("):
            break
    return nodes
