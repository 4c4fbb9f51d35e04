"""What a user pasted or dropped, sorted: bundles, manifests, and everything else, which is the output of a node's tools.

A bug report may hold manifests between code fences; they are taken out as files of their own. What is left keeps its lines,
so that positions in the report remain right.
"""

from __future__ import annotations

import enum
import posixpath
import re
import textwrap
from collections.abc import Iterator, Sequence

import msgspec

from narthex.trace.issue.text import is_issue_text


class PastedKind(enum.Enum):
    """What a pasted file is."""

    BUNDLE = "bundle"
    MANIFESTS = "manifests"
    OUTPUT = "output"


class PastedFile(msgspec.Struct, frozen=True):
    """A file as it is stored for a trace."""

    kind: PastedKind
    name: str
    content: bytes


_ARCHIVE = (b"\x1f\x8b", b"\xfd7zXZ", b"BZh")
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_FENCE = re.compile(r"[ \t]{0,12}(```|~~~)[^`]{0,80}$")
_API_VERSION = re.compile(r"^(?:- )?[\"']?apiVersion[\"']?: ?\S", re.MULTILINE)
_KIND = re.compile(r"^(?:- |  )?[\"']?kind[\"']?: ?\S", re.MULTILINE)
_JSON = re.compile(r'\s*[\[{]\s*(?:[{]\s*)?"(?:apiVersion|kind|items|metadata)"')
_RULES = re.compile(r"^(?:-[AN] [A-Z]|\*[a-z]+\s*$|table (?:ip|ip6|inet) |Chain [A-Z]|```|~~~)", re.MULTILINE)
"""What no manifest has at the begin of a line."""
_HARMFUL = re.compile(r"[^\w.+@-]")
_LONGEST_NAME = 80


def sort_pasted(files: Sequence[tuple[str, str | bytes]]) -> list[PastedFile]:
    """Return the files with unique names, and manifests inside of reports as files of their own."""
    names: set[str] = set()
    sorted_: list[PastedFile] = []
    for name, content in files:
        for kind, kind_name, data in _parts(_harmless(name), content):
            sorted_.append(PastedFile(kind, _unique(kind_name, names), data))
    return sorted_


def _parts(name: str, content: str | bytes) -> Iterator[tuple[PastedKind, str, bytes]]:
    data = content.encode(errors="replace") if isinstance(content, str) else content
    if data.startswith(_ARCHIVE) or data[_TAR_MAGIC_AT : _TAR_MAGIC_AT + len(_TAR_MAGIC)] == _TAR_MAGIC:
        yield PastedKind.BUNDLE, name, data
        return
    text = data.decode(errors="replace")
    if is_issue_text(text):
        yield PastedKind.BUNDLE, name, data
        return
    if is_manifest(text):
        suffix = "" if name.endswith((".yaml", ".yml", ".json")) else (".json" if _JSON.match(text) else ".yaml")
        yield PastedKind.MANIFESTS, name + suffix, data
        return
    lines = text.split("\n")
    found = 0
    for begin, end in list(_fenced(lines)):
        inside = textwrap.dedent("\n".join(lines[begin:end]))
        if is_manifest(inside):
            found += 1
            lines[begin - 1 : end + 1] = [""] * (end - begin + 2)
            suffix = "json" if _JSON.match(inside) else "yaml"
            yield PastedKind.MANIFESTS, f"{name}.{found}.{suffix}", f"{inside}\n".encode(errors="replace")
    left = "\n".join(lines)
    if left.strip() or not found:
        yield PastedKind.OUTPUT, name, left.encode(errors="replace") if found else data


def _fenced(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of what is between code fences, without the fences."""
    begin, fence = 0, ""
    for number, line in enumerate(lines):
        if fence and line.strip() == fence:
            yield begin, number
            fence = ""
        elif not fence and (found := _FENCE.match(line)):
            begin, fence = number + 1, found[1]


def is_manifest(text: str) -> bool:
    """Return True for Kubernetes objects in YAML or JSON. A report that only quotes some of them is none."""
    if _JSON.match(text):
        return '"kind"' in text
    if _RULES.search(text):
        return False
    return _API_VERSION.search(text) is not None and _KIND.search(text) is not None


def _harmless(name: str) -> str:
    """Return the last part of a name, of characters that no shell and no file system gives a meaning."""
    last = _HARMFUL.sub("_", posixpath.basename(name.replace("\\", "/")))[-_LONGEST_NAME:].lstrip(".-")
    return last or "pasted.txt"


def _unique(name: str, names: set[str]) -> str:
    """Return a name that is not among `names`, and add it."""
    number, found = 1, name
    while found in names or found == PastedKind.MANIFESTS.value:
        number += 1
        found = f"{number}-{name}"
    names.add(found)
    return found
