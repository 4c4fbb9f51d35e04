"""Fake DNS upstreams on loopback, in the event loop of their user: without threads or waiting."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable

from narthex.dns.corefile.settings import Upstream
from narthex.dns.message import wire
from narthex.dns.message.query import Query, Transport, parse_query
from narthex.dns.server.event_loop import EventLoop

Script = Callable[[Query, Transport], Iterable[bytes]]
"""The messages to send for a question; none: silence."""

_TRIES = 50


class FakeUpstream:
    """Listens over UDP and TCP on one random port until `close`."""

    def __init__(self, loop: EventLoop, script: Script) -> None:
        self._loop = loop
        self.script = script
        self.asked: list[tuple[Query, Transport]] = []
        """All questions so far."""
        self.ports: set[int] = set()
        """Ports that questions over UDP came from."""
        self.accepted = 0
        """Connections so far."""
        self._datagrams, self._listener = _pair()
        self._connections: dict[int, tuple[socket.socket, bytearray]] = {}
        self.upstream = Upstream("127.0.0.1", self._datagrams.getsockname()[1])
        loop.register(self._datagrams.fileno(), self._datagram)
        loop.register(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop; later queries are refused."""
        self.hang_up()
        for sock in (self._datagrams, self._listener):
            self._loop.unregister(sock.fileno())
            sock.close()

    def hang_up(self) -> None:
        """Close all connections."""
        for sock, _ in self._connections.values():
            self._loop.unregister(sock.fileno())
            sock.close()
        self._connections.clear()

    def stop_tcp(self) -> None:
        """Refuse connections from now on."""
        self.hang_up()
        self._loop.unregister(self._listener.fileno())
        self._listener.close()
        self._listener = socket.socket()

    def _datagram(self) -> None:
        while True:
            try:
                packet, sender = self._datagrams.recvfrom(65_535)
            except BlockingIOError:
                return
            self.ports.add(sender[1])
            for message in self._messages(packet, "udp"):
                self._datagrams.sendto(message, sender)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        self.accepted += 1
        sock.setblocking(False)
        self._connections[sock.fileno()] = sock, bytearray()
        self._loop.register(sock.fileno(), lambda: self._stream(sock.fileno()))

    def _stream(self, fd: int) -> None:
        sock, held = self._connections[fd]
        try:
            data = sock.recv(65_536)
        except ConnectionResetError:
            data = b""
        if not data:
            self._loop.unregister(fd)
            del self._connections[fd]
            sock.close()
            return
        held += data
        while len(held) >= 2 and len(held) >= 2 + (size := int.from_bytes(held[:2], "big")):
            packet = bytes(held[2 : 2 + size])
            del held[: 2 + size]
            for message in self._messages(packet, "tcp"):
                sock.setblocking(True)
                sock.sendall(len(message).to_bytes(2, "big") + message)
                sock.setblocking(False)

    def _messages(self, packet: bytes, via: Transport) -> Iterable[bytes]:
        query = parse_query(packet)
        if not isinstance(query, Query):
            raise AssertionError(f"no question: {packet!r}")
        self.asked.append((query, via))
        return tuple(self.script(query, via))


def answer(
    query: Query, *addresses: str, rcode: int = 0, ttl: int = 60, flags: int = 0, name: bytes | None = None
) -> bytes:
    """Return a response with these IPv4 addresses; `name` replaces the name in the question."""
    question = (name or query.qname) + query.packet[query.question_end - 4 : query.question_end]
    head = wire.HEADER.pack(query.id, wire.QR | wire.RD | wire.RA | flags | rcode, 1, len(addresses), 0, 0)
    records = [
        b"\xc0\x0c" + wire.RECORD_TAIL.pack(wire.A, wire.IN, ttl, 4) + socket.inet_aton(each) for each in addresses
    ]
    return head + question + b"".join(records)


def denial(query: Query, minimum: int = 30, rcode: int = 3) -> bytes:
    """Return a response that denies the name for this many seconds."""
    soa = b"\xc0\x0c" + wire.RECORD_TAIL.pack(wire.SOA, wire.IN, 600, 22) + b"\0\0" + b"\0" * 16
    head = wire.HEADER.pack(query.id, wire.QR | wire.RD | wire.RA | rcode, 1, 0, 1, 0)
    return head + query.packet[12 : query.question_end] + soa + minimum.to_bytes(4, "big")


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return a UDP and a TCP socket on the same free port."""
    for _ in range(_TRIES):
        listener = socket.create_server(("127.0.0.1", 0))
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            datagrams.bind(listener.getsockname())
        except OSError as error:
            listener.close()
            datagrams.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        listener.setblocking(False)
        datagrams.setblocking(False)
        return datagrams, listener
    raise OSError(errno.EADDRINUSE, f"no port was free for UDP and TCP in {_TRIES} tries")
