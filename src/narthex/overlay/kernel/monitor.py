"""Notification by the kernel that links, addresses, entries, or routes may have changed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager

from narthex.linux.monitor import NotificationSocket
from narthex.linux.netlink import HEADER, PORTS, PORTS_MASK, bind_own_port

_NETLINK_ROUTE = 0
_GROUPS = sum(1 << number - 1 for number in (1, 3, 5, 7, 9, 11))
"""Links, neighbors, IPv4 addresses and routes, IPv6 addresses and routes."""
_LINK, _ADDRESS, _ROUTE, _NEIGHBOUR = (16, 17), (20, 21), (24, 25), (28, 29)
_QUEUE = 4 << 20
_TABLE_MAIN = 254
_CLONED = 0x200


class RouteMonitor:
    """Monitors the network namespace of the creating thread."""

    def __init__(self, concerns: Callable[[int], bool]) -> None:
        """Subscribe. Raises OSError.

        `concerns` returns True for the index of a relevant link; it is called from another thread.
        """
        self._concerns = concerns
        self._notices = NotificationSocket(_NETLINK_ROUTE, _QUEUE)
        bind_own_port(self._notices.socket, _GROUPS)

    def close(self) -> None:
        """Close the socket. Not while `listening`."""
        self._notices.socket.close()

    def listening(self, notice: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context manager in which `notice` is called, from another thread, whenever something may have changed."""
        return self._notices.listening("overlay-notices", self._drain, notice)

    def _drain(self) -> bool:
        """Read the queued notifications; return True if any is relevant."""
        found = False
        for data in self._notices.datagrams():
            found = found or data is None or self._matters(data)
        return found

    def _matters(self, data: bytes) -> bool:
        at = 0
        while at + HEADER.size <= len(data):
            length, kind, _, _, port = HEADER.unpack_from(data, at)
            if length < HEADER.size:
                break
            own = port & PORTS_MASK == PORTS
            if not own and self._is_of_interest(kind, data[at + HEADER.size : at + length]):
                return True
            at += (length + 3) & ~3
        return False

    def _is_of_interest(self, kind: int, body: bytes) -> bool:
        if kind in _ROUTE:
            table, flags = body[4], struct.unpack_from("=I", body, 8)[0]
            return table == _TABLE_MAIN and not flags & _CLONED
        if kind in (*_LINK, *_ADDRESS, *_NEIGHBOUR):
            return self._concerns(struct.unpack_from("=I", body, 4)[0])
        return False
