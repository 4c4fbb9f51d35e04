"""Packets: one connection sent from a namespace, and ears in all others.

An ear is a raw socket. The kernel copies every packet to it that is delivered in its namespace after all rules, with
the addresses it then has; so it says who got the packet and from whom, for TCP, UDP and SCTP alike, on any port, whether
anybody listens there or not. Endpoints listen as well and answer: a connection has to come to life, so the way back is
tested too. A refusal by ICMP arrives in the error queue of the client's socket.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import NamedTuple

import msgspec

from narthex.host import netns
from narthex.model.net import IPFamily, Protocol, address, family_of, join_port

_RECVERR = {IPFamily.IPV4: (socket.IPPROTO_IP, 11), IPFamily.IPV6: (socket.IPPROTO_IPV6, 25)}
_PORT_UNREACHABLE = {(2, 3, 3), (3, 1, 4)}
"""Origin (ICMP, ICMPv6), type and code."""
_ADDRESS_FAMILY = {IPFamily.IPV4: socket.AF_INET, IPFamily.IPV6: socket.AF_INET6}
_RST_ON_CLOSE = struct.pack("ii", 1, 0)
_SETTLE = 0.002
"""Seconds in which what is on its way inside this kernel must have arrived after a refusal came back."""


class ProbeError(RuntimeError):
    """The packet could not even be sent."""


class Arrival(NamedTuple):
    """A connection's first packet, where it ended."""

    site: int
    source: str
    destination: str
    port: int


class Result(msgspec.Struct, kw_only=True):
    """What became of one connection."""

    arrivals: list[Arrival]
    refusal: str = ""
    """`port unreachable`, `refused` (a TCP reset), or another ICMP error; empty when there was none."""
    answered: bool = False
    """The client heard from whom it called."""


def crc32c(data: bytes) -> int:
    """The checksum of SCTP (RFC 9260)."""
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
    """An SCTP packet with one INIT (chunk 1) or INIT ACK (chunk 2)."""
    body = struct.pack("!BBHIIHHI", chunk, 0, 20, init_tag, 0xFFFF, 1, 1, init_tag)
    head = struct.pack("!HHI", source_port, port, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + body)) + body


