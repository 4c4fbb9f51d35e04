"""Transmit checksums of a device: a self-test, and switching their offload off. In the calling thread's network namespace.

A link that should complete the inner checksum of encapsulated packets, but does not, breaks TCP and UDP between Pods while
ping works. The self-test sends two datagrams to a closed port of a peer: one with a complete checksum and one whose checksum
is left to the link. The peer's kernel replies "port unreachable", but silently drops datagrams with a wrong checksum. If
only the first one is answered, the offload is broken. The peer needs nothing but its kernel, so flannel nodes work as well.

Constants are those of linux/ethtool.h and linux/sockios.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable

from narthex.model.net import parsed_network

MARK = 0x4000
"""The mark that kube-proxy sets before masquerading: such packets match additional rules."""
_SECONDS = 0.3
_ATTEMPTS = 3
_SO_MARK = 36
_SIOCETHTOOL = 0x8946
_GET_TX_CHECKSUM, _SET_TX_CHECKSUM = 0x16, 0x17


def test(device: str, own: str, peer: str, give_up: Callable[[], bool]) -> ChecksumVerdict:
    """Test whether the link below a device completes checksums, with a peer's address.

    Takes up to two seconds, less once `give_up` returns True. Raises OSError if the datagrams cannot be sent.
    """
    attempts: list[tuple[bool, bool]] = []
    while len(attempts) < _ATTEMPTS and not give_up():
        complete = _answered(device, own, peer, raw=True)
        left = _answered(device, own, peer, raw=False)
        attempts.append((complete, left))
        if left:
            break
    return verdict(attempts)


def _answered(device: str, own: str, peer: str, *, raw: bool) -> bool:
    """Return True if a datagram is answered. `raw`: send it with a complete checksum."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    kind, protocol = (socket.SOCK_RAW, socket.IPPROTO_UDP) if raw else (socket.SOCK_DGRAM, 0)
    with (
        socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as port,
        socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol) as sock,
    ):
        # Reserve a port, so that no reply concerns another socket.
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
                # A raw socket receives everything from the peer, including its own tests.
                sock.recv(2048)
        except ConnectionRefusedError:
            return True
        except TimeoutError:
            pass
        return False


def offloaded(device: str) -> bool:
    """Return True if a device leaves checksums to the link below. Raises OSError."""
    return bool(_ethtool(device, _GET_TX_CHECKSUM, 0))


def switch_off(device: str) -> None:
    """Disable the checksum offload of a device, like `ethtool -K DEVICE tx off`. Raises OSError."""
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


PORT = 33434
"""A port without listener: traceroute's first."""
PAYLOAD = b"narthex: does the checksum of this packet survive its way?\n"
_UDP = 17


class ChecksumVerdict(enum.Enum):
    """Result of the self-test."""

    FINE = "fine"
    BROKEN = "broken"
    UNCLEAR = "unclear"
    """Neither datagram was answered: the peer is down, or a firewall drops the datagrams or the replies."""


def verdict(attempts: Iterable[tuple[bool, bool]]) -> ChecksumVerdict:
    """Evaluate attempts: for each, whether the datagram with a complete checksum was answered, and the one without."""
    attempts = tuple(attempts)
    if any(left for _, left in attempts):
        return ChecksumVerdict.FINE
    # A single lost reply may be coincidence.
    return ChecksumVerdict.BROKEN if sum(complete for complete, _ in attempts) > 1 else ChecksumVerdict.UNCLEAR


def datagram(source: str, destination: str, source_port: int) -> bytes:
    """Return a UDP datagram, from its header on, with its checksum."""
    length = 8 + len(PAYLOAD)
    head = struct.pack(">HHHH", source_port, PORT, length, 0)
    ends = b"".join(parsed_network(_host(one)).network_address.packed for one in (source, destination))
    pseudo = ends + struct.pack(
        ">II" if ":" in source else ">HH", *((length, _UDP) if ":" in source else (_UDP, length))
    )
    checksum = _checksum(pseudo + head + PAYLOAD) or 0xFFFF
    return struct.pack(">HHHH", source_port, PORT, length, checksum) + PAYLOAD


def _host(address: str) -> str:
    return f"{address}/{128 if ':' in address else 32}"


def _checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
