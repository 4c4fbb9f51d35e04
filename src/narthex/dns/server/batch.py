"""Many datagrams by one system call: recvmmsg(2) and sendmmsg(2) on buffers that are made once.

An answer goes into the buffer its question came in, behind the id, and out with the sender's address and the packet
information that came along, so it leaves from the address that was asked. One call per 32 packets and no objects for
addresses: a third less per answer than recvfrom and sendto, and without it IP_PKTINFO costs a third more (measured by
benchmarks/dns.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

SLOTS = 32
SIZE = 4096
"""Bytes of a slot: of the longest question taken and the longest answer given over UDP."""
_NAME, _CONTROL = 32, 64
"""Room for a sockaddr_in6 and for one in6_pktinfo."""
_HEADER = struct.Struct("@PIxxxxPNPNixxxxIxxxx")
"""struct mmsghdr on 64 bits: name, its length, iov, their count, control, its length, flags; then the length."""
_IOV = struct.Struct("@PN")
_IP_PKTINFO = 8
_MSG_DONTWAIT = 0x40
_LENGTH_AT = _HEADER.size // 4 - 2
"""Of `msg_len` among the 32-bit words of a header."""
_HEADER_WORDS = _HEADER.size // 4


class Batch:
    """Buffers for one UDP socket; several may share them, one after the other."""

    def __init__(self, family: int) -> None:
        self.buffer = bytearray(SIZE * SLOTS)
        self.view = memoryview(self.buffer)
        self._names = bytearray(_NAME * SLOTS)
        self._controls = bytearray(_CONTROL * SLOTS)
        self._in_iov, self._out_iov = bytearray(_IOV.size * SLOTS), bytearray(_IOV.size * SLOTS)
        self._in, self._out = bytearray(_HEADER.size * SLOTS), bytearray(_HEADER.size * SLOTS)
        self._family = family
        self._name_size = 16 if family == socket.AF_INET else 28
        # cmsghdr and in_pktinfo or in6_pktinfo, padded as CMSG_SPACE does.
        self._control_size = 32 if family == socket.AF_INET else 40
        self._lay_out()
        self._fresh = bytes(self._in)
        self._lengths = memoryview(self._in).cast("I")[_LENGTH_AT::_HEADER_WORDS]
        self._out_sizes = memoryview(self._out_iov).cast("L")
        self._links = memoryview(self._controls).cast("I")
        """Of which the sixth (IPv4: 4) word of a slot is the interface that a packet came in by."""
        self._link_at = 4 if family == socket.AF_INET else 8
        libc = ctypes.CDLL(None, use_errno=True)
        self._receive, self._send = libc.recvmmsg, libc.sendmmsg
        self._receive.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
        self._send.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int]
        self._in_at, self._out_at = ctypes.c_void_p(_address(self._in)), _address(self._out)

    def _lay_out(self) -> None:
        buffer, names, controls = _address(self.buffer), _address(self._names), _address(self._controls)
        in_iov, out_iov = _address(self._in_iov), _address(self._out_iov)
        for slot in range(SLOTS):
            name, control = names + slot * _NAME, controls + slot * _CONTROL
            _IOV.pack_into(self._in_iov, slot * _IOV.size, buffer + slot * SIZE, SIZE)
            _IOV.pack_into(self._out_iov, slot * _IOV.size, buffer + slot * SIZE, 0)
            at = slot * _HEADER.size
            iov = slot * _IOV.size
            _HEADER.pack_into(self._in, at, name, _NAME, in_iov + iov, 1, control, _CONTROL, 0, 0)
            _HEADER.pack_into(self._out, at, name, self._name_size, out_iov + iov, 1, control, self._control_size, 0, 0)

    def receive(self, fd: int) -> int:
        """Fill slots from the first on; how many, 0 when nothing waits. Errors of earlier sends are passed over."""
        self._in[:] = self._fresh
        count: int = self._receive(fd, self._in_at, SLOTS, _MSG_DONTWAIT, None)
        return max(count, 0)

    def lengths(self, count: int) -> list[int]:
        """Bytes in each of the first slots; SIZE says that there may have been more, which are lost."""
        found: list[int] = self._lengths[:count].tolist()
        return found

    def send(self, fd: int, first: int, sizes: list[int]) -> int:
        """Send what the slots from `first` on hold now, as many bytes of each. How many could not be sent: the link's
        queue is full, or there is no way to that client; they are lost, as datagrams may be."""
        out, links = self._out_sizes, self._links
        slot = first
        for size in sizes:
            out[2 * slot + 1] = size
            # Routed as anything else, not out of the interface that the question came in by.
            links[slot * (_CONTROL // 4) + self._link_at] = 0
            slot += 1
        lost = 0
        at, end = first, first + len(sizes)
        while at < end:
            sent: int = self._send(fd, self._out_at + at * _HEADER.size, end - at, _MSG_DONTWAIT)
            if sent > 0:
                at += sent
            elif ctypes.get_errno() != errno.EINTR:
                at += 1
                lost += 1
        return lost

    def client(self, slot: int) -> tuple[str, int, int]:
        """Address, port and scope of a slot's sender; the scope is 0 but for link-local ones."""
        at = slot * _NAME
        (port,) = struct.unpack_from(">H", self._names, at + 2)
        if self._family == socket.AF_INET:
            return socket.inet_ntop(socket.AF_INET, bytes(self._names[at + 4 : at + 8])), port, 0
        (scope,) = struct.unpack_from("@I", self._names, at + 24)
        return socket.inet_ntop(socket.AF_INET6, bytes(self._names[at + 8 : at + 24])), port, scope

    def asked(self, slot: int) -> list[tuple[int, int, bytes]]:
        """The slot's packet information as `sendmsg` takes it, to answer from the address that was asked later."""
        at = slot * _CONTROL
        if self._family == socket.AF_INET:
            return [(socket.IPPROTO_IP, _IP_PKTINFO, bytes(4) + bytes(self._controls[at + 20 : at + 28]))]
        return [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, bytes(self._controls[at + 16 : at + 32]) + bytes(4))]


def udp_socket(address: str, port: int, *, interface: str = "") -> socket.socket:
    """A socket for a Batch, one of several on its address and port. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Twice the usual room: a worker that is busy for some milliseconds loses nothing.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        if interface:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{os.strerror(error.errno or 0)}: UDP {address} port {port}") from error
    return sock


def _address(buffer: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))