class Ears:
    """Listens in all namespaces of a world and lets endpoints answer."""

    def __init__(self, families: Iterable[IPFamily], protocols: Iterable[Protocol]) -> None:
        self._kinds = [(family, protocol) for family in families for protocol in protocols]
        self._stack = ExitStack()
        self._epoll = self._stack.enter_context(select.epoll())
        self._on_event: dict[int, Callable[[], None]] = {}
        self._heard: list[tuple[Arrival, bytes]] = []
        self._answering: set[tuple[str, int, Protocol]] = set()

    def __enter__(self) -> Ears:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def open(self, site: int, namespace: str) -> None:
        """Listen in a namespace."""
        with netns.entered(namespace):
            for family, protocol in self._kinds:
                ear = self._socket(family, socket.SOCK_RAW, protocol)
                if family is IPFamily.IPV6:
                    ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
                self._watch(ear, lambda ear=ear, protocol=protocol: self._hear(ear, protocol, site))  # type: ignore[misc]

    def answer(self, namespace: str, endpoint: str, port: int, protocol: Protocol) -> None:
        """Let an endpoint take connections and answer them."""
        family = family_of(endpoint)
        if (family, protocol) not in self._kinds or (endpoint, port, protocol) in self._answering:
            return
        kind = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}.get(protocol, socket.SOCK_RAW)
        with netns.entered(namespace):
            server = self._socket(family, kind, protocol)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((endpoint, 0 if protocol is Protocol.SCTP else port))
        if protocol is Protocol.TCP:
            server.listen(1024)
            self._watch(server, lambda: _accept(server))
        elif protocol is Protocol.UDP:
            self._watch(server, lambda: _echo(server))
        else:
            self._watch(server, lambda: _acknowledge(server, family, port))
        self._answering.add((endpoint, port, protocol))

    def answers(self, endpoint: str, port: int, protocol: Protocol) -> bool:
        """Whether somebody answers there."""
        return (endpoint, port, protocol) in self._answering

    def connect(
        self, namespace: str, source: str, destination: str, port: int, protocol: Protocol, patience: float
    ) -> Result:
        """Send one NEW connection and watch what becomes of it, for at most `patience` seconds.

        Raises ProbeError when it cannot be sent.
        """
        self._listen(0)
        self._heard.clear()
        with netns.entered(namespace):
            client = _Client(source, destination, port, protocol)
        deadline = time.monotonic() + patience
        try:
            self._epoll.register(client.socket, client.events)
            self._on_event[client.socket.fileno()] = client.look
            client.send()
            while True:
                result = self._result(client)
                left = deadline - time.monotonic()
                if left <= 0 or self._settled(client, result):
                    return result
                if client.refusal and not result.arrivals:
                    # The refusal may be read before the packet's arrival, though it never happens before it.
                    self._listen(_SETTLE)
                    return self._result(client)
                self._listen(left)
        finally:
            self._on_event.pop(client.socket.fileno(), None)
            client.socket.close()

    def _result(self, client: _Client) -> Result:
        mine = [arrival for arrival, payload in self._heard if client.sent(payload)]
        return Result(arrivals=mine, refusal=client.refusal, answered=client.answered)

    def _settled(self, client: _Client, result: Result) -> bool:
        """Whether there is nothing more to wait for: it arrived, and the answer came or none can come."""
        if not result.arrivals:
            return False
        last = result.arrivals[-1]
        to_itself = last.source == last.destination
        return client.answered or to_itself or not self.answers(last.destination, last.port, client.protocol)

    def _listen(self, timeout: float) -> None:
        """Handle what is there; wait for the first event, not for more."""
        for number, _ in self._epoll.poll(timeout):
            handler = self._on_event.get(number)
            if handler is not None:
                handler()

    def _socket(self, family: IPFamily, kind: int, protocol: Protocol) -> socket.socket:
        made = socket.socket(_ADDRESS_FAMILY[family], kind, protocol.number)
        made.setblocking(False)
        return self._stack.enter_context(made)

    def _watch(self, watched: socket.socket, handler: Callable[[], None]) -> None:
        self._epoll.register(watched, select.EPOLLIN)
        self._on_event[watched.fileno()] = handler

    def _hear(self, ear: socket.socket, protocol: Protocol, site: int) -> None:
        for data, ancillary, peer in _packets(ear):
            if ear.family == socket.AF_INET:
                head = (data[0] & 15) * 4
                source, destination = socket.inet_ntoa(data[12:16]), socket.inet_ntoa(data[16:20])
                data = data[head:]
            else:
                source = address(peer[0].partition("%")[0])
                destination = address(socket.inet_ntop(socket.AF_INET6, ancillary[0][2][:16]))
            payload = _first_packet(data, protocol)
            if payload is not None:
                port = int.from_bytes(data[2:4], "big")
                self._heard.append((Arrival(site, source, destination, port), payload))


def _first_packet(data: bytes, protocol: Protocol) -> bytes | None:
    """What tells one connection's first packet from another's; None for any packet that is not a first one."""
    if protocol is Protocol.TCP:
        return b"" if len(data) >= 20 and data[13] & 0x12 == 0x02 else None
    if protocol is Protocol.UDP:
        return data[8:]
    return data[16:20] if len(data) >= 20 and data[12] == 1 else None


def _packets(ear: socket.socket) -> Iterable[tuple[bytes, list[tuple[int, int, bytes]], tuple[str, int]]]:
    while True:
        try:
            data, ancillary, _, peer = ear.recvmsg(4096, 256)
        except BlockingIOError:
            return
        yield data, ancillary, peer


