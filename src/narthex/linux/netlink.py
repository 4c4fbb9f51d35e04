"""A netlink socket: requests, answers, dumps, and errors of any family.

Flags and framing are those of linux/netlink.h. Users of a socket find the codec of attributes here, too. A CNI plugin
loads this module twice for each pod, so it imports little: `_socket` is the C part of `socket`.
"""

from __future__ import annotations

import _socket as socket
import errno
import itertools
import posix
import struct

from narthex.netfilter.netlink.attributes import attribute as attribute
from narthex.netfilter.netlink.attributes import payloads as payloads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
HEADER = struct.Struct("=IHHII")
"""Length, type, flags, sequence number, port."""

_SOL_NETLINK, _NETLINK_CAP_ACK, _NETLINK_EXT_ACK = 270, 10, 11
_NLM_F_DUMP_INTR, _NLM_F_ACK_TLVS = 0x10, 0x200
_ERR_MESSAGE, _ERR_OFFSET = 1, 2
_RECEIVE = 1 << 18
_WAIT_SECONDS = 30.0
_AT_ONCE = 256
"""Requests whose answers surely fit the receive buffer."""

PORTS, PORTS_MASK = 1 << 31 | int.from_bytes(posix.urandom(4)) & 0x7FFFFE00, 0xFFFFFE00
"""All sockets of ours in this process have netlink ports that are `PORTS` under the mask, so that a notification shows
whether a transaction was ours. Others have process numbers as ports, or random ones when those are taken."""
_next_port = itertools.count()


class NetlinkError(OSError):
    """The kernel refused a request.

    `message` is the index of the refused message in the batch, `offset` the position of the refused attribute in it;
    each is None if unknown.
    """

    def __init__(self, number: int, said: str, message: int | None = None, offset: int | None = None) -> None:
        super().__init__(number, said or posix.strerror(number))
        self.message = message
        self.offset = offset


class DumpInterrupted(Exception):
    """The data changed during a dump."""


def messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the messages of one datagram: type, flags, sequence number, payload."""
    at = 0
    while at + HEADER.size <= len(data):
        length, kind, flags, sequence, _ = HEADER.unpack_from(data, at)
        if length < HEADER.size:
            return
        yield kind, flags, sequence, data[at + HEADER.size : at + length]
        at += (length + 3) & ~3


def bind_own_port(sock: socket.socket, groups: int = 0) -> None:
    """Bind to a port of this process's own range and to multicast groups (a bit for each)."""
    for _ in range(~PORTS_MASK & 0xFFFFFFFF):
        try:
            sock.bind((PORTS | next(_next_port) & ~PORTS_MASK, groups))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise NetlinkError(errno.EADDRINUSE, "all netlink ports of this process are taken")


def _opened(protocol: int) -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)


def _opened_in(namespace: str, protocol: int) -> socket.socket:
    from narthex.linux.namespaces import in_namespace

    with in_namespace(namespace):
        return _opened(protocol)


