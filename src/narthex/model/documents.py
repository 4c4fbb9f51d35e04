"""YAML and JSON text decoded into plain values with line numbers. Knows no Kubernetes kinds.

YAML is built from libyaml's events instead of its loaders: composing a deeply nested document overruns the C stack,
aliases can turn a small file into a huge one, duplicate keys pass silently, and line numbers are lost. The result holds
only what JSON can express: mappings with string keys, lists, strings, numbers, true, false, and null. A malformed
document yields a `MalformedDocument`; the documents around it are still read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]

MAX_DEPTH = 100
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
"""Maximum nesting depth; Kubernetes objects need about 20 levels."""
MAX_ALIAS_VALUES = 100_000
"""Maximum number of values that aliases may add to one document."""

MAX_DOCUMENTS = 200_000
"""Maximum number of documents of one text. A file of the largest size has as many Services."""

Positions = dict[tuple[int, str | int], int]
"""Line number of each value, keyed by the `id` of its parent list or mapping and its index or key."""


class Document(msgspec.Struct, frozen=True):
    """One decoded document with the line numbers of its values."""

    value: Any
    line: int
    """First line of the document, counted from 1."""
    positions: Positions
    duplicate_keys: tuple[tuple[str, int], ...] = ()
    """Duplicate keys with their lines; the last value wins. Filled only with `allow_duplicate_keys`."""

    def line_of(self, value: Any, path: tuple[str | int, ...], start: int) -> int:
        """Return the line of the value at `path` below `value`.

        Falls back to the line of the deepest existing element on the path, and to `start` if there is none.
        """
        line = start
        for step in path:
            line = self.positions.get((id(value), step), line)
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                break
        return line


class MalformedDocument(msgspec.Struct, frozen=True):
    """Text that is not a valid document."""

    line: int
    message: str


class _Malformed(ValueError):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.fault = MalformedDocument(line, message)


def read_documents(text: str, *, allow_duplicate_keys: bool = False) -> Iterator[Document | MalformedDocument]:
    """Yield all documents of a file: JSON (several values in a row) or YAML (several documents).

    A duplicate key makes a document malformed unless `allow_duplicate_keys` is set, which configuration files need because
    older programs accepted them.
    """
    if text.lstrip()[:1] in ("{", "["):
        documents = _json_or_flow(text, allow_duplicate_keys)
    else:
        documents = (item for chunk, line in _chunks(text) for item in _yaml(chunk, line, allow_duplicate_keys))
    for number, document in enumerate(documents):
        if number >= MAX_DOCUMENTS:
            yield MalformedDocument(document.line, f"more than {MAX_DOCUMENTS} documents; the rest is not read")
            return
        yield document


_LIKE_JSON = re.compile(r'\s*[\[{]\s*["\[{]')


def _json_or_flow(text: str, allow_duplicate_keys: bool) -> Iterator[Document | MalformedDocument]:
    """Decode text that starts like JSON but may be YAML flow style; YAML errors are usually more precise.

    The text is decoded twice rather than kept: what is wrong at its end decides how its begin is read.
    """
    fault: MalformedDocument | None = None
    try:
        for _ in itertools.islice(_json(text), MAX_DOCUMENTS + 1):
            pass
        yield from itertools.islice(_json(text), MAX_DOCUMENTS + 1)
        return
    except json.JSONDecodeError as error:
        fault = MalformedDocument(error.lineno, f"not valid JSON: {error.msg}")
    except (ValueError, RecursionError):
        pass
    chunks = list(itertools.islice(_chunks(text), 2))
    if fault is None or len(chunks) != 1 or not _LIKE_JSON.match(text):
        for chunk, first_line in _chunks(text):
            yield from _yaml(chunk, first_line, allow_duplicate_keys)
        return
    found = list(itertools.islice(_yaml(*chunks[0], allow_duplicate_keys), MAX_DOCUMENTS + 1))
    faults = [item for item in found if isinstance(item, MalformedDocument)]
    # A decoder with a deep stack comes to the end of a deep text, and only finds that something is missing there.
    too_deep = [item for item in faults if item.message == _TOO_DEEP]
    yield from too_deep or ([fault] if faults else found)


def _json(text: str) -> Iterator[Document]:
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    space = re.compile(r"[ \t\r\n]*")
    at, line = 0, 1
    while True:
        begin = space.match(text, at).end()  # type: ignore[union-attr]
        if begin == len(text):
            return
        line += text.count("\n", at, begin)
        value, at = decoder.raw_decode(text, begin)
        _check_depth(value)
        yield Document(value, line, {})
        line += text.count("\n", begin, at)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is given twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


_DOCUMENT_MARK = re.compile(r"^---(?=[ \t\r\n]|\Z)", re.MULTILINE)


def _chunks(text: str) -> Iterator[tuple[str, int]]:
    """Split before each `---` line, which no scalar may contain, so that an error affects only its own document."""
    line, begin = 1, 0
    marks = [match.start() for match in _DOCUMENT_MARK.finditer(text)]
    for end in [*marks, len(text)]:
        chunk = text[begin:end]
        if any(row.strip() and row[0] not in "#%" for row in chunk.splitlines()):
            yield chunk, line
        line += chunk.count("\n")
        begin = end


_CONTROL = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that YAML does not allow."""


