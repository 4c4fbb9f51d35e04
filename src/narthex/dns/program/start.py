"""`narthex dns`: builds the server of a Corefile and a source of objects, and runs it until a signal."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from narthex.dns.corefile.settings import KubernetesSettings, ServerBlock
from narthex.dns.program.configuration import CorefileSource, DnsConfigurationError
from narthex.dns.program.serve import DnsServer, DnsSettings
from narthex.dns.server.dispatcher import DEFAULT_RECURSION_NETWORKS
from narthex.linux.privileges import allow_many_files
from narthex.model.net import network
from narthex.model.store import Event, Synced
from narthex.runtime import logs
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import ended_by_signal

if TYPE_CHECKING:
    from narthex.kube.access import Access

Reread = Callable[[], tuple[ServerBlock, ...] | None]
"""Returns the server blocks if they have changed."""


def serve(
    source: CorefileSource, manifests: Path | None, kubeconfig: str, master: str, workers: int, recursion: Sequence[str]
) -> None:
    """Serve until SIGTERM or SIGINT. Raises DnsConfigurationError and ListenError."""
    logs.start_logging(sys.stderr)
    allow_many_files()
    for problem in source.problems:
        LOGGER.warning("%s", problem)
    try:
        networks = tuple(network(text) for text in recursion) or DEFAULT_RECURSION_NETWORKS
    except ValueError as error:
        raise DnsConfigurationError(f"--recursion-for: {error}") from error
    settings = DnsSettings(blocks=source.blocks, workers=workers, recursion=networks)
    server = build_server(settings, manifests, kubeconfig, master, source)
    # The initial lists leave no garbage to collect; the server enables collection when it starts to answer.
    gc.disable()
    with ended_by_signal(server.stop):
        server.run()
    LOGGER.info("stopped")


def build_server(
    settings: DnsSettings, manifests: Path | None, kubeconfig: str, master: str, source: CorefileSource | None = None
) -> DnsServer:
    """Build a server, which is not started. Raises DnsConfigurationError."""
    reread = source.reread if source is not None else lambda: None
    sections = _kubernetes_sections(settings)
    if not sections:
        return DnsServer(settings, NoObjects(), reread=reread)
    if manifests is not None:
        from narthex.kube.manifests import ManifestSource

        return DnsServer(settings, ManifestSource(manifests), reread=reread)
    chosen = next((each for each in sections if each.kubeconfig or each.endpoint), sections[0])
    for section in sections:
        if (section.kubeconfig, section.endpoint) not in ((chosen.kubeconfig, chosen.endpoint), ("", "")):
            raise DnsConfigurationError(
                f"kubernetes {section.zones[0]}: there is one API server for all sections; give all the same endpoint "
                "and kubeconfig"
            )
    kubeconfig, master = kubeconfig or chosen.kubeconfig, master or chosen.endpoint
    if not (kubeconfig or master or os.environ.get("KUBERNETES_SERVICE_HOST")):
        raise DnsConfigurationError("nothing to follow: give --kubeconfig, --master or --manifests (this is not a pod)")
    from narthex.kube.access import Access
    from narthex.runtime.configuration.values import ClientConnection

    access = Access(connection=ClientConnection(kubeconfig=kubeconfig), master=master)
    return follow_api_server(settings, access, reread)


def follow_api_server(settings: DnsSettings, access: Access, reread: Reread) -> DnsServer:
    """Build a server for the objects of an API server, which is not started."""
    from narthex.kube.resources import of_names
    from narthex.kube.source import KubeSource

    sections = _kubernetes_sections(settings)
    source = KubeSource(
        access,
        of_names(
            endpoints=any(section.endpoints for section in sections),
            pods=any(section.pods == "verified" for section in sections),
        ),
        gather=0.0,
    )
    return DnsServer(settings, source, followed=source.followed, reread=reread)


def _kubernetes_sections(settings: DnsSettings) -> list[KubernetesSettings]:
    return [block.kubernetes for block in settings.blocks if block.kubernetes is not None]


class NoObjects:
    """The source of a server without plugin `kubernetes`: no objects, and no changes."""

    problems: Sequence[object] = ()

    def scan(self) -> Sequence[Event]:
        """Return the end of the initial lists."""
        return [Synced()]

    def changes(self, stop: threading.Event) -> Iterator[Sequence[Event]]:
        """Wait until `stop`."""
        stop.wait()
        return iter(())
