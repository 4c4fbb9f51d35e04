"""Where server blocks listen: addresses out of `bind`, and the sockets of all workers."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import msgspec

from narthex.dns.corefile.settings import Bind, ServerBlock
from narthex.dns.server.batch import udp_socket
from narthex.dns.server.tcp import tcp_socket
from narthex.linux.addresses import addresses_on, own_addresses

EVERYWHERE = ("0.0.0.0", "::")


class Place(msgspec.Struct, frozen=True):
    """An address and port, and which server blocks answer there."""

    address: str
    port: int
    blocks: tuple[int, ...]


class ListenError(RuntimeError):
    """Nothing can listen there; the message says where and why."""


def places(blocks: Sequence[ServerBlock]) -> list[Place]:
    """All addresses and ports of server blocks. Raises ListenError for a `bind` that means nothing here."""
    found: dict[tuple[str, int], list[int]] = {}
    for number, block in enumerate(blocks):
        for address in EVERYWHERE if block.bind is None else _bound(block.bind, block):
            found.setdefault((address, block.port), []).append(number)
    return [Place(address, port, tuple(numbers)) for (address, port), numbers in found.items()]


def open_sockets(place: Place) -> tuple[socket.socket, socket.socket] | None:
    """One worker's UDP and TCP sockets. None: this machine has no IPv6, and `::` was not asked for by name. Raises
    ListenError."""
    try:
        udp = udp_socket(place.address, place.port)
    except OSError as error:
        if place.address == EVERYWHERE[1] and not _has_ipv6():
            return None
        raise _cannot(error) from error
    try:
        return udp, tcp_socket(place.address, place.port)
    except OSError as error:
        udp.close()
        raise _cannot(error) from error


def reached_at(found: Sequence[Place]) -> tuple[str, ...]:
    """Addresses at which others reach us: those bound, or all global ones of this network namespace."""
    named = tuple(dict.fromkeys(place.address for place in found if place.address not in EVERYWHERE))
    return named or tuple(own.address for own in own_addresses() if own.is_global)


def _bound(bind: Bind, block: ServerBlock) -> list[str]:
    excluded = {address for word in bind.excluded for address in _meant(word, block)}
    found = dict.fromkeys(address for word in bind.to for address in _meant(word, block) if address not in excluded)
    if not found:
        raise ListenError(f"{block.where}: bind: no address is left to listen on")
    return list(found)


def _meant(word: str, block: ServerBlock) -> list[str]:
    """An address, or all addresses of a link but link-local IPv6 ones, which mean nothing without it."""
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


def _cannot(error: OSError) -> ListenError:
    hint = "; another server has it: stop that, or listen on other addresses (bind)" if error.errno == 98 else ""
    return ListenError(f"cannot listen: {error.strerror}{hint}")
