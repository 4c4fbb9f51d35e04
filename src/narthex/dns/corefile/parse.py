"""Corefile text -> server blocks. All faults of a file, and of those it imports, are told at once.

    example.org:1053 10.0.0.0/24 {      keys: zones, each with or without a port, separated by blanks
        cache 30 {                      a plugin with an argument
            denial 1000                 and an option
        }
    }

The order of plugins in a block means nothing, but for several `forward`s. Facts about the language are CoreDNS's
(manual page corefile(5), the plugins' READMEs); `docs/reference/corefile.md` lists what is the same and what is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.dns.corefile import values
from narthex.dns.corefile.plugins import ELSEWHERE, PLUGINS
from narthex.dns.corefile.settings import DEFAULT_PORT, Bind, Kubernetes, Position, ServerBlock
from narthex.dns.corefile.tree import Load, Node, Outline, Word
from narthex.dns.corefile.values import Line
from narthex.model.problem import Problem, one_of, quoted

_PORT = re.compile(r"\d{1,5}", re.ASCII)


class CorefileError(ValueError):
    """A Corefile that cannot be used; its text has a line for each fault."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class Corefile(msgspec.Struct, frozen=True, kw_only=True):
    """What a Corefile says."""

    blocks: tuple[ServerBlock, ...]
    """In the order of the file; no two answer the same zone in the same place."""
    problems: tuple[Problem, ...] = ()
    """Warnings only."""
    imported: tuple[str, ...] = ()
    """Paths and patterns of the files it imports; a change of theirs is a change of the Corefile."""


def no_files(pattern: str) -> tuple[tuple[str, str], ...]:
    """For texts that may import nothing but their own snippets."""
    raise FileNotFoundError(f"{pattern}: there are no files to import here")


def parse(
    text: str,
    path: str = "Corefile",
    *,
    load: Load = no_files,
    environment: Mapping[str, str] | None = None,
    default_port: int = DEFAULT_PORT,
) -> Corefile:
    """Read a Corefile. `path` names it in messages and is where relative imports begin; `load` reads what it imports.

    Raises CorefileError with all faults.
    """
    outline = Outline(load, environment or {})
    blocks: list[ServerBlock] = []
    for node in outline.read(path, text):
        blocks += _blocks(node, outline, default_port)
    _distinct(blocks, outline)
    if not blocks and not outline.problems:
        outline.error(Position(path, 1), "there is no server block")
    problems = outline.problems
    if any(problem.severity == "error" for problem in problems):
        raise CorefileError(problems)
    return Corefile(blocks=tuple(blocks), problems=problems, imported=tuple(dict.fromkeys(outline.imported)))


def _blocks(node: Node, outline: Outline, default_port: int) -> list[ServerBlock]:
    """The blocks of one pair of braces: one for each port of its keys."""
    if node.children is None:
        outline.error(node.where, f"{quoted(node.name)} stands outside of the braces of a server block")
        return []
    zones: dict[int, dict[str, None]] = {}
    for word in node.words:
        for port, zone in _key(word, node, outline, default_port):
            zones.setdefault(port, {})[zone] = None
    if not any(word.text.rstrip(",") for word in node.words):
        outline.error(node.where, "a server block needs a zone, such as . or cluster.local")
    all_zones = tuple(dict.fromkeys(zone for of_port in zones.values() for zone in of_port))
    fields = _plugins(node.children, all_zones, outline)
    _coherent(fields, node, outline)
    return [ServerBlock(zones=tuple(of_port), port=port, where=node.where, **fields) for port, of_port in zones.items()]


def _key(word: Word, node: Node, outline: Outline, default_port: int) -> list[tuple[int, str]]:
    """Port and zones of one key."""
    text = word.text.rstrip(",")
    if not text:
        return []
    scheme, found, rest = text.rpartition("://")
    if found and scheme != "dns":
        outline.error(node.where, f"key {quoted(text)}: servers speak dns:// only, over UDP and TCP")
        return []
    zone, port = rest, str(default_port)
    if (match := re.fullmatch(r"(.*/\d+):(.*)", rest)) or (
        "/" not in rest and (match := re.fullmatch(r"([^:]*):(.*)", rest))
    ):
        zone, port = match[1] or ".", match[2]
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        outline.error(node.where, f"key {quoted(text)}: {quoted(port)} is not a port (1-65535)")
        return []
    try:
        return [(int(port), each) for each in values.zones(zone)]
    except ValueError as error:
        outline.error(node.where, f"key {quoted(text)}: {quoted(zone)} {error}")
        return []


def _plugins(nodes: tuple[Node, ...], zones: tuple[str, ...], outline: Outline) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    first: dict[str, Position] = {}
    for node in nodes:
        plugin = PLUGINS.get(node.name)
        line = Line(node, outline)
        if plugin is None:
            if node.name in ELSEWHERE:
                outline.error(node.where, f"plugin {quoted(node.name)} of CoreDNS is not supported")
            else:
                known = one_of(sorted((*PLUGINS, "import")))
                outline.error(node.where, f"unknown plugin {quoted(node.name)}; known are {known}")
            continue
        if node.name in first and not plugin.repeats:
            line.error(f"is there already, at {first[node.name]}; it may be there once in a server block")
            continue
        first.setdefault(node.name, node.where)
        found = plugin.read(line, zones)
        if found is None:
            continue
        if plugin.repeats:
            fields[plugin.field] = (*fields.get(plugin.field, ()), found)
        else:
            fields[plugin.field] = found
    if binds := fields.get("bind"):
        to = tuple(dict.fromkeys(word for bind in binds for word in bind.to))
        excluded = tuple(dict.fromkeys(word for bind in binds for word in bind.excluded))
        fields["bind"] = Bind(to=to, excluded=excluded)
    return fields


def _coherent(fields: dict[str, Any], node: Node, outline: Outline) -> None:
    """Note what plugins of a block lack of each other."""
    kubernetes: Kubernetes | None = fields.get("kubernetes")
    autopath = fields.get("autopath")
    if autopath is not None and not autopath.path:
        if kubernetes is None:
            outline.error(node.where, "autopath @kubernetes needs plugin kubernetes in the same server block")
        elif kubernetes.pods != "verified":
            outline.warning(
                node.where,
                "autopath @kubernetes does nothing without pods verified of plugin kubernetes",
            )
    if "external" in fields and kubernetes is None:
        outline.error(node.where, "k8s_external needs plugin kubernetes in the same server block")
    if fields.get("loop") and not fields.get("forwards"):
        outline.warning(node.where, "loop has nothing to look for without forward")


def _distinct(blocks: list[ServerBlock], outline: Outline) -> None:
    """Note zones that two blocks would answer in the same place."""
    seen: dict[tuple[str, int, tuple[str, ...]], ServerBlock] = {}
    for block in blocks:
        to = block.bind.to if block.bind else ()
        for zone in block.zones:
            before = seen.setdefault((zone, block.port, to), block)
            if before is not block:
                outline.error(
                    block.where,
                    f"zone {zone} on port {block.port} belongs to the server block at {before.where} already",
                )
