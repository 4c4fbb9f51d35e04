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
from contextlib import AbstractContextManager

from narthex.linux.background import in_background
from narthex.linux.clock import Clock, SystemClock
from narthex.overlay.masquerade import MARK
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.runtime.logs import LOGGER

PORT = 33434
"""A port without listener: traceroute's first."""
PAYLOAD = b"narthex: does the checksum of this packet survive its way?\n"
_UDP = 17
_SECONDS = 0.3
_ATTEMPTS = 3
_SO_MARK = 36
_SIOCETHTOOL = 0x8946
_GET_TX_CHECKSUM, _SET_TX_CHECKSUM = 0x16, 0x17
FIRST, UNCLEAR, CLEAR = 1.0, 30.0, 600.0
"""Seconds until a device is tested: after a peer was first seen, after an unclear result, after a clear one."""
_MOST_PEERS = 3
"""Peers per test; the first clear result counts."""

Tunnels = tuple[tuple[str, str, tuple[str, ...]], ...]
_STOP_SECONDS = 5.0
"""Time for a running test during shutdown."""


def _test_checksums(device: str, own: str, peer: str, give_up: Callable[[], bool]) -> ChecksumVerdict:
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
    return bool(_ethtool(device, _GET_TX_CHECKSUM))


def _ethtool(device: str, command: int) -> int:
    held = ctypes.create_string_buffer(struct.pack("=II", command, 0), 8)
    request = struct.pack("16sP", device.encode(), ctypes.addressof(held))
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)) as sock:
        try:
            fcntl.ioctl(sock, _SIOCETHTOOL, request.ljust(40, b"\0"))
        except OSError as error:
            raise OSError(error.errno, f"ethtool on {device}: {os.strerror(error.errno or 0)}") from None
    return int(struct.unpack("=II", held.raw)[1])


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
    ipv6 = ":" in source
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    ends = socket.inet_pton(family, source) + socket.inet_pton(family, destination)
    pseudo = ends + (struct.pack(">II", length, _UDP) if ipv6 else struct.pack(">HH", _UDP, length))
    checksum = _checksum(pseudo + head + PAYLOAD) or 0xFFFF
    return struct.pack(">HHHH", source_port, PORT, length, checksum) + PAYLOAD


def _checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class SelfTest:
    """Tests each VXLAN device periodically, and disables a broken offload."""

    def __init__(
        self, tunnels: Callable[[], Tunnels], metrics: OverlayMetrics, repair: bool, clock: Clock | None = None
    ) -> None:
        """Set the devices to test: `tunnels` returns device, own address, and peer addresses. Called from another thread."""
        self._tunnels = tunnels
        self._metrics = metrics
        self._repair = repair
        self._clock = clock or SystemClock()
        self._stopping = False
        self._refused = False

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager that runs the tests."""
        return in_background("overlay-selftest", self._run, self._stop, patience=_STOP_SECONDS)

    def _stop(self) -> None:
        self._stopping = True
        self._clock.wake()

    def _run(self) -> None:
        rest = FIRST
        while not self._stopping:
            self._clock.sleep(rest)
            if self._stopping:
                return
            verdicts = [self.test(*tunnel) for tunnel in self._tunnels() if tunnel[2]]
            if not verdicts:
                rest = FIRST
            else:
                rest = UNCLEAR if ChecksumVerdict.UNCLEAR in verdicts else CLEAR

    def test(self, device: str, own: str, peers: tuple[str, ...]) -> ChecksumVerdict:
        """Test one device, and repair it."""
        found = ChecksumVerdict.UNCLEAR
        try:
            for peer in peers[:_MOST_PEERS]:
                found = _test_checksums(device, own, peer, lambda: self._stopping)
                if found is not ChecksumVerdict.UNCLEAR:
                    break
            if found is ChecksumVerdict.BROKEN and offloaded(device):
                found = self._broken(device, own, peer)
        except PermissionError as error:
            if not self._refused:
                LOGGER.warning("overlay: the checksum self-test cannot run: %s; it needs CAP_NET_RAW", error.strerror)
            self._refused = True
        except OSError as error:
            # The device may have been deleted; the loop restores it.
            LOGGER.debug("the self-test of %s: %s", device, error)
        self._metrics.checksums[device] = found
        return found

    def _broken(self, device: str, own: str, peer: str) -> ChecksumVerdict:
        said = f"overlay: packets that leave {device} for {peer} have wrong checksums, which their receivers drop"
        if not self._repair:
            LOGGER.error("%s: run `ethtool -K %s tx-checksum-ip-generic off`", said, device)
            return ChecksumVerdict.BROKEN
        _ethtool(device, _SET_TX_CHECKSUM)
        self._metrics.repaired += 1
        found = _test_checksums(device, own, peer, lambda: self._stopping)
        LOGGER.warning(
            "%s: the kernel now completes them itself (offload of %s is disabled); new test result: %s",
            said,
            device,
            found.value,
        )
        return found
