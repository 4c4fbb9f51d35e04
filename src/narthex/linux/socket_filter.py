"""Classic BPF programs that filter what a socket receives."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27


def attach_filter(sock: socket.socket, steps: Sequence[tuple[int, int, int, int]]) -> None:
    """Replace the filter of a socket. A step is code, jump if true, jump if false, operand.

    Raises OSError if the kernel rejects the program.
    """
    held = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(steps), ctypes.addressof(held)))


def detach_filter(sock: socket.socket) -> None:
    """Remove the filter of a socket. Raises OSError if it has none."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
