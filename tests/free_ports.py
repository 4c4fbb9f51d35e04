"""Ports that stay free until a test takes them: no other process of a test run chooses the same, nor does a kernel."""

import itertools
import os
import socket
from collections.abc import Sequence

_FIRST, _COUNT = 20_000, 12_000
"""Below what kernels give to connections (net.ipv4.ip_local_port_range begins at 32768)."""
_numbers = itertools.count(os.getpid() * 97)


def free_port(address: str = "127.0.0.1", kinds: Sequence[int] = (socket.SOCK_STREAM,)) -> int:
    """A port that nobody has at an address, for all these kinds of socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        port = _FIRST + next(_numbers) % _COUNT
        try:
            for kind in kinds:
                with socket.socket(family, kind) as sock:
                    sock.bind((address, port))
        except OSError:
            continue
        return port
