"""Questions over TCP: many on a connection, answered as they are ready (RFC 7766)."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter

from narthex.dns.dispatcher import Ask, Desk, Labels, Made
from narthex.dns.interfaces import Client, Loop
from narthex.dns.plugins.query_log import QueryLog
from narthex.dns.server.tally import Tally
from narthex.dns.server.udp import Elsewhere
from narthex.dns.zone.table import Table

MOST_CONNECTIONS = 512
"""Of one worker; more are closed at once."""
MOST_PER_CLIENT = 64
IDLE_SECONDS = 10.0
"""After so long without a whole question, or without room for an answer, a connection is closed."""
_MOST_WAITING = 128
"""Questions of one connection that others have to answer; beyond them it is not read."""
_MOST_UNREAD = 262_144
"""Bytes of answers that a client has not taken; beyond them it is not read."""
_READ = 65_537
_LOOK_SECONDS = 1.0
_BACKLOG = 512


class TcpServer:
    """Serves one listening socket in the loop's thread."""

    def __init__(
        self,
        sock: socket.socket,
        desk: Desk,
        tally: Tally,
        loop: Loop,
        elsewhere: Elsewhere,
        most_bytes: int,
        log: QueryLog | None = None,
    ) -> None:
        """`most_bytes` bounds what known questions may take."""
        self._sock = sock
        self.desk = desk
        self.tally = tally
        self.loop = loop
        self.elsewhere = elsewhere
        self.family = 1 if sock.family == socket.AF_INET else 2
        self.table = Table(most_bytes)
        self.log = log
        self._connections: dict[int, _Connection] = {}
        self._by_client: Counter[str] = Counter()

    def open(self) -> None:
        """Begin to answer."""
        self.loop.register(self._sock.fileno(), self._acceptable)
        self.loop.at(self.loop.now() + _LOOK_SECONDS, self._look)

    def close(self) -> None:
        """End, with all connections."""
        self.loop.unregister(self._sock.fileno())
        self._sock.close()
        for connection in tuple(self._connections.values()):
            connection.close()

    def forget(self) -> None:
        """A zone has changed, or counters are taken away."""
        self.table.clear()

    def closed(self, fd: int, address: str) -> None:
        """A connection is over."""
        del self._connections[fd]
        self._by_client[address] -= 1
        if not self._by_client[address]:
            del self._by_client[address]

    def _acceptable(self) -> None:
        try:
            sock, peer = self._sock.accept()
        except OSError:
            # It left already, or files have run out; those that come to an end make room.
            return
        address = str(peer[0]).partition("%")[0]
        if len(self._connections) >= MOST_CONNECTIONS or self._by_client[address] >= MOST_PER_CLIENT:
            self.tally.refused_connections += 1
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._by_client[address] += 1
        self._connections[sock.fileno()] = _Connection(self, sock, address, peer[1])

    def _look(self) -> None:
        """Close what has been idle for too long."""
        if self._sock.fileno() < 0:
            return
        latest = self.loop.now() - IDLE_SECONDS
        for connection in tuple(self._connections.values()):
            if connection.moved < latest:
                connection.close()
        self.loop.at(self.loop.now() + _LOOK_SECONDS, self._look)


