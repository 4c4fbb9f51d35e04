"""Links that an announcer can answer on, and notification of their changes, by rtnetlink.

Such a link is Ethernet, up and running, broadcast-capable, uses ARP, and is no port of a bridge or bond (row A6). Links
excluded by name patterns are skipped: those of Pods and of virtual machines on the node.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from narthex.linux.addresses import own_addresses
from narthex.linux.netlink import DumpInterrupted, Netlink
from narthex.linux.rtnetlink import attributes

_NETLINK_ROUTE, _GETLINK = 0, 18
_INFO = struct.Struct("=BxHiII")
_ETHERNET = 1
_UP, _BROADCAST, _LOOPBACK, _RUNNING, _NOARP = 0x1, 0x2, 0x8, 0x40, 0x80
_NEEDED, _REFUSED = _UP | _BROADCAST | _RUNNING, _LOOPBACK | _NOARP
_MAC, _NAME, _MASTER = 1, 3, 10
_GROUP_LINK, _GROUP_IPV6_ADDRESS = 1 << 0, 1 << 8
_LINK_LOCAL = ("fe8", "fe9", "fea", "feb")
"""Beginnings of the addresses in fe80::/10."""
_RCVBUF = 1 << 16


class HostLink(msgspec.Struct, frozen=True, kw_only=True):
    """One link that the announcer can answer on."""

    name: str
    index: int
    mac: bytes
    link_local: str
    """Its link-local IPv6 address; empty if it has none that passed duplicate address detection."""


def links(exclude: Sequence[str] = ()) -> tuple[HostLink, ...]:
    """Return all suitable links by name. `exclude` are shell patterns of names. Raises OSError."""
    netlink = Netlink(_NETLINK_ROUTE)
    try:
        found = _dump(netlink)
    finally:
        netlink.close()
    local = {
        each.interface: each.address
        for each in own_addresses()
        if each.address.startswith(_LINK_LOCAL) and not each.tentative
    }
    return tuple(
        HostLink(name=name, index=index, mac=mac, link_local=local.get(index, ""))
        for name, index, mac in sorted(found)
        if not any(fnmatchcase(name, pattern) for pattern in exclude)
    )


def _dump(netlink: Netlink) -> list[tuple[str, int, bytes]]:
    """Return name, index, and MAC address of each suitable link."""
    while True:
        found = []
        try:
            for data in netlink.dump(_GETLINK, _INFO.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
                _, kind, index, flags, _ = _INFO.unpack_from(data)
                values = attributes(data, _INFO.size)
                if kind != _ETHERNET or flags & _NEEDED != _NEEDED or flags & _REFUSED or _MASTER in values:
                    continue
                name = values[_NAME].rstrip(b"\0").decode("utf-8", "surrogateescape")
                found.append((name, index, values.get(_MAC, b"")))
        except DumpInterrupted:
            continue
        return [each for each in found if len(each[2]) == 6]


class LinkChanges:
    """A socket that becomes readable when a link or an IPv6 address may have changed. Call `links` again then."""

    def __init__(self) -> None:
        """Subscribe to the rtnetlink groups. Raises OSError."""
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_ROUTE)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RCVBUF)
        self._socket.bind((0, _GROUP_LINK | _GROUP_IPV6_ADDRESS))

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._socket.fileno()

    def drain(self) -> bool:
        """Discard all queued notifications; return True if there were any."""
        found = False
        try:
            while self._socket.recv(_RCVBUF):
                found = True
        except BlockingIOError:
            return found
        except OSError:
            # The queue overflowed, so there were changes.
            return True
        return found

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
