"""Raw Ethernet sockets for ARP and Neighbor Discovery on all suitable links, and notification of their changes.

A suitable link is Ethernet, up and running, broadcast-capable, uses ARP, and is no port of a bridge or bond (row A6).
Links excluded by name patterns are skipped: those of Pods and of virtual machines on the node.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from narthex.lb.l2 import ETHERTYPE_ARP, ETHERTYPE_IPV6, arp_filter, nd_filter, solicited_node
from narthex.linux.addresses import own_addresses
from narthex.linux.netlink import DumpInterrupted, Netlink, payloads
from narthex.linux.socket_filter import attach_filter

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
                values = payloads(data, _INFO.size)
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


_FOR_OTHERS = (socket.PACKET_OTHERHOST, socket.PACKET_OUTGOING)
_MOST_BYTES = 2048
_AT_ONCE = 256
"""Frames to read before other work gets a turn."""
_GONE = (errno.ENODEV, errno.ENXIO, errno.ENETDOWN, errno.ENOBUFS, errno.EAGAIN)
"""Temporary send errors; a link may disappear at any time."""


class LinkSockets:
    """Raw sockets of one link."""

    def __init__(self, link: HostLink) -> None:
        """Open the sockets, which receive nothing before `listen_for`.

        Raises OSError without CAP_NET_RAW, or if the link does not exist any more.
        """
        self.link = link
        self._arp = _opened(link, ETHERTYPE_ARP)
        try:
            self._nd = _opened(link, ETHERTYPE_IPV6)
        except OSError:
            self._arp.close()
            raise
        self._groups = _Groups(link)
        self._required: frozenset[str] = frozenset()

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors to poll."""
        return self._arp.fileno(), self._nd.fileno()

    def listen_for(self, addresses: Collection[str], answered: Collection[str]) -> None:
        """Receive messages about these addresses, and join the solicited-node groups of the `answered` ones."""
        required = frozenset(addresses)
        if required != self._required:
            attach_filter(self._arp, arp_filter(required))
            attach_filter(self._nd, nd_filter(required))
            self._required = required
        self._groups.be_in({solicited_node(each) for each in answered if ":" in each})

    def frames(self) -> Iterator[bytes]:
        """Yield the queued frames, except those sent to other hosts."""
        for sock in (self._arp, self._nd):
            for _ in range(_AT_ONCE):
                try:
                    data, place = sock.recvfrom(_MOST_BYTES)
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in _GONE:
                        break
                    raise
                if place[2] not in _FOR_OTHERS:
                    yield data

    def send(self, frame: bytes) -> bool:
        """Send a complete frame; return False if the link could not send it."""
        try:
            self._arp.send(frame)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the sockets."""
        self._arp.close()
        self._nd.close()
        self._groups.close()


def _opened(link: HostLink, protocol: int) -> socket.socket:
    """Open a socket that receives nothing yet."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        sock.setblocking(False)
        attach_filter(sock, ((0x06, 0, 0, 0),))
        sock.bind((link.name, protocol))
        if sock.getsockname()[0] != link.name:
            raise OSError(errno.ENODEV, f"link {link.name} has gone")
    except OSError:
        sock.close()
        raise
    return sock


class _Groups:
    """Multicast memberships on one link, so that network cards and switches pass the groups' packets."""

    def __init__(self, link: HostLink) -> None:
        self._index = link.index
        self._socket: socket.socket | None = None
        self._in: set[str] = set()

    def be_in(self, required: Collection[str]) -> None:
        """Join these groups and leave all others. Without IPv6 on the link, nothing is joined."""
        for group in self._in - set(required):
            if self._change(socket.IPV6_LEAVE_GROUP, group):
                self._in.discard(group)
        for group in set(required) - self._in:
            if self._change(socket.IPV6_JOIN_GROUP, group):
                self._in.add(group)

    def _change(self, option: int, group: str) -> bool:
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            raw = socket.inet_pton(socket.AF_INET6, group)
            self._socket.setsockopt(socket.IPPROTO_IPV6, option, raw + struct.pack("@I", self._index))
        except OSError as error:
            # It left with its link, or is joined already.
            return error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
        return True

    def close(self) -> None:
        """Close the socket and so leave its multicast groups."""
        if self._socket is not None:
            self._socket.close()


class RawLinkTransport:
    """Raw sockets on all suitable links, as they come and go. Not thread-safe."""

    def __init__(self, exclude: Sequence[str], say: Callable[[str], object]) -> None:
        """Set patterns of link names to exclude, and the function that reports links that cannot be opened."""
        self._exclude = tuple(exclude)
        self._say = say
        self._open: dict[str, LinkSockets] = {}
        self._heard: tuple[frozenset[str], dict[str, frozenset[str]]] = (frozenset(), {})

    @property
    def links(self) -> Mapping[str, HostLink]:
        """Links that can be answered on now, by name."""
        return {name: each.link for name, each in self._open.items()}

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors to poll; they change when `rescan` returns True."""
        return tuple(file for each in self._open.values() for file in each.files)

    def rescan(self) -> bool:
        """Read the links again; return True if they changed. Raises PermissionError."""
        found = {link.name: link for link in links(self._exclude)}
        before = self.links
        for name, each in list(self._open.items()):
            if found.get(name) != each.link:
                each.close()
                del self._open[name]
        for name in found.keys() - self._open.keys():
            try:
                self._open[name] = LinkSockets(found[name])
            except PermissionError as error:
                raise PermissionError(error.errno, f"raw sockets need CAP_NET_RAW: {error.strerror}") from error
            except OSError as error:
                # The link may be gone already; if it stays, the next rescan tries again.
                self._say(f"link {name}: {error.strerror or error}")
        self.listen_for(*self._heard)
        return self.links != before

    def listen_for(self, addresses: frozenset[str], answered: dict[str, frozenset[str]]) -> None:
        """Receive messages about these addresses; `answered` are the addresses that each link answers for."""
        self._heard = addresses, answered
        for name, each in self._open.items():
            each.listen_for(addresses, answered.get(name, frozenset()))

    def frames(self) -> Iterator[tuple[HostLink, bytes]]:
        """Yield the queued frames with their links."""
        for each in list(self._open.values()):
            for frame in each.frames():
                yield each.link, frame

    def send(self, name: str, frames: Collection[bytes]) -> int:
        """Send frames on a link; return how many were sent."""
        each = self._open.get(name)
        return sum(each.send(frame) for frame in frames) if each else 0

    def close(self) -> None:
        """Close all sockets."""
        for each in self._open.values():
            each.close()
        self._open.clear()
