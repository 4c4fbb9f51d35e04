"""UDP sockets for heartbeats, one for each IP family."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

from narthex.lb.heartbeat import PortUnreachable
from narthex.model import IPFamily, family_of

_MOST_BYTES = 65535
_AT_ONCE = 2000
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000
_ERROR = struct.Struct("=IB")
"""Start of `struct sock_extended_err`: errno, origin."""
_RCVBUF = 1 << 20

_PROBE_PORT = 9
"""UDP port discard, which is closed on today's machines."""


class HeartbeatSockets:
    """Sends and receives heartbeats on one port."""

    def __init__(self, port: int) -> None:
        """Bind the port on all addresses of each available family. Raises OSError if it is in use."""
        self._sockets: dict[IPFamily, socket.socket] = {}
        for family, number, level, option in (
            (IPFamily.IPV4, socket.AF_INET, socket.IPPROTO_IP, _IP_RECVERR),
            (IPFamily.IPV6, socket.AF_INET6, socket.IPPROTO_IPV6, _IPV6_RECVERR),
        ):
            try:
                sock = socket.socket(number, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:
                    self.close()
                    raise
                continue
            self._sockets[family] = sock
            try:
                if family is IPFamily.IPV6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.setsockopt(level, option, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RCVBUF)
                sock.bind(("", port))
            except OSError as error:
                self.close()
                raise OSError(error.errno, f"UDP port {port}: {error.strerror}") from error
        self.port = port

    @property
    def files(self) -> tuple[int, ...]:
        """File descriptors to poll."""
        return tuple(sock.fileno() for sock in self._sockets.values())

    def received(self) -> Iterator[bytes]:
        """Yield the queued datagrams."""
        for sock in self._sockets.values():
            for _ in range(_AT_ONCE):
                try:
                    yield sock.recv(_MOST_BYTES)
                except BlockingIOError:
                    break
                except OSError:
                    # The error of an earlier datagram; `refusals` reports it.
                    continue

    def refusals(self) -> Iterator[PortUnreachable]:
        """Yield the queued ICMP port unreachable errors."""
        for sock in self._sockets.values():
            for _ in range(_AT_ONCE):
                try:
                    _, data, _, where = sock.recvmsg(0, 512, _MSG_ERRQUEUE)
                except OSError:
                    break
                for level, _, error in data:
                    if level in (socket.IPPROTO_IP, socket.IPPROTO_IPV6) and len(error) >= _ERROR.size:
                        number, _ = _ERROR.unpack_from(error)
                        if number == errno.ECONNREFUSED and where:
                            yield PortUnreachable(where[0], probe=where[1] == _PROBE_PORT)

    def probe(self, address: str) -> bool:
        """Ask whether the kernel of a node answers: at a port without a listener, with ICMP port unreachable."""
        return self._send(address, b"", _PROBE_PORT)

    def send(self, address: str, data: bytes) -> bool:
        """Send one heartbeat; return False on failure."""
        return self._send(address, data, self.port)

    def _send(self, address: str, data: bytes, port: int) -> bool:
        sock = self._sockets.get(family_of(address))
        if sock is None:
            return False
        for _ in range(2):
            try:
                sock.sendto(data, (address, port))
            except OSError:
                # The first failure may belong to an earlier datagram.
                continue
            return True
        return False

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._sockets.values():
            sock.close()
