"""The form of an issue text: one fenced block with a question and parts of bundles, that survives being pasted.

Trackers and mails add quote marks or indentation, change the ends of lines, and put other text around the block. The first line of
the text, wherever it stands in its line, shows what precedes each line. docs/reference/issue-text.md describes the form.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

import msgspec

from narthex.model import InputError, visible
from narthex.trace.node.layout import FAILED, OBJECTS, PARTS, SOCKETS_FILE, TAKEN, BundleManifest, PartStatus

FORMAT = 1
_HEAD = re.compile(r"^(?P<before>[ \t>]*)narthex-issue (?P<format>\d{1,4}): (?P<question>\S.*)$", re.MULTILINE)
_MARK = "=== "
_END = "=== end"
_FENCE = "```"
_PATHS = frozenset((*(part.path for part in PARTS), SOCKETS_FILE, *OBJECTS))
MAX_NODES = 200
"""Nodes of one text. A path crosses a few."""


class IssueTextError(InputError):
    """The text is no complete issue text; the message says why."""


class IssueQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The question of `narthex trace`, with the options that belong to it."""

    source: str
    destination: str
    node: str = ""
    iif: str = ""
    source_port: int = 0
    size: int = 0
    domain: str = ""
    node_ips: tuple[str, ...] = ()

    def command(self) -> str:
        """Return the command line that asks it, without its sources."""
        words = ["narthex", "trace", self.source, self.destination]
        for option, value in (
            ("--node", self.node),
            ("--iif", self.iif),
            ("--sport", self.source_port),
            ("--size", self.size),
            ("--cluster-domain", self.domain),
            *(("--node-ip", ip) for ip in self.node_ips),
        ):
            words += [option, str(value)] if value else []
        return shlex.join(words)


class IssueNode(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one node's bundle."""

    node: str
    parts: dict[str, str]
    """Texts by path, as in a bundle."""
    failed: dict[str, str] = {}
    """Parts that could not be taken, with the reason."""

    def manifest(self) -> BundleManifest:
        """Return the table of contents of a bundle with these parts."""
        taken = [PartStatus(path=path, status=TAKEN, bytes=len(text)) for path, text in self.parts.items()]
        taken += [PartStatus(path=path, status=FAILED, remark=why) for path, why in self.failed.items()]
        return BundleManifest(node=self.node, writer=f"issue text {FORMAT}", parts=tuple(taken))


class IssueText(msgspec.Struct, frozen=True, kw_only=True):
    """What an issue text holds."""

    question: IssueQuestion
    nodes: tuple[IssueNode, ...]


def issue_text(content: IssueText) -> str:
    """Return the text. Nothing in it can end its fence, move a cursor, or become markup."""
    lines = [f"narthex-issue {FORMAT}: {content.question.command()}"]
    for node in content.nodes:
        lines.append(f"{_MARK}node {shlex.quote(node.node)}")
        lines += (f"{_MARK}failed {path} {shlex.quote(why)}" for path, why in node.failed.items())
        for path, text in node.parts.items():
            lines.append(f"{_MARK}part {path}")
            lines += (f" {line}" if line.startswith("===") else line for line in text.rstrip("\n").split("\n"))
    lines.append(_END)
    return "\n".join([f"{_FENCE}text", *map(harmless, lines), _FENCE, ""])


def harmless(line: str) -> str:
    """Return a line without control characters and backticks. Each becomes the same sign, so that equal names stay equal."""
    kept = line.replace("`", "\N{REPLACEMENT CHARACTER}")
    return "\t".join(map(visible, kept.split("\t")))


def is_issue_text(text: str) -> bool:
    """Return True if the text has the first line of an issue text."""
    return "narthex-issue " in text and _HEAD.search(text) is not None


def read_issue_text(text: str) -> IssueText:
    """Read the first issue text in a text, which may be a whole report. Raises IssueTextError."""
    head = _HEAD.search(text.replace("\r", ""))
    if head is None:
        raise IssueTextError("it has no line `narthex-issue`")
    if head["format"] != str(FORMAT):
        raise IssueTextError(f"the issue text has format {head['format']}; this version reads format {FORMAT}")
    before = head["before"]
    lines = [_bare(line, before) for line in text.replace("\r", "")[head.end() + 1 :].split("\n")]
    return IssueText(question=_question(head["question"]), nodes=tuple(_nodes(lines)))


def _bare(line: str, before: str) -> str:
    """Return a line without what precedes each line. An empty line may have lost its spaces."""
    return line.removeprefix(before) if line.startswith(before) else line.lstrip(" >") if before.strip() else line


def _nodes(lines: Sequence[str]) -> Iterator[IssueNode]:
    """Yield the nodes. Raises IssueTextError for an unknown mark, a part that occurs twice, and a text without its end."""
    name, parts, failed = None, dict[str, list[str]](), dict[str, str]()
    current: list[str] | None = None
    count = 0
    for line in lines:
        if not line.startswith(_MARK):
            if current is not None:
                current.append(line.removeprefix(" ") if line.startswith(" ===") else line)
            continue
        words = _words(line[len(_MARK) :])
        if name is not None and words[0] in ("node", "end"):
            yield IssueNode(node=name, parts={path: _joined(text) for path, text in parts.items()}, failed=failed)
            parts, failed, current = {}, {}, None
        if words == ["end"]:
            return
        count += words[0] == "node"
        if count > MAX_NODES:
            raise IssueTextError(f"it has more than {MAX_NODES} nodes")
        if words[0] == "node" and len(words) == 2:
            name = words[1]
        elif words[0] == "failed" and len(words) == 3 and name is not None and words[1] in _PATHS:
            failed[words[1]] = words[2]
        elif words[0] == "part" and len(words) == 2 and name is not None and words[1] in _PATHS:
            if words[1] in parts:
                raise IssueTextError(f"{words[1]} is in it twice")
            current = parts[words[1]] = []
        else:
            raise IssueTextError(f"the line {line[:80]!r} is not understood")
    raise IssueTextError(f"the line `{_END}` is missing: the text is cut off")


def _joined(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text) or [""]
    except ValueError as error:
        raise IssueTextError(f"the words {text[:80]!r} are not understood: {error}") from error


_OPTIONS = {
    "--node": "node",
    "--iif": "iif",
    "--sport": "source_port",
    "--size": "size",
    "--cluster-domain": "domain",
    "--node-ip": "node_ips",
}


def _question(text: str) -> IssueQuestion:
    """Parse the command line of the question. Raises IssueTextError for anything but SRC, DST, and its own options."""
    words = _words(text)
    fields: dict[str, object] = {}
    if words[:2] != ["narthex", "trace"] or len(words) < 4 or len(words) % 2:
        raise IssueTextError(f"the question {text[:80]!r} is not `narthex trace SRC DST`")
    for option, value in zip(words[4::2], words[5::2], strict=True):
        field = _OPTIONS.get(option)
        if field is None:
            raise IssueTextError(f"the question has the option {option[:40]!r}, which no issue text has")
        if field == "node_ips":
            fields[field] = (*fields.get(field, ()), value)  # type: ignore[misc]
        elif field in ("source_port", "size"):
            if not (value.isascii() and value.isdigit() and len(value) < 6):
                raise IssueTextError(f"{option} {value[:40]!r} is no number")
            fields[field] = int(value)
        else:
            fields[field] = value
    return msgspec.convert({"source": words[2], "destination": words[3], **fields}, IssueQuestion)
