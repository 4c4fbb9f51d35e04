"""Parses a Corefile into server blocks, and reports all errors of the file and its imports at once.

    example.org:1053 10.0.0.0/24 {      keys: zones, each with an optional port
        cache 30 {                      a plugin with an argument
            denial 1000                 and an option
        }
    }

The order of plugins in a block has no effect, except for several `forward`. The language is that of CoreDNS (manual page
corefile(5), READMEs of the plugins); `docs/reference/corefile.md` lists the differences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.dns.corefile.directive import Directive, is_port
from narthex.dns.corefile.directive import zones as zones_of
from narthex.dns.corefile.plugins import PLUGINS, UNSUPPORTED_PLUGINS
from narthex.dns.corefile.settings import (
    DEFAULT_HTTPS_PORT,
    DEFAULT_PORT,
    DEFAULT_TLS_PORT,
    BindSettings,
    CorefilePosition,
    KubernetesSettings,
    ServerBlock,
)
from narthex.dns.corefile.syntax import CorefileNode, CorefileReader, CorefileWord, LoadFiles
from narthex.model import Problem, one_of, quoted

MAX_TEXT = 1 << 20
"""Longest Corefile in characters. That of a cluster has a thousand; a ConfigMap holds 1 MiB."""


class CorefileError(ValueError):
    """A Corefile with errors; the message has a line for each."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class Corefile(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed Corefile."""

    blocks: tuple[ServerBlock, ...]
    """In the order of the file. No two have the same zone on the same port and addresses."""
    problems: tuple[Problem, ...] = ()
    """Warnings only."""
    imported: tuple[str, ...] = ()
    """Paths and patterns of imported files, whose changes change the Corefile."""


def no_files(pattern: str) -> tuple[tuple[str, str], ...]:
    """Reject the import of files, for texts that may import only their own snippets."""
    raise FileNotFoundError(f"{pattern}: files cannot be imported here")


def parse(
    text: str,
    path: str = "Corefile",
    *,
    load: LoadFiles = no_files,
    environment: Mapping[str, str] | None = None,
    default_port: int = DEFAULT_PORT,
) -> Corefile:
    """Parse a Corefile.

    Args:
        text: Content of the file.
        path: Name of the file in messages, and base of relative imports.
        load: Reads imported files.
        environment: Variables for `{$NAME}`.
        default_port: Port of keys without one.

    Raises:
        CorefileError: The file has errors; all are reported.
    """
    reader = CorefileReader(load, environment or {})
    if len(text) > MAX_TEXT:
        reader.error(CorefilePosition(path, 1), f"the file has {len(text)} characters; the limit is {MAX_TEXT}")
        raise CorefileError(reader.problems)
    blocks: list[ServerBlock] = []
    for node in reader.read(path, text):
        blocks += _blocks(node, reader, default_port)
    _check_distinct(blocks, reader)
    if not blocks and not reader.problems:
        reader.error(CorefilePosition(path, 1), "there is no server block")
    problems = reader.problems
    if any(problem.severity == "error" for problem in problems):
        raise CorefileError(problems)
    return Corefile(blocks=tuple(blocks), problems=problems, imported=tuple(dict.fromkeys(reader.imported)))


def _blocks(node: CorefileNode, reader: CorefileReader, default_port: int) -> list[ServerBlock]:
    """Return one server block for each port of the keys."""
    if node.children is None:
        reader.error(node.where, f"{quoted(node.name)} stands outside of the braces of a server block")
        return []
    zones: dict[tuple[int, str], dict[str, None]] = {}
    for word in node.words:
        for server, zone in _key(word, node, reader, default_port):
            zones.setdefault(server, {})[zone] = None
    if not any(word.text.rstrip(",") for word in node.words):
        reader.error(node.where, "a server block needs a zone, such as . or cluster.local")
    all_zones = tuple(dict.fromkeys(zone for of_port in zones.values() for zone in of_port))
    fields = _plugins(node.children, all_zones, reader)
    _check_dependencies(fields, node, reader)
    _check_encryption({transport for _, transport in zones}, fields, node, reader)
    return [
        ServerBlock(zones=tuple(found), port=port, transport=transport, where=node.where, **fields)  # type: ignore[arg-type]
        for (port, transport), found in zones.items()
    ]


_TRANSPORTS = {"dns": DEFAULT_PORT, "tls": DEFAULT_TLS_PORT, "https": DEFAULT_HTTPS_PORT}
"""Default ports of the protocols that a key may name."""


