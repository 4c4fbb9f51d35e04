"""The addresses that server blocks listen on (plugin `bind`), and the sockets of the workers."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Literal

import msgspec

from narthex.dns.corefile.settings import BindSettings, ServerBlock
from narthex.dns.server.udp import IP_PKTINFO
from narthex.linux.addresses import addresses_on, own_addresses
from narthex.runtime.process import StartError

EVERYWHERE = ("0.0.0.0", "::")
_BACKLOG = 512


ListenTransport = Literal["udp", "tcp", "tls", "https"]


class ListenAddress(msgspec.Struct, frozen=True):
    """An address and port, and the numbers of the server blocks that answer there."""

    address: str
    port: int
    blocks: tuple[int, ...]
    protocol: Literal["dns", "tls", "https"] = "dns"

    @property
    def transports(self) -> tuple[ListenTransport, ...]:
        """The transports of the sockets."""
        return ("udp", "tcp") if self.protocol == "dns" else (self.protocol,)


class ListenError(StartError):
    """An address cannot be listened on; the message states which and why."""


def listen_addresses(blocks: Sequence[ServerBlock]) -> list[ListenAddress]:
    """Return the addresses and ports of all server blocks. Raises ListenError for an invalid `bind`."""
    found: dict[tuple[str, int, Literal["dns", "tls", "https"]], list[int]] = {}
    for number, block in enumerate(blocks):
        for address in EVERYWHERE if block.bind is None else _bound_addresses(block.bind, block):
            found.setdefault((address, block.port, block.transport), []).append(number)
    return [
        ListenAddress(address, port, tuple(numbers), protocol) for (address, port, protocol), numbers in found.items()
    ]


def open_sockets(listen: ListenAddress) -> tuple[socket.socket, ...]:
    """Open the sockets of an address for one worker, one for each transport.

    Return none for `::` on a machine without IPv6. Raises ListenError.
    """
    found: list[socket.socket] = []
    try:
        for transport in listen.transports:
            kind = socket.SOCK_DGRAM if transport == "udp" else socket.SOCK_STREAM
            found.append(_bound_socket(kind, listen.address, listen.port))
    except OSError as error:
        for sock in found:
            sock.close()
        if not found and listen.address == EVERYWHERE[1] and not _has_ipv6():
            return ()
        raise _listen_error(error) from error
    return tuple(found)


def _bound_socket(kind: socket.SocketKind, address: str, port: int) -> socket.socket:
    """Return a socket for a `UdpServer` or `TcpServer`; several may share an address and port. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    tcp = kind is socket.SOCK_STREAM
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if tcp:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            # Twice the default, so that a worker that is busy for some milliseconds loses nothing.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            if family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        sock.bind((address, port))
        if tcp:
            sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        where = f"{'TCP' if tcp else 'UDP'} {address} port {port}"
        raise OSError(error.errno, f"{os.strerror(error.errno or 0)}: {where}") from error
    return sock


def reached_at(found: Sequence[ListenAddress]) -> tuple[str, ...]:
    """Return the addresses of this server: those it is bound to, or all global ones of this network namespace."""
    named = tuple(dict.fromkeys(each.address for each in found if each.address not in EVERYWHERE))
    return named or tuple(own.address for own in own_addresses() if own.is_global)


def _bound_addresses(bind: BindSettings, block: ServerBlock) -> list[str]:
    excluded = {address for word in bind.excluded for address in _addresses_of(word, block)}
    found = dict.fromkeys(
        address for word in bind.to for address in _addresses_of(word, block) if address not in excluded
    )
    if not found:
        raise ListenError(f"{block.where}: bind: no address is left to listen on")
    return list(found)


def _addresses_of(word: str, block: ServerBlock) -> list[str]:
    """Return an address, or those of an interface except link-local IPv6 addresses, which require a zone index."""
    try:
        return [str(ipaddress.ip_address(word))]
    except ValueError:
        pass
    found = [own.address for own in addresses_on(word)]
    if not found:
        links = ", ".join(name for _, name in socket.if_nameindex())
        raise ListenError(f"{block.where}: bind: {word} is neither an address nor a link that has one (links: {links})")
    return [address for address in found if not ipaddress.ip_address(address).is_link_local or ":" not in address]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _listen_error(error: OSError) -> ListenError:
    return ListenError(f"cannot listen: {error.strerror}{_HINTS.get(error.errno or 0, '')}")


_HINTS = {
    errno.EADDRINUSE: "; another server uses it: stop that one, or listen on other addresses (bind)",
    errno.EACCES: "; this port needs root, CAP_NET_BIND_SERVICE, or net.ipv4.ip_unprivileged_port_start",
}
