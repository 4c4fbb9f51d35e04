"""Transmit checksums of a device: the self-test of `narthex.overlay.probe`, and switching their offload off.

In the calling thread's network namespace. Numbers are those of linux/ethtool.h and linux/sockios.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable

from narthex.overlay.probe import PAYLOAD, PORT, Verdict, datagram, verdict

MARK = 0x4000
"""What kube-proxy marks before it masquerades: such packets meet rules on their way out that others do not."""
_SECONDS = 0.3
_ATTEMPTS = 3
_SO_MARK = 36
_SIOCETHTOOL = 0x8946
_GET_TX_CHECKSUM, _SET_TX_CHECKSUM = 0x16, 0x17


def test(device: str, own: str, peer: str, give_up: Callable[[], bool]) -> Verdict:
    """Whether what a device leaves to the link below is done there, on the way to a peer's address. Takes up to two
    seconds, less when it is to `give_up`. Raises OSError when the datagrams cannot be sent."""
    attempts: list[tuple[bool, bool]] = []
    while len(attempts) < _ATTEMPTS and not give_up():
        complete = _answered(device, own, peer, raw=True)
        left = _answered(device, own, peer, raw=False)
        attempts.append((complete, left))
        if left:
            break
    return verdict(attempts)


def _answered(device: str, own: str, peer: str, *, raw: bool) -> bool:
    """Whether a datagram is answered. `raw`: it is sent with its checksum complete."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    kind, protocol = (socket.SOCK_RAW, socket.IPPROTO_UDP) if raw else (socket.SOCK_DGRAM, 0)
    with (
        socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as port,
        socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol) as sock,
    ):
        # A port of our own, so that nobody else's is named in the answer.
        port.bind((own, 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")
        sock.setsockopt(socket.SOL_SOCKET, _SO_MARK, MARK)
        if raw:
            sock.bind((own, 0))
        sock.connect((peer, PORT))
        deadline = time.monotonic() + _SECONDS
        try:
            sock.send(datagram(own, peer, port.getsockname()[1]) if raw else PAYLOAD)
            while (rest := deadline - time.monotonic()) > 0:
                sock.settimeout(rest)
                # A raw socket gets a copy of all that the peer sends, its own tests among it.
                sock.recv(2048)
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            pass
        return False


def offloaded(device: str) -> bool:
    """Whether a device leaves checksums to the link below. Raises OSError."""
    return bool(_ethtool(device, _GET_TX_CHECKSUM, 0))


def switch_off(device: str) -> None:
    """Have the kernel complete checksums before a packet enters the device: what `ethtool -K DEVICE tx off` does. Raises
    OSError."""
    _ethtool(device, _SET_TX_CHECKSUM, 0)


def _ethtool(device: str, command: int, value: int) -> int:
    held = ctypes.create_string_buffer(struct.pack("=II", command, value), 8)
    request = struct.pack("16sP", device.encode(), ctypes.addressof(held))
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)) as sock:
        try:
            fcntl.ioctl(sock, _SIOCETHTOOL, request.ljust(40, b"\0"))
        except OSError as error:
            raise OSError(error.errno, f"ethtool on {device}: {os.strerror(error.errno or 0)}") from None
    return int(struct.unpack("=II", held.raw)[1])