def _accept(server: socket.socket) -> None:
    while True:
        try:
            taken, _ = server.accept()
        except BlockingIOError:
            return
        except ConnectionError:
            continue
        # The client closes; whoever sends the first FIN is of no matter here.
        taken.close()


def _echo(server: socket.socket) -> None:
    while True:
        try:
            data, peer = server.recvfrom(4096)
            server.sendto(data[::-1], peer)
        except BlockingIOError:
            return
        except OSError:
            # An ICMP error about an earlier answer: its client is gone.
            continue


def _acknowledge(server: socket.socket, family: IPFamily, port: int) -> None:
    for data, _, peer in _packets(server):
        segment = data[(data[0] & 15) * 4 :] if family is IPFamily.IPV4 else data
        tag = _first_packet(segment, Protocol.SCTP)
        if tag is None or int.from_bytes(segment[2:4], "big") != port:
            continue
        number = int.from_bytes(tag, "big")
        reply = sctp_packet(port, int.from_bytes(segment[:2], "big"), number, 2, number)
        server.sendto(reply, (peer[0], 0))


class _Client:
    """The calling end of one connection."""

    def __init__(self, source: str, destination: str, port: int, protocol: Protocol) -> None:
        self.protocol = protocol
        self.refusal = ""
        self.answered = False
        self.events = select.EPOLLERR | (select.EPOLLOUT if protocol is Protocol.TCP else select.EPOLLIN)
        self._to = destination, port
        # Read backwards, as the answer brings it, it is another.
        self._token = os.urandom(4) if protocol is Protocol.SCTP else b"?" + os.urandom(6) + b"!"
        family = family_of(source)
        kind = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}.get(protocol, socket.SOCK_RAW)
        self.socket = socket.socket(_ADDRESS_FAMILY[family], kind, protocol.number)
        try:
            self.socket.setblocking(False)
            self.socket.setsockopt(*_RECVERR[family], 1)
            if protocol is Protocol.TCP:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
            self.socket.bind((source, 0))
        except OSError as error:
            self.socket.close()
            raise ProbeError(f"cannot send from {source}: {error.strerror}") from None

    def send(self) -> None:
        """Let the first packet out."""
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
        raise ProbeError(f"cannot send to {join_port(destination, port)}: {os.strerror(number)}")

    def _first(self, port: int) -> bytes:
        source_port = 32768 + int.from_bytes(self._token[:2], "big") % 28000
        return sctp_packet(source_port, port, 0, 1, int.from_bytes(self._token, "big"))

    def sent(self, payload: bytes) -> bool:
        """Whether a packet that arrived somewhere is this client's first."""
        return self.protocol is Protocol.TCP or payload == self._token

    def look(self) -> None:
        """Read what has come back."""
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
        try:
            self.socket.getpeername()
            self.answered = True
        except OSError:
            return

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


class Tap:
    """Sees what reaches the node's interfaces before any rule, to be sure that silence is the rules' doing."""

    def __init__(self, namespace: str) -> None:
        with netns.entered(namespace):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
        self._socket.setblocking(False)

    def __enter__(self) -> Tap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def clear(self) -> None:
        """Forget what was seen."""
        for _ in self._frames():
            pass

    def saw(self, source: str, destination: str, interface: str) -> bool:
        """Whether a packet between the two has come in by the interface since the last call."""
        family = family_of(source)
        start, size = (12, 4) if family is IPFamily.IPV4 else (8, 16)
        wanted = b"".join(socket.inet_pton(_ADDRESS_FAMILY[family], text) for text in (source, destination))
        return any(
            name == interface and data[start : start + 2 * size] == wanted and data[0] >> 4 == family.value
            for data, name in list(self._frames())
        )

    def _frames(self) -> Iterable[tuple[bytes, str]]:
        while True:
            try:
                data, where = self._socket.recvfrom(128)
            except BlockingIOError:
                return
            if where[2] != socket.PACKET_OUTGOING:
                yield data, where[0]
