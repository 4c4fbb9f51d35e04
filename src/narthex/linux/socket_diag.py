"""Connected UDP sockets of a network namespace over NETLINK_SOCK_DIAG: list them, and close them for their programs.

Structures and numbers are those of linux/sock_diag.h and linux/inet_diag.h. To close a socket of another program needs
CONFIG_INET_DIAG_DESTROY and CAP_NET_ADMIN (Linux 4.5; UDP since 4.9).
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from narthex.linux.netlink import DumpInterrupted, Netlink, NetlinkError, attribute
from narthex.linux.setns import EnteredNamespace
from narthex.model import IPFamily
from narthex.model.values import address_text, packed_address

SocketPeer = tuple[str, int]
"""Remote address and port of a connected socket."""

MOST_IN_KERNEL = 128
"""Up to this many peers are compared by the kernel. Each socket is compared with one after the other."""

_NETLINK_SOCK_DIAG = 4
_SO_COOKIE = 57
_BY_FAMILY, _DESTROY = 20, 21
_ESTABLISHED = 1 << 1
"""State of a connected UDP socket, as a set of states."""
_REQUEST = struct.Struct("=BBBxI")
"""inet_diag_req_v2 up to the id: family, protocol, extensions, states."""
_ID = struct.Struct("=2s2s16s16sI8s")
"""inet_diag_sockid: ports and addresses of this and of the other side, interface, cookie."""
_ID_AT = 4
"""Where inet_diag_msg has the id: after family, state, timer, and retransmissions."""
_ANY_ID = bytes(_ID.size)
_MAPPED = bytes(10) + b"\xff\xff"
"""First bytes of an IPv4 address of an IPv6 socket."""

_BYTECODE = 1
"""INET_DIAG_REQ_BYTECODE."""
_JUMP, _PEER_IS = 1, 8
"""INET_DIAG_BC_JMP and INET_DIAG_BC_D_COND."""
_STEP = struct.Struct("=BBH")
"""inet_diag_bc_op: code, bytes to the next step if it holds, bytes to the next one otherwise."""
_CONDITION = struct.Struct("=BBxxi")
"""inet_diag_hostcond without the address: family, prefix length, port."""


class ConnectedSocket(NamedTuple):
    """A connected UDP socket. Addresses of IPv4 that an IPv6 socket uses are given as IPv4 addresses."""

    local: SocketPeer
    peer: SocketPeer
    cookie: int
    """The kernel's number of the socket, as SO_COOKIE and bpf_get_socket_cookie show it."""
    handle: bytes
    """The kernel's description, to close exactly this socket."""


class UdpSockets:
    """The UDP sockets of one network namespace: the calling thread's, or that of an open file. Not thread-safe."""

    def __init__(self, namespace: int | None = None) -> None:
        """Open a netlink socket in the namespace. Raises OSError."""
        if namespace is None:
            self._netlink = Netlink(_NETLINK_SOCK_DIAG)
        else:
            with EnteredNamespace(namespace):
                self._netlink = Netlink(_NETLINK_SOCK_DIAG)

    def close(self) -> None:
        """Close the netlink socket."""
        self._netlink.close()

    def connected(self, family: IPFamily, peers: Collection[SocketPeer] | None = None) -> list[ConnectedSocket]:
        """Return the sockets connected to an address of this family; `peers` limits them to these other sides.

        IPv4 takes two dumps, since IPv6 sockets may use it, too. An interrupted dump counts as complete: what it missed
        is missed once. Raises OSError.
        """
        if peers is not None and not peers:
            return []
        found = list(self._dump(socket.AF_INET6, family, peers))
        if family is IPFamily.IPV4:
            found += self._dump(socket.AF_INET, family, peers)
        return found

    def destroy(self, sockets: Sequence[ConnectedSocket]) -> list[bool]:
        """Close sockets: their programs get ECONNABORTED, or EDESTADDRREQ when they send. Return for each whether it still was as described.

        Raises OSError if the kernel refuses (EOPNOTSUPP without CONFIG_INET_DIAG_DESTROY).
        """
        errors = self._netlink.each(_DESTROY, [each.handle for each in sockets])
        for error in errors:
            if error is not None and error.errno != errno.ENOENT:
                raise error
        return [error is None for error in errors]

    def _dump(self, kind: int, family: IPFamily, peers: Collection[SocketPeer] | None) -> Iterator[ConnectedSocket]:
        body = _REQUEST.pack(kind, socket.IPPROTO_UDP, 0, _ESTABLISHED) + _ANY_ID
        if peers is not None and len(peers) <= MOST_IN_KERNEL:
            body += attribute(_BYTECODE, peer_filter(family, peers))
        try:
            for message in self._netlink.dump(_BY_FAMILY, body):
                found = _read(kind, message)
                if (":" in found.peer[0]) == (family is IPFamily.IPV6) and (peers is None or found.peer in peers):
                    yield found
        except DumpInterrupted:
            return
        except NetlinkError as error:
            # The kernel has no UDP diagnosis, or no IPv6.
            if error.errno != errno.ENOENT or kind == socket.AF_INET:
                raise


def missing_destroy() -> str:
    """Return why this kernel cannot close UDP sockets of other programs; empty if it can.

    It closes a socket of its own in the calling thread's network namespace. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))
            peer: SocketPeer = probe.getpeername()
            cookie = int.from_bytes(probe.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8), "little")
            sockets = UdpSockets()
            own = [each for each in sockets.connected(IPFamily.IPV4, {peer}) if each.cookie == cookie]
            destroyed = sockets.destroy(own)
            sockets.close()
            if destroyed != [True]:
                return "the kernel does not find a connected UDP socket of this process (CONFIG_INET_UDP_DIAG)"
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return "the kernel cannot close sockets of other programs (CONFIG_INET_DIAG_DESTROY)"
            return f"the kernel refuses to close a UDP socket: {error.strerror}"
    return ""


def peer_filter(family: IPFamily, peers: Collection[SocketPeer]) -> bytes:
    """Return the program by which the kernel selects sockets connected to one of these addresses and ports.

    The kernel takes a socket if the program ends exactly at its last byte. A condition of IPv4 also holds for an IPv6
    socket that uses the address.
    """
    number = socket.AF_INET if family is IPFamily.IPV4 else socket.AF_INET6
    left = len(peers)
    program = []
    size = _STEP.size + _CONDITION.size + (family.host_bits >> 3)
    for address, port in peers:
        left -= 1
        program += [
            _STEP.pack(_PEER_IS, size, size + _STEP.size),
            _CONDITION.pack(number, family.host_bits, port),
            packed_address(address),
        ]
        if left:
            # To the end from here: the jump itself, and all other conditions with their jumps.
            program.append(_STEP.pack(_JUMP, _STEP.size, left * (size + _STEP.size)))
    return b"".join(program)


def _read(kind: int, message: bytes) -> ConnectedSocket:
    sport, dport, source, destination, _, cookie = _ID.unpack_from(message, _ID_AT)
    handle = _REQUEST.pack(kind, socket.IPPROTO_UDP, 0, _ESTABLISHED) + message[_ID_AT : _ID_AT + _ID.size]
    return ConnectedSocket(
        (_text(kind, source), int.from_bytes(sport)),
        (_text(kind, destination), int.from_bytes(dport)),
        int.from_bytes(cookie, "little"),
        handle,
    )


def _text(kind: int, address: bytes) -> str:
    if kind == socket.AF_INET:
        return address_text(address[:4])
    return address_text(address[12:] if address.startswith(_MAPPED) else address)