def _key(
    word: CorefileWord, node: CorefileNode, reader: CorefileReader, default_port: int
) -> list[tuple[tuple[int, str], str]]:
    """Return port and protocol, and zone, for each zone of one key."""
    text = word.text.rstrip(",")
    if not text:
        return []
    scheme, found, rest = text.rpartition("://")
    transport = scheme if found else "dns"
    if transport not in _TRANSPORTS:
        known = one_of(f"{name}://" for name in _TRANSPORTS)
        reader.error(node.where, f"key {quoted(text)}: {quoted(scheme)} is not supported; {known} are")
        return []
    zone, port = rest, str(default_port if transport == "dns" else _TRANSPORTS[transport])
    if (match := re.fullmatch(r"(.*/\d+):(.*)", rest)) or (
        "/" not in rest and (match := re.fullmatch(r"([^:]*):(.*)", rest))
    ):
        zone, port = match[1] or ".", match[2]
    if not is_port(port):
        reader.error(node.where, f"key {quoted(text)}: {quoted(port)} is not a port (1-65535)")
        return []
    try:
        return [((int(port), transport), each) for each in zones_of(zone)]
    except ValueError as error:
        reader.error(node.where, f"key {quoted(text)}: {quoted(zone)} {error}")
        return []


def _plugins(nodes: tuple[CorefileNode, ...], zones: tuple[str, ...], reader: CorefileReader) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    first: dict[str, CorefilePosition] = {}
    for node in nodes:
        plugin = PLUGINS.get(node.name)
        directive = Directive(node, reader)
        if plugin is None:
            if node.name in UNSUPPORTED_PLUGINS:
                why = UNSUPPORTED_PLUGINS[node.name]
                reader.error(node.where, f"plugin {quoted(node.name)} of CoreDNS is not supported: {why}")
            else:
                known = one_of(sorted((*PLUGINS, "import")))
                reader.error(node.where, f"unknown plugin {quoted(node.name)}; known are {known}")
            continue
        if node.name in first and not plugin.repeats:
            directive.error(f"is there already, at {first[node.name]}; it may be there once in a server block")
            continue
        first.setdefault(node.name, node.where)
        found = plugin.parse(directive, zones)
        if found is None:
            continue
        if plugin.repeats:
            fields.setdefault(plugin.field, []).append(found)
        else:
            fields[plugin.field] = found
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if binds := fields.get("bind"):
        to = tuple(dict.fromkeys(word for bind in binds for word in bind.to))
        excluded = tuple(dict.fromkeys(word for bind in binds for word in bind.excluded))
        fields["bind"] = BindSettings(to=to, excluded=excluded)
    return fields


def _check_dependencies(fields: dict[str, Any], node: CorefileNode, reader: CorefileReader) -> None:
    """Report plugins that lack another plugin in the same server block."""
    kubernetes: KubernetesSettings | None = fields.get("kubernetes")
    autopath = fields.get("autopath")
    if autopath is not None and not autopath.path:
        if kubernetes is None:
            reader.error(node.where, "autopath @kubernetes needs plugin kubernetes in the same server block")
        elif kubernetes.pods != "verified":
            reader.warning(node.where, "autopath @kubernetes does nothing without pods verified of plugin kubernetes")
    if "external" in fields and kubernetes is None:
        reader.error(node.where, "k8s_external needs plugin kubernetes in the same server block")
    if "transfer" in fields and kubernetes is None:
        reader.error(node.where, "transfer needs plugin kubernetes in the same server block: it has no other zones")
    if fields.get("loop") and not fields.get("forwards"):
        reader.warning(node.where, "loop has no effect without forward")


def _check_encryption(transports: set[str], fields: dict[str, Any], node: CorefileNode, reader: CorefileReader) -> None:
    """Report keys of encrypted protocols without a certificate, and a certificate that no key uses."""
    if "tls" in transports and "tls" not in fields:
        reader.error(node.where, "tls:// needs plugin tls with the files of a certificate and its key")
    if "https" in transports and "tls" not in fields:
        reader.warning(node.where, "https:// without plugin tls is plain HTTP; a proxy in front must encrypt it")
    if "tls" in fields and transports == {"dns"}:
        reader.warning(node.where, "tls has no effect: no key of this server block begins with tls:// or https://")


def _check_distinct(blocks: list[ServerBlock], reader: CorefileReader) -> None:
    seen: dict[tuple[str, int, tuple[str, ...]], ServerBlock] = {}
    protocols: dict[int, ServerBlock] = {}
    for block in blocks:
        other = protocols.setdefault(block.port, block)
        if other.transport != block.transport:
            both = f"{other.transport}:// (at {other.where}) and {block.transport}://"
            reader.error(block.where, f"port {block.port} cannot serve both {both}")
        to = block.bind.to if block.bind else ()
        for zone in block.zones:
            before = seen.setdefault((zone, block.port, to), block)
            if before is not block:
                reader.error(
                    block.where,
                    f"zone {zone} on port {block.port} belongs to the server block at {before.where} already",
                )
