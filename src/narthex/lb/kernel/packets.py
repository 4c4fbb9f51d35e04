"""Raw Ethernet on one link, for ARP and Neighbour Discovery, and the multicast groups in which IPv6 addresses are asked
for."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from narthex.lb.kernel.links import HostLink, links
from narthex.lb.l2 import ETHERTYPE_ARP, ETHERTYPE_IPV6, arp_filter, nd_filter, solicited_node
from narthex.linux import socket_filter as bpf

_FOR_OTHERS = (socket.PACKET_OTHERHOST, socket.PACKET_OUTGOING)
_MOST_BYTES = 2048
_AT_ONCE = 256
"""Frames that are read before something else has its turn."""
_GONE = (errno.ENODEV, errno.ENXIO, errno.ENETDOWN, errno.ENOBUFS, errno.EAGAIN)
"""Why a frame cannot be sent at present; a link may vanish at any time."""


class LinkSockets:
    """What is heard and said on one link."""

    def __init__(self, link: HostLink) -> None:
        """Nothing is heard before `listen_for`. Raises OSError: without CAP_NET_RAW, or when the link has gone."""
        self.link = link
        self._arp = _opened(link, ETHERTYPE_ARP)
        try:
            self._nd = _opened(link, ETHERTYPE_IPV6)
        except OSError:
            self._arp.close()
            raise
        self._groups = _Groups(link)
        self._wanted: frozenset[str] = frozenset()

    @property
    def files(self) -> tuple[int, ...]:
        """For poll."""
        return self._arp.fileno(), self._nd.fileno()

    def listen_for(self, addresses: Collection[str], answered: Collection[str]) -> None:
        """Hear what is about these addresses from now on, and be reached where the `answered` ones are asked for."""
        wanted = frozenset(addresses)
        if wanted != self._wanted:
            bpf.attach(self._arp, arp_filter(wanted))
            bpf.attach(self._nd, nd_filter(wanted))
            self._wanted = wanted
        self._groups.be_in({solicited_node(each) for each in answered if ":" in each})

    def frames(self) -> Iterator[bytes]:
        """What waits, without what was sent to others."""
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
        """Send a whole frame; False when the link could not take it."""
        try:
            self._arp.send(frame)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        return True

    def close(self) -> None:
        """Let go of everything."""
        self._arp.close()
        self._nd.close()
        self._groups.close()


def _opened(link: HostLink, protocol: int) -> socket.socket:
    """A socket that passes nothing yet."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    try:
        sock.setblocking(False)
        bpf.attach(sock, ((0x06, 0, 0, 0),))
        sock.bind((link.name, protocol))
        if sock.getsockname()[0] != link.name:
            raise OSError(errno.ENODEV, f"link {link.name} has gone")
    except OSError:
        sock.close()
        raise
    return sock


class _Groups:
    """Multicast groups on one link, so that its card and the switches in between let their packets through."""

    def __init__(self, link: HostLink) -> None:
        self._index = link.index
        self._socket: socket.socket | None = None
        self._in: set[str] = set()

    def be_in(self, wanted: Collection[str]) -> None:
        """Be in these groups and no others. Where the link has no IPv6 it is in none."""
        for group in self._in - set(wanted):
            if self._change(socket.IPV6_LEAVE_GROUP, group):
                self._in.discard(group)
        for group in set(wanted) - self._in:
            if self._change(socket.IPV6_JOIN_GROUP, group):
                self._in.add(group)

    def _change(self, option: int, group: str) -> bool:
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            raw = socket.inet_pton(socket.AF_INET6, group)
            self._socket.setsockopt(socket.IPPROTO_IPV6, option, raw + struct.pack("@I", self._index))
        except OSError as error:
            # One that left with its link, or is there already, is as wanted.
            return error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class RawLinkTransport:
    """Raw sockets on links that come and go. For one thread."""

    def __init__(self, exclude: Sequence[str], say: Callable[[str], object]) -> None:
        """`exclude`: patterns of names of links that are left alone. `say` is told what cannot be opened."""
        self._exclude = tuple(exclude)
        self._say = say
        self._open: dict[str, LinkSockets] = {}
        self._heard: tuple[frozenset[str], dict[str, frozenset[str]]] = (frozenset(), {})

    @property
    def links(self) -> Mapping[str, HostLink]:
        """Where it can answer now, by name."""
        return {name: each.link for name, each in self._open.items()}

    @property
    def files(self) -> tuple[int, ...]:
        """For poll. Others after each `rescan` that finds a change."""
        return tuple(file for each in self._open.values() for file in each.files)

    def rescan(self) -> bool:
        """Look which links there are; True when some are others than before. Raises PermissionError."""
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
                # A link that has gone again is no fault; one that stays is tried again at the next look.
                self._say(f"link {name}: {error.strerror or error}")
        self.listen_for(*self._heard)
        return self.links != before

    def listen_for(self, addresses: frozenset[str], answered: dict[str, frozenset[str]]) -> None:
        """Hear what is about these addresses, and be reached where the `answered` ones of each link are asked for."""
        self._heard = addresses, answered
        for name, each in self._open.items():
            each.listen_for(addresses, answered.get(name, frozenset()))

    def frames(self) -> Iterator[tuple[HostLink, bytes]]:
        """What waits, and on which link."""
        for each in list(self._open.values()):
            for frame in each.frames():
                yield each.link, frame

    def send(self, name: str, frames: Collection[bytes]) -> int:
        """Send frames on a link; how many it took."""
        each = self._open.get(name)
        return sum(each.send(frame) for frame in frames) if each else 0

    def close(self) -> None:
        """Let go of everything."""
        for each in self._open.values():
            each.close()
        self._open.clear()