def _yaml(chunk: str, first_line: int, allow_duplicate_keys: bool) -> Iterator[Document | MalformedDocument]:
    builder = _Builder(first_line, allow_duplicate_keys)
    try:
        loader = yaml.CSafeLoader(chunk)
        try:
            while (event := loader.get_event()) is not None:
                if (document := builder.feed(event)) is not None:
                    yield document
        finally:
            loader.dispose()
    except _Malformed as error:
        yield error.fault
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        # libyaml reports an unexpected end after the last line.
        lines = chunk.count("\n", 0, len(chunk.rstrip()) or None)
        # libyaml reads ahead, and has a limit of its own since version 0.2.6.
        too_deep = "maximum nesting depth" in reason
        message = _TOO_DEEP if too_deep else f"not valid YAML: {reason}"
        yield MalformedDocument(first_line + (min(mark.line, lines) if mark else 0), message)
    except yaml.YAMLError as error:
        bad = _CONTROL.search(chunk)
        line = first_line + (chunk.count("\n", 0, bad.start()) if bad else 0)
        # libyaml and the pure parser say it in words of their own.
        reason = "control characters are not allowed" if bad else str(error).splitlines()[0]
        yield MalformedDocument(line, f"not valid YAML: {reason}")


class _Open:
    """A list or mapping that is not closed yet."""

    __slots__ = ("anchor", "key", "line", "merges", "size", "value")

    def __init__(self, value: Any, anchor: str | None, line: int) -> None:
        self.value = value
        self.anchor = anchor
        self.line = line
        self.size = 1
        self.key: str | None = None
        self.merges: list[Any] = []


_MERGE = "<<"


