"""Tells a link's IPv6 neighbours that an address has a new holder (RFC 4861, 7.2.6), from the calling thread's
namespace."""

from __future__ import annotations

import _socket as socket
import struct

_NEIGHBOUR_ADVERTISEMENT, _OVERRIDE, _TARGET_LINK_LAYER = 136, 0x20000000, 2
_ALL_NODES = "ff02::1"
_HOPS = 255
"""Whoever gets it sees by this that no router was in between."""


def ipv6(interface: str, address: bytes, mac: bytes) -> None:
    """Send one unsolicited advertisement. Nobody has to hear it, so that it cannot be sent is no error."""
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_ICMPV6)
    except OSError:
        return
    try:
        index = socket.if_nametoindex(interface)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, _HOPS)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        sock.bind((socket.inet_ntop(socket.AF_INET6, address), 0, 0, index))
        head = struct.pack(">BBHI", _NEIGHBOUR_ADVERTISEMENT, 0, 0, _OVERRIDE)
        # The kernel fills in the checksum. Options are counted in units of eight bytes.
        option = bytes((_TARGET_LINK_LAYER, 1)) + mac
        sock.sendto(head + address + option, (_ALL_NODES, 0, 0, index))
    except OSError:
        return
    finally:
        sock.close()
