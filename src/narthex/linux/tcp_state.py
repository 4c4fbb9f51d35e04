"""The state of established TCP connections, for a process that gives them up without their peers noticing.

`TCP_REPAIR` (Linux 3.5, CAP_NET_ADMIN) shows the sequence numbers of a socket, and lets it be closed without a packet.
Numbers are those of linux/tcp.h and linux/sockios.h.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import NamedTuple

from narthex.linux.socket_filter import attach_filter, detach_filter

_UNREAD, _UNACKNOWLEDGED = 0x541B, 0x5411
"""SIOCINQ and SIOCOUTQ."""
_TCP_REPAIR, _TCP_REPAIR_QUEUE, _TCP_QUEUE_SEQ = 19, 20, 21
_RECEIVE_QUEUE, _SEND_QUEUE = 1, 2
_REPAIR_OFF_SILENTLY = -1
"""TCP_REPAIR_OFF_NO_WP: no window probe."""
_TIMESTAMPS, _SACK = 1, 2
_ESTABLISHED = 1
_INFO = struct.Struct("=B4xBB9xI64xI")
"""tcp_info: state, options, window scales, the largest segment to send, and the largest one announced."""
_FIN = 0x01
_INSTRUCTIONS = (
    # X is the length of the TCP header: the upper half of its byte 12, in words.
    (0x30, 0, 0, 12),
    (0x74, 0, 0, 4),
    (0x64, 0, 0, 2),
    (0x07, 0, 0, 0),
    # Packets with data, and those that end the stream, count as lost.
    (0x80, 0, 0, 0),
    (0x1D, 1, 0, 0),
    (0x06, 0, 0, 0),
    (0x30, 0, 0, 13),
    (0x45, 0, 1, _FIN),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFFFFFF),
)


class TcpTraits(NamedTuple):
    """What the two sides of a connection agreed upon."""

    established: bool
    timestamps: bool
    selective: bool
    """Selective acknowledgements."""
    peer_scale: int
    """Bits by which the peer's windows are shifted."""
    own_scale: int
    """Bits by which this side's windows are shifted."""
    segment: int
    """Maximum bytes of a segment to the peer."""
    announced_segment: int
    """Maximum bytes of a segment from the peer."""


def tcp_traits(sock: socket.socket) -> TcpTraits:
    """Return what a connection has agreed upon. Raises OSError."""
    state, options, scales, segment, announced = _INFO.unpack_from(
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    )
    return TcpTraits(
        state == _ESTABLISHED,
        bool(options & _TIMESTAMPS),
        bool(options & _SACK),
        scales & 0xF,
        scales >> 4,
        segment,
        announced,
    )


def pause_input(sock: socket.socket) -> None:
    """Treat packets with data or an end as lost from now on, so that the peer sends them again. Acknowledgements arrive."""
    attach_filter(sock, _INSTRUCTIONS)


def resume_input(sock: socket.socket) -> None:
    """Receive data again."""
    detach_filter(sock)


def is_at_rest(sock: socket.socket) -> bool:
    """Return True if everything received was read, and everything sent was acknowledged. Raises OSError."""
    return not any(
        struct.unpack("i", fcntl.ioctl(sock, request, bytes(4)))[0] for request in (_UNREAD, _UNACKNOWLEDGED)
    )


def sequence_numbers(sock: socket.socket) -> tuple[int, int]:
    """Return the next sequence numbers to receive and to send. The socket is in repair mode afterwards. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    numbers = []
    for queue in (_RECEIVE_QUEUE, _SEND_QUEUE):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR_QUEUE, queue)
        numbers.append(sock.getsockopt(socket.IPPROTO_TCP, _TCP_QUEUE_SEQ) & 0xFFFFFFFF)
    return numbers[0], numbers[1]


def leave_repair(sock: socket.socket) -> None:
    """End repair mode without sending anything. In repair mode, a socket is closed silently. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _REPAIR_OFF_SILENTLY)