class _Builder:
    """Builds Documents from the events of one stream. Keeps its own stack, so depth costs no recursion."""

    def __init__(self, first_line: int, allow_duplicate_keys: bool) -> None:
        self._first = first_line
        self._allow_duplicate_keys = allow_duplicate_keys
        self._takes: dict[type, Callable[[Any, int], None]] = {
            yaml.ScalarEvent: self._scalar,
            yaml.MappingStartEvent: lambda event, line: self._open({}, event, line),
            yaml.SequenceStartEvent: lambda event, line: self._open([], event, line),
            yaml.MappingEndEvent: self._close,
            yaml.SequenceEndEvent: self._close,
            yaml.AliasEvent: self._alias,
            yaml.DocumentStartEvent: lambda _, line: self._reset(line),
        }
        self._reset(first_line)

    def _reset(self, line: int) -> None:
        self._line = line
        self._stack: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int] | None] = {}
        self._positions: Positions = {}
        self._repeated = 0
        self._root: Any = None
        self._duplicate_keys: list[tuple[str, int]] = []

    def feed(self, event: Any) -> Document | None:
        """Process one event; return a Document when the event ends a non-empty one."""
        kind = type(event)
        if kind is yaml.DocumentEndEvent:
            if self._root is None:
                return None
            return Document(self._root, self._line, self._positions, tuple(self._duplicate_keys))
        if (take := self._takes.get(kind)) is not None:
            take(event, self._first + event.start_mark.line)
        return None

    def _scalar(self, event: Any, line: int) -> None:
        top = self._stack[-1] if self._stack else None
        if top is not None and top.key is None and isinstance(top.value, dict):
            self._key(top, event, line)
            return
        value = _resolve(event, line)
        if event.anchor:
            self._anchors[event.anchor] = (value, 1)
        self._put(value, 1, line)

    def _key(self, top: _Open, event: Any, line: int) -> None:
        key = event.value
        if event.anchor:
            self._anchors[event.anchor] = (key, 1)
        if key in top.value:
            if not self._allow_duplicate_keys:
                earlier = self._positions[id(top.value), key]
                raise _Malformed(line, f"the key {key[:60]!a} is given twice, first in line {earlier}")
            self._duplicate_keys.append((key, line))
        top.key = key
        self._positions[id(top.value), key] = line

    def _open(self, value: Any, event: Any, line: int) -> None:
        if len(self._stack) >= MAX_DEPTH:
            raise _Malformed(line, _TOO_DEEP)
        if self._stack and self._stack[-1].key is None and isinstance(self._stack[-1].value, dict):
            raise _Malformed(line, "a key must be text, not a list or mapping")
        if event.tag not in _CONTAINER_TAGS:
            raise _Malformed(line, f"the tag {event.tag[:60]!a} is not allowed")
        if event.anchor:
            self._anchors[event.anchor] = None
        if not self._stack:
            self._line = line
        self._stack.append(_Open(value, event.anchor, line))

    def _close(self, _event: Any, _line: int) -> None:
        done = self._stack.pop()
        for merged in done.merges:
            self._merge(done, merged)
        if done.anchor:
            self._anchors[done.anchor] = (done.value, done.size)
        self._put(done.value, done.size, done.line)

    def _alias(self, event: Any, line: int) -> None:
        anchor = event.anchor
        if anchor not in self._anchors:
            raise _Malformed(line, f"the alias *{anchor[:60]} has no anchor")
        known = self._anchors[anchor]
        if known is None:
            raise _Malformed(line, f"the alias *{anchor[:60]} refers to itself")
        self._count_repeated(known[1], line)
        top = self._stack[-1] if self._stack else None
        if top is not None and top.key is None and isinstance(top.value, dict):
            raise _Malformed(line, "a key must be text, not an alias")
        self._put(known[0], known[1], line)

    def _count_repeated(self, size: int, line: int) -> None:
        self._repeated += size
        if self._repeated > MAX_ALIAS_VALUES:
            raise _Malformed(line, f"aliases repeat more than {MAX_ALIAS_VALUES} values")

    def _put(self, value: Any, size: int, line: int) -> None:
        if not self._stack:
            self._root = value
            return
        top = self._stack[-1]
        top.size += size
        if isinstance(top.value, list):
            self._positions[id(top.value), len(top.value)] = line
            top.value.append(value)
            return
        key, top.key = top.key, None
        if key == _MERGE:
            self._positions.pop((id(top.value), _MERGE))
            self._take_merge(top, value, line)
        else:
            top.value[key] = value

    @staticmethod
    def _take_merge(top: _Open, value: Any, line: int) -> None:
        sources = value if isinstance(value, list) else [value]
        if not all(isinstance(source, dict) for source in sources):
            raise _Malformed(line, "'<<' merges mappings only")
        top.merges.extend(sources)

    def _merge(self, into: _Open, source: dict[str, Any]) -> None:
        """Copy the keys that the mapping does not define itself (YAML's `<<`)."""
        self._count_repeated(len(source), into.line)
        for key, value in source.items():
            if key not in into.value:
                into.value[key] = value
                self._positions[id(into.value), key] = self._positions.get((id(source), key), into.line)


_TAG = "tag:yaml.org,2002:"
_CONTAINER_TAGS = (None, "!", _TAG + "map", _TAG + "seq")
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {
    form: truth
    for word, truth in (("true", True), ("yes", True), ("on", True), ("false", False), ("no", False), ("off", False))
    for form in (word, word.capitalize(), word.upper())
}
_INT = re.compile(r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_NOT_JSON = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def _resolve(event: Any, line: int) -> Any:
    """Return the value of a scalar: YAML 1.1 as Kubernetes reads it, without dates and base 60 numbers."""
    text: str = event.value
    tag: str | None = event.tag
    if tag is None:
        return _plain(text, line) if event.implicit[0] else text
    if tag in ("!", _TAG + "str", _TAG + "timestamp", _TAG + "binary"):
        return text
    if tag in (_TAG + "int", _TAG + "float", _TAG + "bool", _TAG + "null"):
        return _plain(text, line)
    raise _Malformed(line, f"the tag {tag[:60]!a} is not allowed")


def _plain(text: str, line: int) -> Any:
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if text[0] not in "+-.0123456789":
        return text
    if len(text) > 400:
        return text
    if _INT.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_JSON.fullmatch(text):
        raise _Malformed(line, f"{text} is no JSON number")
    return text


def _integer(text: str) -> int | str:
    sign, digits = (-1 if text[0] == "-" else 1), text.lstrip("+-").replace("_", "")
    if len(digits) > 1 and digits[0] == "0" and digits[1] in "01234567":
        return sign * int(digits, 8)
    try:
        return sign * int(digits, 0)
    except ValueError:  # "0x_": underscores only.
        return text
