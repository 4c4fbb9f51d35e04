"""Programs of classic BPF on sockets: what the kernel gives a process, and what it drops before."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

_SO_ATTACH_FILTER = 26


def attach(sock: socket.socket, steps: Sequence[tuple[int, int, int, int]]) -> None:
    """Let a socket receive only what a program passes; it takes the place of an earlier one at once. A step is code, jump
    if true, jump if false, operand. Raises OSError when the kernel finds it wrong."""
    held = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(steps), ctypes.addressof(held)))
