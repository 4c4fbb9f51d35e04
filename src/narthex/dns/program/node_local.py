"""Node-local DNS: the server as a part of `narthex node`, on addresses that exempt DNS from connection tracking.

A query to a Service passes NAT. Two queries from one socket at once (A and AAAA) may race for the same connection tracking
entry; one is dropped, and the client waits five seconds (kubernetes issue 56903). Here the node itself has the addresses, a
link-local one and those of the DNS Service, and `notrack` rules keep their packets from connection tracking and thus NAT.

The interface and the nft tables are bound to the process: when it ends, in whatever way, the kernel removes both, and the
address of the DNS Service leads to its endpoints as before.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from narthex.dns.corefile.parse import parse
from narthex.dns.corefile.settings import DEFAULT_PORT, BindSettings, ServerBlock
from narthex.dns.program.configuration import CorefileSource, DnsFlags, cluster_corefile
from narthex.dns.program.serve import DnsServer, DnsSettings, follow_api_server
from narthex.kube.source import Origin
from narthex.linux.libnftables import NftError, NftMissingError, OwnedTables
from narthex.linux.netlink import NetlinkError
from narthex.linux.privileges import allow_many_files
from narthex.linux.rtnetlink import RtNetlink
from narthex.model import FAMILIES, IPFamily, address, family_of
from narthex.model.links import NODE_LOCAL_DNS_LINK, AddAddress, SetUp
from narthex.model.values import Network, packed_address
from narthex.runtime.configuration.values import DnsConfiguration
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import StartError

TABLE = "narthex-dns"
METRICS = ":9353"
"""Metrics endpoint of node-local caches (row S21)."""
_WORKERS = 1
"""One worker suffices for the pods of a node."""
TUN_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI, _IFF_TUN_EXCL = 0x0001, 0x1000, 0x8000
_REQUEST = struct.Struct("16sH22x")


def notrack_tables(addresses: Sequence[str], ports: Collection[int] = (53,)) -> str:
    """Return nft commands for one table per family; `flags owner` binds it to the process (Linux 5.12).

    Raises ValueError for an invalid address.
    """
    return "".join(_table(family.nft, chosen, sorted(ports)) for family, chosen in _by_family(addresses))


def release_commands(addresses: Sequence[str]) -> str:
    """Return nft commands after which queries are tracked again, but not the replies to earlier ones."""
    chains = ("prerouting", "output")
    return "".join(
        f"flush chain {family.nft} {TABLE} {chain}\n" for family, _ in _by_family(addresses) for chain in chains
    )


def _by_family(addresses: Sequence[str]) -> Iterator[tuple[IPFamily, list[str]]]:
    for family in FAMILIES:
        chosen = sorted({address(each) for each in addresses if family_of(each) is family})
        if chosen:
            yield family, chosen


def _table(ip: str, addresses: list[str], ports: list[int]) -> str:
    address_set, port_set = ", ".join(addresses), ", ".join(map(str, ports))
    to = f"{ip} daddr {{ {address_set} }} meta l4proto {{ tcp, udp }} th dport {{ {port_set} }} notrack"
    back = f"{ip} saddr {{ {address_set} }} meta l4proto {{ tcp, udp }} th sport {{ {port_set} }} notrack"
    return (
        f"table {ip} {TABLE} {{\n\tflags owner\n"
        f"\tchain prerouting {{\n\t\ttype filter hook prerouting priority raw;\n\t\t{to}\n\t}}\n"
        f"\tchain output {{\n\t\ttype filter hook output priority raw;\n\t\t{to}\n\t}}\n"
        f"\tchain replies {{\n\t\ttype filter hook output priority raw;\n\t\t{back}\n\t}}\n}}\n"
    )


class NodeLocalLinkError(RuntimeError):
    """The addresses cannot be configured; the message states the remedy."""


class NodeLocalLink:
    """An interface with the addresses, and the `notrack` rules, in the network namespace of the calling thread.

    A tun interface that is not persistent vanishes with its file descriptor, and an owned table with its socket, so that
    nothing attracts queries after the process has been killed.
    """

    def __init__(self, addresses: Sequence[str], ports: Collection[int] = (53,)) -> None:
        """Create interface and addresses. Raises NodeLocalLinkError after removing all of them again.

        Queries to addresses of Services still go to the endpoints, until `attract`.
        """
        self._addresses, self._ports = tuple(addresses), tuple(ports)
        self._tables: OwnedTables | None = None
        self._file = _create_link()
        try:
            _add_addresses(addresses)
        except (NetlinkError, OSError) as error:
            self.close()
            raise NodeLocalLinkError(f"link {NODE_LOCAL_DNS_LINK}: {error}") from error

    def attract(self) -> None:
        """Load the rules with which queries come to this node. Raises NodeLocalLinkError."""
        try:
            self._tables = OwnedTables(notrack_tables(self._addresses, self._ports))
        except (NftError, NftMissingError) as error:
            message = f"rules that exempt DNS from connection tracking could not be loaded: {error}"
            raise NodeLocalLinkError(message) from error

    def release(self) -> None:
        """Let new queries go to the endpoints of Services again; replies to earlier ones still leave.

        Without the rule for replies, each would make an entry that sends the client's next queries to this node.
        """
        if self._tables is None:
            return
        try:
            self._tables.run(release_commands(self._addresses))
        except NftError as error:
            LOGGER.warning("queries come to this node until its DNS server has ended: %s", error)

    def close(self) -> None:
        """Remove interface and rules. Idempotent."""
        if self._tables is not None:
            self._tables.close()
            self._tables = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _create_link() -> int:
    try:
        file = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NodeLocalLinkError(
            f"{TUN_DEVICE}: {error.strerror}; load module tun, and give the container access to the device"
        ) from error
    request = _REQUEST.pack(NODE_LOCAL_DNS_LINK.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_TUN_EXCL)
    try:
        fcntl.ioctl(file, _TUNSETIFF, request)
    except OSError as error:
        os.close(file)
        hint = f"another process answers on this node: stop it, or remove the link {NODE_LOCAL_DNS_LINK}"
        raise NodeLocalLinkError(
            f"link {NODE_LOCAL_DNS_LINK}: {error.strerror}; {hint if error.errno == errno.EBUSY else TUN_DEVICE}"
        ) from error
    return file


def _add_addresses(addresses: Sequence[str]) -> None:
    networks = [Network(data, 8 * len(data)) for data in map(packed_address, addresses)]
    netlink = RtNetlink()
    try:
        netlink.fulfil(
            [
                SetUp(NODE_LOCAL_DNS_LINK),
                *(AddAddress(NODE_LOCAL_DNS_LINK, network, connected=False) for network in networks),
            ]
        )
    finally:
        netlink.close()


class NodeLocalDns:
    """The DNS part of a node process."""

    def __init__(self, addresses: tuple[str, ...], server: DnsServer, ports: frozenset[int]) -> None:
        self._addresses = addresses
        self._server = server
        self._ports = ports

    @property
    def healthy(self) -> bool:
        """True while queries are answered from complete data."""
        return self._server.healthy

    def run(self) -> None:
        """Serve until `stop`. Raises StartError and ListenError."""
        allow_many_files()
        try:
            link = NodeLocalLink(self._addresses, self._ports) if self._addresses else None
        except NodeLocalLinkError as error:
            raise StartError(str(error)) from error
        try:
            if link is None:
                self._server.run()
            else:
                self._server.run(link.attract, link.release)
        except NodeLocalLinkError as error:
            raise StartError(str(error)) from error
        finally:
            if link is not None:
                link.close()

    def stop(self) -> None:
        """Make `run` return. May be called from any thread at any time."""
        self._server.stop()


def build_node_local(configuration: DnsConfiguration, origin: Origin, ipvs: bool) -> NodeLocalDns:
    """Build the part, which is not started.

    Args:
        configuration: Section `dns` of the node's configuration.
        origin: Source of the objects.
        ipvs: True if the proxy of this node has the addresses of Services on an interface of its own.

    Raises:
        StartError: The configuration is invalid.
    """
    addresses = (*configuration.addresses, *configuration.listen)
    if not addresses:
        raise StartError("dns.addresses and dns.listen are both empty, so there is nowhere to answer: name an address")
    services = [each for each in configuration.addresses if not ipaddress.ip_address(each).is_link_local]
    if ipvs and services:
        raise StartError(
            f"dns.addresses: in mode ipvs the virtual servers of Services take queries to {services[0]} before they are "
            "answered here; list link-local addresses only, and set the kubelet's clusterDNS to one of them"
        )
    try:
        file = CorefileSource(Path(configuration.corefile), DnsFlags()) if configuration.corefile else None
        blocks = _bind(file.blocks if file else _default_blocks(configuration), addresses)
    except ValueError as error:
        raise StartError(f"dns: {error}") from error
    for problem in file.problems if file else ():
        LOGGER.warning("%s", problem)

    def reread() -> tuple[ServerBlock, ...] | None:
        """Return the server blocks, bound to the local addresses, if the Corefile changed since the last call, else None."""
        changed = file.reread() if file else None
        return None if changed is None else _bind(changed, addresses)

    settings = DnsSettings(blocks=blocks, workers=_WORKERS)
    if origin.access is None:
        server = DnsServer(settings, origin.source, reread=reread)
    else:
        server = follow_api_server(settings, origin.access, reread)
    return NodeLocalDns(configuration.addresses, server, frozenset(block.port for block in blocks))


def _default_blocks(configuration: DnsConfiguration) -> tuple[ServerBlock, ...]:
    text = cluster_corefile(DEFAULT_PORT, configuration.zones, configuration.upstreams, [f"prometheus {METRICS}"])
    return parse(text, "zones and upstreams").blocks


def _bind(blocks: tuple[ServerBlock, ...], addresses: tuple[str, ...]) -> tuple[ServerBlock, ...]:
    """Return the server blocks with the addresses of the node where they have no `bind` of their own."""
    bind = BindSettings(to=addresses)
    return tuple(block if block.bind is not None else msgspec.structs.replace(block, bind=bind) for block in blocks)
