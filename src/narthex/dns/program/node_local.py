"""DNS as a part of a node: names answered where they are asked, on addresses of the node's own that no connection tracking
sees.

When the process ends the addresses go with it, and questions to the DNS Service's address go to its endpoints again.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

import msgspec

from narthex.dns.corefile.parse import parse
from narthex.dns.corefile.settings import DEFAULT_PORT, Bind, ServerBlock
from narthex.dns.program.serve import DnsPart, DnsSettings
from narthex.dns.program.start import Configuration, Flags, cluster_corefile, following
from narthex.dns.server.own_link import OwnLink, OwnLinkError
from narthex.kube.origin import Origin
from narthex.linux.privileges import allow_many_files
from narthex.runtime.configuration.values import DnsConfiguration
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import StartError

METRICS = ":9353"
"""Where node-local caches have their metrics (row S21)."""
_WORKERS = 1
"""A node's own pods ask no more than one can answer, and the rest of the node has other things to do."""


class NodeLocalDns:
    """One run of it."""

    def __init__(self, addresses: tuple[str, ...], server: DnsPart, ports: frozenset[int]) -> None:
        self._addresses = addresses
        self._server = server
        self._ports = ports

    @property
    def healthy(self) -> bool:
        """Whether questions are answered, by all that is known."""
        return self._server.healthy

    def run(self) -> None:
        """Serve until `stop`. Raises StartError, ListenError."""
        allow_many_files()
        try:
            held = OwnLink(self._addresses, self._ports) if self._addresses else None
        except OwnLinkError as error:
            raise StartError(str(error)) from error
        try:
            self._server.run()
        finally:
            if held is not None:
                held.close()

    def stop(self) -> None:
        """Let `run` return. Safe from any thread, at any time."""
        self._server.stop()


def made(told: DnsConfiguration, origin: Origin, ipvs: bool) -> NodeLocalDns:
    """The part, not started. `ipvs`: the proxy of this node has Services' addresses itself. Raises StartError."""
    everywhere = (*told.addresses, *told.listen)
    if not everywhere:
        raise StartError("dns.addresses and dns.listen are both empty, so there is nowhere to answer: name an address")
    services = [address for address in told.addresses if not ipaddress.ip_address(address).is_link_local]
    if ipvs and services:
        raise StartError(
            f"dns.addresses: mode ipvs has Services' addresses on its own link, and its virtual servers take {services[0]} "
            "before it is answered here; list link-local addresses only, and let the kubelet's clusterDNS be one"
        )
    try:
        file = Configuration(Path(told.corefile), Flags()) if told.corefile else None
        blocks = _bound(file.blocks if file else _cluster(told), everywhere)
    except ValueError as error:
        raise StartError(f"dns: {error}") from error
    for problem in file.problems if file else ():
        LOGGER.warning("%s", problem)

    def reread() -> tuple[ServerBlock, ...] | None:
        fresh = file.reread() if file else None
        return None if fresh is None else _bound(fresh, everywhere)

    settings = DnsSettings(blocks=blocks, workers=_WORKERS)
    if origin.access is None:
        server = DnsPart(settings, origin.source, reread=reread)
    else:
        server = following(settings, origin.access, reread)
    return NodeLocalDns(told.addresses, server, frozenset(block.port for block in blocks))


def _cluster(told: DnsConfiguration) -> tuple[ServerBlock, ...]:
    text = cluster_corefile(DEFAULT_PORT, told.zones, told.upstreams, [f"prometheus {METRICS}"])
    return parse(text, "zones and upstreams").blocks


def _bound(blocks: tuple[ServerBlock, ...], addresses: tuple[str, ...]) -> tuple[ServerBlock, ...]:
    """The blocks on the node's own addresses, where they do not say otherwise."""
    return tuple(
        block if block.bind is not None else msgspec.structs.replace(block, bind=Bind(to=addresses)) for block in blocks
    )