class _Connection:
    def __init__(self, server: TcpServer, sock: socket.socket, address: str, port: int) -> None:
        self._server = server
        self._sock = sock
        self._fd = sock.fileno()
        self._client = Client(address, "tcp")
        self._port = port
        self._in = bytearray()
        self._out = bytearray()
        self._waiting = 0
        self._answering = False
        self._ended = False
        """The client has said that it asks no more; what it asked is still answered."""
        self.moved = server.loop.now()
        """When it last asked, or took something."""
        self._watch()

    def close(self) -> None:
        """End it; what has not been sent is lost."""
        if self._sock.fileno() < 0:
            return
        self._server.loop.unregister(self._fd)
        self._sock.close()
        self._server.closed(self._fd, self._client.address)

    def _watch(self) -> None:
        reads = not self._ended and self._waiting < _MOST_WAITING and len(self._out) < _MOST_UNREAD
        readable, writable = self._readable if reads else None, self._writable if self._out else None
        self._server.loop.register(self._fd, readable, writable)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._ended = not data
        self._in += data
        self._go_on()

    def _writable(self) -> None:
        self._flush()
        if self._sock.fileno() >= 0:
            self._go_on()

    def _go_on(self) -> None:
        """Answer what is whole, as far as the client keeps up; then see what to wait for."""
        answered = 1
        while answered and self._sock.fileno() >= 0:
            answered = self._answer_whole()
            self._flush()

    def _answer_whole(self) -> int:
        """Answer questions until there is none, or too much that is not sent; how many."""
        began = time.perf_counter()
        at = answered = 0
        data = self._in
        self._answering = True
        while self._waiting < _MOST_WAITING and len(self._out) < _MOST_UNREAD and at + 2 <= len(data):
            end = at + 2 + int.from_bytes(data[at : at + 2], "big")
            if end > len(data):
                break
            self._answer(bytes(data[at + 2 : end]))
            at = end
            answered += 1
        self._answering = False
        if answered:
            del data[:at]
            self.moved = self._server.loop.now()
            self._server.tally.took(self._server.desk.main_zone, time.perf_counter() - began, answered)
        return answered

    def _flush(self) -> None:
        if self._out and self._sock.fileno() >= 0:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close()
                return
            if sent:
                del self._out[:sent]
                self.moved = self._server.loop.now()
        if self._sock.fileno() < 0:
            return
        if self._ended and not self._out and not self._waiting:
            self.close()
            return
        self._watch()

    def _answer(self, packet: bytes) -> None:
        server = self._server
        key = packet[2:]
        began = time.perf_counter()
        kept = server.table.held.get(key)
        if kept is not None:
            kept.counter[0] += 1
            message = packet[:2] + (kept.tail if kept.turn is None else kept.turn.next())
            self._note(kept.zone, packet, message, began)
            self._put(message)
            return
        made = server.desk.handle(packet, "tcp")
        if isinstance(made, Made):
            counter = self._count(made.labels, packet, len(made.compiled.tail) + 2)
            message = packet[:2] + made.compiled.tail
            self._keep(key, made, counter)
            self._note(made.labels.zone, packet, message, began)
            self._put(message)
        elif isinstance(made, Ask):
            self._waiting += 1
            server.elsewhere(made, self._client, lambda message: self._replied(made, message, began))
        elif made is not None:
            self._count(made.labels, packet, len(made.message))
            self._put(made.message)

    def _keep(self, key: bytes, made: Made, counter: list[int]) -> None:
        if made.compiled.code and self._server.log is None:
            self._server.table.keep_unknown(key, made.compiled.tail, counter)
        else:
            self._server.table.keep(key, made.compiled, counter, made.labels.zone)

    def _note(self, zone: str, packet: bytes, message: bytes, began: float) -> None:
        log = self._server.log
        if log is not None and log.covers(zone):
            log.note(zone, packet, message, self._client, self._port, time.perf_counter() - began)

    def _count(self, labels: Labels, packet: bytes, size: int) -> list[int]:
        counter = self._server.tally.counter(("tcp", self._server.family, labels, len(packet), size))
        counter[0] += 1
        return counter

    def _replied(self, ask: Ask, message: bytes | None, began: float) -> None:
        self._waiting -= 1
        if self._sock.fileno() < 0:
            return
        if message is not None:
            self._note(ask.zone, ask.query.packet, message, began)
            self._put(message)
        if not self._answering:
            self._go_on()

    def _put(self, message: bytes) -> None:
        self._out += len(message).to_bytes(2, "big") + message


def tcp_socket(address: str, port: int, *, interface: str = "") -> socket.socket:
    """A listening socket, one of several on its address and port. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if interface:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{os.strerror(error.errno or 0)}: TCP {address} port {port}") from error
    return sock
