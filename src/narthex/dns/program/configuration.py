"""The Corefile of a server: reads it from disk or builds it from flags, checks it, and rereads it after changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from narthex.dns.corefile.parse import Corefile, CorefileError, parse
from narthex.dns.corefile.settings import ServerBlock
from narthex.model import InputError, Problem
from narthex.runtime.files import file_stamp
from narthex.runtime.logs import LOGGER

_MAX_BYTES = 4 * 1024 * 1024
"""Size limit of a Corefile; a ConfigMap can hold a quarter of it."""


class DnsConfigurationError(InputError):
    """Configuration with which the server cannot start."""


class DnsFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line flags that replace a Corefile."""

    zones: tuple[str, ...] = ()
    listen: str = ""
    upstreams: tuple[str, ...] = ()
    ttl: int = 30

    def corefile(self) -> str:
        """Return the equivalent Corefile, similar to kubeadm's. Raises DnsConfigurationError."""
        address, _, port = (self.listen or ":53").rpartition(":")
        if not port.isdecimal() or any(
            not word or set(word) & set(' \t\n"\\{}#') for word in (*self.zones, *self.upstreams)
        ):
            raise DnsConfigurationError(
                f"--listen {self.listen or ':53'}, --zone, --forward: values must not contain blanks or braces, "
                "and --listen is an address, a colon, and a port"
            )
        bound = [f"bind {address.strip('[]')}"] if address else []
        endpoints = ["health {\n        lameduck 5s\n    }", "ready", "prometheus :9153"]
        return cluster_corefile(int(port), self.zones, self.upstreams, (*bound, *endpoints), self.ttl)


def cluster_corefile(
    port: int, zones: Sequence[str], upstreams: Sequence[str], others: Sequence[str] = (), ttl: int = 30
) -> str:
    """Return a Corefile similar to kubeadm's.

    Args:
        port: Port of the server block.
        zones: Zones of the cluster; empty stands for cluster.local.
        upstreams: Addresses or paths for `forward`; empty omits it.
        others: Lines of further plugins.
        ttl: TTL of the cluster's records in seconds.
    """
    forwarded = [f"forward . {' '.join(upstreams)}", "cache 30", "loop"] if upstreams else []
    plugins = [
        *others,
        "errors",
        f"kubernetes {' '.join(zones or ('cluster.local',))} in-addr.arpa ip6.arpa {{",
        "    pods insecure\n        fallthrough in-addr.arpa ip6.arpa",
        f"    ttl {ttl}\n    }}",
        *forwarded,
        "loadbalance",
    ]
    return f".:{port} {{\n" + "".join(f"    {line}\n" for line in plugins) + "}\n"


def read_corefile(path: Path, environment: Mapping[str, str]) -> Corefile:
    """Read a Corefile and its imports.

    Raises:
        OSError: The file cannot be read.
        CorefileError: The file has errors; all are reported.
    """
    text = _text(path)
    return parse(text, str(path), load=load_imports, environment=environment)


def load_imports(pattern: str) -> tuple[tuple[str, str], ...]:
    """Return paths and texts of the files that a pattern matches, sorted by path.

    Raises OSError, also if a path without wildcards does not exist.
    """
    return tuple((path, _text(Path(path))) for path in matching_paths(pattern))


def matching_paths(pattern: str) -> tuple[str, ...]:
    """Return the paths that a pattern matches, sorted.

    A path without wildcards matches itself even if it does not exist. Patterns skip directories, which mounted ConfigMaps
    contain.
    """
    path = Path(pattern)
    if not any(char in pattern for char in "*?["):
        return (pattern,)
    root = Path(path.anchor)
    found = root.glob(str(path.relative_to(root)))
    return tuple(str(each) for each in sorted(found) if each.is_file())


def _text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise OSError(f"{path} is larger than {_MAX_BYTES} bytes, so it is no Corefile")
    return raw.decode("utf-8", errors="replace")


class CorefileSource:
    """The Corefile at a path, or that of flags; detects changes."""

    def __init__(self, path: Path | None, flags: DnsFlags) -> None:
        """Read the Corefile. Raises DnsConfigurationError."""
        self._path = path
        self._flags = flags
        self._signature: object = None
        self._imported: tuple[str, ...] = ()
        try:
            self._corefile = self._parse()
        except OSError as error:
            raise DnsConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from error
        except CorefileError as error:
            raise DnsConfigurationError(str(error)) from error

    @property
    def blocks(self) -> tuple[ServerBlock, ...]:
        """Server blocks of the last valid Corefile."""
        return self._corefile.blocks

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Warnings about the last valid Corefile."""
        return self._corefile.problems

    def reread(self) -> tuple[ServerBlock, ...] | None:
        """Return the server blocks if they have changed. Errors of a changed Corefile are logged once."""
        if self._path is None or self._current_signature() == self._signature:
            return None
        before = self._corefile.blocks
        try:
            self._corefile = self._parse()
        except (CorefileError, DnsConfigurationError, OSError) as error:
            LOGGER.error("the Corefile has changed and is invalid; the previous one stays in force: %s", error)
            self._signature = self._current_signature()
            return None
        for problem in self.problems:
            LOGGER.warning("%s", problem)
        return self._corefile.blocks if self._corefile.blocks != before else None

    def _parse(self) -> Corefile:
        if self._path is None:
            return parse(self._flags.corefile(), "flags")
        corefile = read_corefile(self._path, os.environ)
        self._imported = corefile.imported
        self._signature = self._current_signature()
        _check_tls_files(corefile)
        return corefile

    def _current_signature(self) -> object:
        assert self._path is not None
        paths = [str(self._path), *(path for pattern in self._imported for path in matching_paths(pattern))]
        return tuple((path, file_stamp(path)) for path in paths)


def _check_tls_files(corefile: Corefile) -> None:
    """Raise DnsConfigurationError if a TLS file, or a library that plugins need, cannot be used."""
    if any(block.templates for block in corefile.blocks) and find_spec("dns") is None:
        raise DnsConfigurationError("plugin template needs dnspython: pip install 'narthex[dns]'")
    forwarding = [block for block in corefile.blocks if block.forwards]
    serving = [block for block in corefile.blocks if block.tls is not None and block.transport != "dns"]
    if not (forwarding or serving):
        return
    # Imports ssl, which is slow to load.
    from narthex.dns.server.plugin_chain import tls_file_error

    errors = [error for error in map(tls_file_error, (*forwarding, *serving)) if error is not None]
    if errors:
        raise DnsConfigurationError("\n".join(errors))


class CheckedServer(msgspec.Struct, frozen=True, kw_only=True):
    """Zones and port of a server block."""

    zones: tuple[str, ...]
    port: int


class CorefileCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking a Corefile."""

    usable: bool
    servers: tuple[CheckedServer, ...]
    """Empty if the Corefile is not usable."""
    problems: tuple[Problem, ...]
    """Errors and warnings, in the order of the file."""


def check_corefile(path: Path | None, flags: DnsFlags) -> CorefileCheck:
    """Check the Corefile at `path`, or that of the flags, without starting a server. Errors are part of the result."""
    try:
        source = CorefileSource(path, flags)
    except DnsConfigurationError as error:
        cause = error.__cause__
        problems = cause.problems if isinstance(cause, CorefileError) else (Problem(message=str(error)),)
        return CorefileCheck(usable=False, servers=(), problems=problems)
    servers = tuple(CheckedServer(zones=block.zones, port=block.port) for block in source.blocks)
    return CorefileCheck(usable=True, servers=servers, problems=source.problems)
