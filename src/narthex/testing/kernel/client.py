"""The client end of a test connection, and the form of its first packet.

An ICMP refusal arrives in the error queue of the client's socket, which distinguishes it from a reset by a peer. The kernel
may lack SCTP, so SCTP packets are built by hand, with one INIT or INIT ACK chunk.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from contextlib import suppress

from narthex.model import IPFamily, Protocol, family_of, join_port

_RECVERR = {IPFamily.IPV4: (socket.IPPROTO_IP, 11), IPFamily.IPV6: (socket.IPPROTO_IPV6, 25)}
_PORT_UNREACHABLE = {(2, 3, 3), (3, 1, 4)}
"""Origin (ICMP, ICMPv6), type and code."""
ADDRESS_FAMILY = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}
SOCKET_KIND = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM, Protocol.SCTP: socket.SOCK_RAW}
_RST_ON_CLOSE = struct.pack("ii", 1, 0)
_TCP_REPAIR, _TCP_REPAIR_QUEUE, _TCP_QUEUE_SEQ = 19, 20, 21
_TCP_SEND_QUEUE = 2
_TCP_REPAIR_OFF_NO_WINDOW_PROBE = -1
"""Linux 4.20."""


class WitnessError(RuntimeError):
    """A test packet could not be sent."""


def crc32c(data: bytes) -> int:
    """Return the checksum of SCTP (RFC 9260)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_table() -> tuple[int, ...]:
    table = []
    for index in range(256):
        value = index
        for _ in range(8):
            value = (value >> 1) ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def sctp_packet(source_port: int, port: int, tag: int, chunk: int, init_tag: int) -> bytes:
    """Return an SCTP packet with one INIT (chunk 1) or INIT ACK (chunk 2)."""
    body = struct.pack("!BBHIIHHI", chunk, 0, 20, init_tag, 0xFFFF, 1, 1, init_tag)
    head = struct.pack("!HHI", source_port, port, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + body)) + body


def first_packet(data: bytes, protocol: Protocol) -> bytes | None:
    """Return the nonce of a connection's first packet, or None for any other packet.

    The nonce is the initial sequence number (TCP), the payload (UDP), or the initiate tag (SCTP). NAT changes none of them.
    """
    if protocol is Protocol.TCP:
        return data[4:8] if len(data) >= 20 and data[13] & 0x12 == 0x02 else None
    if protocol is Protocol.UDP:
        return data[8:]
    return data[16:20] if len(data) >= 20 and data[12] == 1 else None


class ProbeClient:
    """The client end of one connection."""

    def __init__(self, source: str, destination: str, port: int, protocol: Protocol) -> None:
        self.protocol = protocol
        self.refusal = ""
        self.answered = False
        self.events = select.EPOLLERR | (select.EPOLLOUT if protocol is Protocol.TCP else select.EPOLLIN)
        self._to = destination, port
        # UDP answers carry the payload reversed, so the payload must not be a palindrome.
        self._token = b"?" + os.urandom(6) + b"!" if protocol is Protocol.UDP else os.urandom(4)
        family = family_of(source)
        kind = SOCKET_KIND[protocol]
        self.socket = socket.socket(ADDRESS_FAMILY[family], kind, protocol.number)
        try:
            self.socket.setblocking(False)
            self.socket.setsockopt(*_RECVERR[family], 1)
            if protocol is Protocol.TCP:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
                self._set_initial_sequence_number()
            self.socket.bind((source, 0))
        except OSError as error:
            self.socket.close()
            raise WitnessError(f"cannot send from {source}: {error.strerror}") from None

    def _set_initial_sequence_number(self) -> None:
        """Make the nonce the sequence number of the SYN (tcp(7), TCP_REPAIR)."""
        self.socket.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        self.socket.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR_QUEUE, _TCP_SEND_QUEUE)
        self.socket.setsockopt(
            socket.IPPROTO_TCP, _TCP_QUEUE_SEQ, struct.pack("=I", int.from_bytes(self._token, "big"))
        )
        self.socket.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, _TCP_REPAIR_OFF_NO_WINDOW_PROBE)

    def send(self) -> None:
        """Send the first packet."""
        destination, port = self._to
        raw = self.protocol is Protocol.SCTP
        number = self.socket.connect_ex((destination, 0 if raw else port))
        if number == 0 and self.protocol is not Protocol.TCP:
            try:
                self.socket.send(self._first(port) if raw else self._token)
            except OSError as error:
                number = error.errno or 0
        # EPERM: a rule of this node stopped it on its way out, with or without a refusal that follows.
        if number in (0, errno.EINPROGRESS, errno.EPERM, errno.ECONNREFUSED):
            self.look()
            if number == errno.ECONNREFUSED and not self.refusal:
                self.refusal = "refused"
            return
        raise WitnessError(f"cannot send to {join_port(destination, port)}: {os.strerror(number)}")

    def send_again(self) -> None:
        """Repeat a datagram that got no answer. TCP retransmits by itself."""
        if self.protocol is Protocol.TCP:
            return
        with suppress(OSError):
            self.socket.send(self._first(self._to[1]) if self.protocol is Protocol.SCTP else self._token)
        self.look()

    def excuse(self) -> bool:
        """Forget a refusal by ICMP that is not about a port, and return True if there was one.

        A kernel that has just been configured has no route for a moment; a lasting refusal comes again. Refusals of ports and of TCP,
        which is not sent again, count at once.
        """
        if self.protocol is Protocol.TCP or self.refusal in ("port unreachable", "refused"):
            return False
        self.refusal = ""
        return True

    def _first(self, port: int) -> bytes:
        source_port = 32768 + int.from_bytes(self._token[:2], "big") % 28000
        return sctp_packet(source_port, port, 0, 1, int.from_bytes(self._token, "big"))

    def sent(self, nonce: bytes) -> bool:
        """Return True if a packet with this nonce is from this client."""
        return nonce == self._token

    def look(self) -> None:
        """Read answers and errors from the socket."""
        self._read_errors()
        if self.protocol is Protocol.TCP:
            self._look_tcp()
        else:
            self._read_answers()

    def _look_tcp(self) -> None:
        number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self.refusal = self.refusal or ("refused" if number == errno.ECONNREFUSED else os.strerror(number))
            return
        if self.answered:
            return
        try:
            self.socket.getpeername()
        except OSError:
            return
        self.answered = True
        # A relay makes a connection of its own, which only the data on it ties to this client.
        with suppress(OSError):
            self.socket.send(self._token)

    def _read_answers(self) -> None:
        while True:
            try:
                data = self.socket.recv(4096)
            except BlockingIOError:
                return
            except OSError as error:
                self.refusal = self.refusal or ("refused" if error.errno == errno.ECONNREFUSED else str(error.strerror))
                continue
            if self.protocol is Protocol.UDP:
                self.answered = self.answered or data == self._token[::-1]
            else:
                segment = data[(data[0] & 15) * 4 :] if self.socket.family == socket.AF_INET else data
                self.answered = self.answered or (segment[4:8] == self._token and segment[12:13] == b"\x02")

    def _read_errors(self) -> None:
        while True:
            try:
                _, ancillary, _, _ = self.socket.recvmsg(4096, 512, socket.MSG_ERRQUEUE)
            except OSError:
                return
            for _, _, data in ancillary:
                _, origin, kind, code = struct.unpack_from("=IBBB", data)
                known = (origin, kind, code) in _PORT_UNREACHABLE
                self.refusal = "port unreachable" if known else f"ICMP type {kind} code {code}"
