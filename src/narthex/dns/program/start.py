"""`narthex dns` put together: a Corefile or flags, a source of objects, and the server until a signal."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from narthex.dns.corefile.parse import Corefile, CorefileError, parse
from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.program import corefile_files as corefile
from narthex.dns.program.elsewhere import PRIVATE
from narthex.dns.program.serve import DnsPart, DnsSettings
from narthex.linux.privileges import allow_many_files
from narthex.model.net import network
from narthex.model.problem import Problem
from narthex.runtime import logs
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import ended_by_signal
from narthex.runtime.watched_files import file_stamp

if TYPE_CHECKING:
    from narthex.kube.access import Access

Reread = Callable[[], tuple[ServerBlock, ...] | None]
"""Gives other server blocks when they have changed."""


class SourceError(ValueError):
    """The server cannot be made of what was given; the message says why."""


class Flags(NamedTuple):
    """What stands in for a Corefile."""

    zones: tuple[str, ...] = ()
    listen: str = ""
    upstreams: tuple[str, ...] = ()
    ttl: int = 30

    def corefile(self) -> str:
        """The Corefile that they mean, as kubeadm writes one. Raises SourceError."""
        address, _, port = (self.listen or ":53").rpartition(":")
        if not port.isdecimal() or any(
            not word or set(word) & set(' \t\n"\\{}#') for word in (*self.zones, *self.upstreams)
        ):
            raise SourceError(
                f"--listen {self.listen or ':53'}, --zone, --forward: none of these holds blanks or braces, "
                "and --listen is an address, a colon and a port"
            )
        bound = [f"bind {address.strip('[]')}"] if address else []
        ports = ["health {\n        lameduck 5s\n    }", "ready", "prometheus :9153"]
        return cluster_corefile(int(port), self.zones, self.upstreams, (*bound, *ports), self.ttl)


def cluster_corefile(
    port: int, zones: Sequence[str], upstreams: Sequence[str], others: Sequence[str] = (), ttl: int = 30
) -> str:
    """The Corefile of a cluster's zones (none given: cluster.local), much as kubeadm writes it, with other plugins."""
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


class Configuration:
    """A Corefile, and whether it has changed."""

    def __init__(self, path: Path | None, flags: Flags) -> None:
        """Raises SourceError."""
        self._path = path
        self._flags = flags
        self._signature: object = None
        self._imported: tuple[str, ...] = ()
        try:
            self._read = self._parse()
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
        except CorefileError as error:
            raise SourceError(str(error)) from error

    @property
    def blocks(self) -> tuple[ServerBlock, ...]:
        """The server blocks of the last good reading."""
        return self._read.blocks

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Warnings."""
        return self._read.problems

    def reread(self) -> tuple[ServerBlock, ...] | None:
        """Other server blocks, when there are. What is wrong with the file is logged, once for each edit."""
        if self._path is None or self._look() == self._signature:
            return None
        before = self._read.blocks
        try:
            self._read = self._parse()
        except (CorefileError, SourceError, OSError) as error:
            LOGGER.error("the Corefile has changed and cannot be used; the one before stays in force: %s", error)
            self._signature = self._look()
            return None
        for problem in self.problems:
            LOGGER.warning("%s", problem)
        return self._read.blocks if self._read.blocks != before else None

    def _parse(self) -> Corefile:
        if self._path is None:
            return parse(self._flags.corefile(), "flags")
        read = corefile.read(self._path, os.environ)
        self._imported = read.imported
        self._signature = self._look()
        self._try_files(read)
        return read

    def _try_files(self, read: Corefile) -> None:
        """Raises SourceError for files of TLS settings that cannot be used."""
        forwarding = [block for block in read.blocks if block.forwards]
        if not forwarding:
            return
        # It brings TLS along, which takes a while to load.
        from narthex.dns.program.resolver import trouble

        faults = [fault for fault in map(trouble, forwarding) if fault is not None]
        if faults:
            raise SourceError("\n".join(faults))

    def _look(self) -> object:
        assert self._path is not None
        names = [str(self._path), *(name for pattern in self._imported for name in corefile.matching(pattern))]
        return tuple((name, file_stamp(name)) for name in names)


def serve(
    configuration: Configuration,
    manifests: Path | None,
    kubeconfig: str,
    master: str,
    workers: int,
    recursion: Sequence[str],
) -> None:
    """Serve until SIGTERM or SIGINT. Raises SourceError and ListenError."""
    logs.start_logging(sys.stderr)
    allow_many_files()
    for problem in configuration.problems:
        LOGGER.warning("%s", problem)
    try:
        networks = tuple(network(text) for text in recursion) or PRIVATE
    except ValueError as error:
        raise SourceError(f"--recursion-for: {error}") from error
    settings = DnsSettings(blocks=configuration.blocks, workers=workers, recursion=networks)
    part = made(settings, manifests, kubeconfig, master, configuration)
    # The first lists leave no garbage that would be worth a look; the part switches it on again when it answers.
    gc.disable()
    with ended_by_signal(part.stop):
        part.run()
    LOGGER.info("stopped")


def made(
    settings: DnsSettings,
    manifests: Path | None,
    kubeconfig: str,
    master: str,
    configuration: Configuration | None = None,
) -> DnsPart:
    """A server for these settings, not started. Raises SourceError."""
    reread = configuration.reread if configuration is not None else lambda: None
    clusters = [block.kubernetes for block in settings.blocks if block.kubernetes is not None]
    if not clusters:
        from narthex.dns.program.no_objects import NoObjects

        return DnsPart(settings, NoObjects(), reread=reread)
    if manifests is not None:
        from narthex.kube.manifests import ManifestSource

        return DnsPart(settings, ManifestSource(manifests), reread=reread)
    told = next((cluster for cluster in clusters if cluster.kubeconfig or cluster.endpoint), clusters[0])
    for cluster in clusters:
        if (cluster.kubeconfig, cluster.endpoint) not in ((told.kubeconfig, told.endpoint), ("", "")):
            raise SourceError(f"kubernetes {cluster.zones[0]}: there is one API server for all sections")
    kubeconfig, master = kubeconfig or told.kubeconfig, master or told.endpoint
    if not (kubeconfig or master or os.environ.get("KUBERNETES_SERVICE_HOST")):
        raise SourceError("nothing to follow: give --kubeconfig, --master or --manifests (this is not a pod)")
    from narthex.kube.access import Access
    from narthex.runtime.configuration.values import ClientConnection

    return following(settings, Access(connection=ClientConnection(kubeconfig=kubeconfig), master=master), reread)


def following(settings: DnsSettings, access: Access, reread: Reread) -> DnsPart:
    """A server whose objects an API server has, not started."""
    from narthex.kube.resources import of_names
    from narthex.kube.source import KubeSource

    clusters = [block.kubernetes for block in settings.blocks if block.kubernetes is not None]
    source = KubeSource(
        access,
        of_names(
            endpoints=any(cluster.endpoints for cluster in clusters),
            pods=any(cluster.pods == "verified" for cluster in clusters),
        ),
        gather=0.0,
    )
    return DnsPart(settings, source, followed=source.followed, collectors=(), reread=reread)