class Netlink:
    """A netlink socket of one protocol (`NETLINK_NETFILTER`, …) in one network namespace. Not thread-safe."""

    def __init__(self, protocol: int, namespace: str | None = None) -> None:
        self._socket = _opened(protocol) if namespace is None else _opened_in(namespace, protocol)
        bind_own_port(self._socket)
        self._socket.settimeout(_WAIT_SECONDS)
        # Errors come without the failed request (it can be megabytes), but with the kernel's own words.
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        self._force(getattr(socket, "SO_RCVBUFFORCE", 33), 1 << 22)
        self._send_room = 0
        self._sequence = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close()

    def request(self, kind: int, body: bytes, flags: int = 0) -> int:
        """Send a message and return its sequence number."""
        self._sequence += 1
        self._send(HEADER.pack(HEADER.size + len(body), kind, NLM_F_REQUEST | flags, self._sequence, 0) + body)
        return self._sequence

    def answers(self, sequence: int) -> Iterator[bytes]:
        """Yield the bodies of all messages that answer a request. Raises NetlinkError."""
        while True:
            for kind, flags, number, data in self._receive():
                if number != sequence:
                    continue
                if kind == NLMSG_ERROR:
                    error = error_of(flags, data)
                    if error is not None:
                        raise error
                    return
                if kind == NLMSG_DONE:
                    return
                yield data

    def dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        """Yield the bodies of all messages of a dump. Raises NetlinkError, and DumpInterrupted at the end."""
        sequence = self.request(kind, body, NLM_F_DUMP)
        interrupted = False
        while True:
            for found, flags, number, data in self._receive():
                if number != sequence:
                    continue
                interrupted = interrupted or bool(flags & _NLM_F_DUMP_INTR)
                if found not in (NLMSG_ERROR, NLMSG_DONE):
                    yield data
                    continue
                error = error_of(flags, data)
                if error is not None and error.errno != errno.EINTR:
                    raise error
                if error is not None or interrupted:
                    raise DumpInterrupted
                return

    def each(self, kind: int, bodies: Sequence[bytes], flags: int = 0) -> list[NetlinkError | None]:
        """Send one request for each body, in order; return the kernel's error for each, None for success.

        `flags` are added to those of every request.
        """
        return self.batch([(kind, flags, body) for body in bodies])

    def batch(self, requests: Sequence[tuple[int, int, bytes]]) -> list[NetlinkError | None]:
        """Send requests of several kinds, each with type, flags, and body; return the kernel's error for each."""
        answers: list[NetlinkError | None] = []
        for start in range(0, len(requests), _AT_ONCE):
            some = requests[start : start + _AT_ONCE]
            first = self._sequence + 1
            self._sequence += len(some)
            parts = []
            for number, (kind, flags, body) in enumerate(some, first):
                flags |= NLM_F_REQUEST | NLM_F_ACK
                parts += [HEADER.pack(HEADER.size + len(body), kind, flags, number, 0), body, bytes(-len(body) % 4)]
            self._send(b"".join(parts))
            said: dict[int, NetlinkError | None] = {}
            while len(said) < len(some):
                for found, answer_flags, number, data in self._receive():
                    if found == NLMSG_ERROR and first <= number <= self._sequence:
                        said[number] = error_of(answer_flags, data)
            answers += [said[number] for number in range(first, self._sequence + 1)]
        return answers

    def _send(self, data: bytes) -> None:
        """Send a batch as one datagram, since two datagrams are two transactions."""
        if len(data) + 4096 > self._send_room:
            self._send_room = max(1 << 20, len(data) + (len(data) >> 2) + 4096)
            self._force(getattr(socket, "SO_SNDBUFFORCE", 32), self._send_room)
        self._socket.sendto(data, (0, 0))

    def _force(self, option: int, size: int) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, option, size)

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Return the messages of the next datagram."""
        try:
            data = self._socket.recv(_RECEIVE)
        except TimeoutError:
            raise NetlinkError(errno.ETIMEDOUT, f"the kernel did not answer within {_WAIT_SECONDS:.0f} s") from None
        return messages(data)


def text_attribute(data: bytes, at: int, attribute_type: int) -> str:
    """Return the text of the attribute of a kind, starting at `at`; empty if there is none."""
    return payloads(data, at).get(attribute_type, b"").rstrip(b"\0").decode("utf-8", "replace")


def error_of(flags: int, data: bytes, message: int | None = None) -> NetlinkError | None:
    """Return the error of an NLMSG_ERROR; None for an acknowledgement."""
    number = -struct.unpack_from("=i", data, 0)[0]
    if number == 0:
        return None
    said, offset = "", None
    if flags & _NLM_F_ACK_TLVS:
        said = text_attribute(data, 4 + HEADER.size, _ERR_MESSAGE)
        given = payloads(data, 4 + HEADER.size).get(_ERR_OFFSET)
        offset = None if given is None else struct.unpack("=I", given)[0]
    words = f"{posix.strerror(number)} ({said})" if said else posix.strerror(number)
    return NetlinkError(number, words, message, offset)
