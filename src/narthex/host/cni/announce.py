"""Tells a link's neighbours that an address has a new holder (RFC 5227, 2.3; RFC 4861, 7.2.6), from the calling thread's
namespace."""

from __future__ import annotations

import _socket as socket
import struct

_NEIGHBOUR_ADVERTISEMENT, _OVERRIDE, _TARGET_LINK_LAYER = 136, 0x20000000, 2
_ALL_NODES = "ff02::1"
_ARP, _IPV4, _ETHERNET, _REQUEST = 0x0806, 0x0800, 1, 1
_EVERYBODY = b"\xff" * 6
_HOPS = 255
"""Whoever gets it sees by this that no router was in between."""


def send(interface: str, address: bytes, mac: bytes) -> None:
    """Send one announcement. Nobody has to hear it, so that it cannot be sent is no error."""
    try:
        if len(address) == 4:
            _ipv4(interface, address, mac)
        else:
            _ipv6(interface, address, mac)
    except OSError:
        return


def _ipv4(interface: str, address: bytes, mac: bytes) -> None:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC)
    try:
        sock.bind((interface, _ARP))
        frame = _EVERYBODY + mac + struct.pack(">HHHBBH", _ARP, _ETHERNET, _IPV4, 6, 4, _REQUEST)
        sock.send(frame + mac + address + bytes(6) + address)
    finally:
        sock.close()


def _ipv6(interface: str, address: bytes, mac: bytes) -> None:
    sock = socket.socket(socket.AF_INET6, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_ICMPV6)
    try:
        index = socket.if_nametoindex(interface)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, _HOPS)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        sock.bind((socket.inet_ntop(socket.AF_INET6, address), 0, 0, index))
        head = struct.pack(">BBHI", _NEIGHBOUR_ADVERTISEMENT, 0, 0, _OVERRIDE)
        # The kernel fills in the checksum. Options are counted in units of eight bytes.
        option = bytes((_TARGET_LINK_LAYER, 1)) + mac
        sock.sendto(head + address + option, (_ALL_NODES, 0, 0, index))
    finally:
        sock.close()
