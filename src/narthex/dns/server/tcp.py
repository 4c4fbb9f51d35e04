"""DNS over TCP: many queries per connection, answered as soon as each answer is known (RFC 7766)."""

from __future__ import annotations

import socket
import time
from collections import Counter

from narthex.dns.message.query import DnsClient
from narthex.dns.server.dispatcher import LocalAnswer, PendingQuery, QueryServer, ServerContext

MAX_CONNECTIONS = 512
"""Limit per worker; further connections are closed at once."""
MAX_CONNECTIONS_PER_CLIENT = 64
IDLE_SECONDS = 10.0
"""A connection is closed after this time without a whole query, and without progress in sending responses."""
_MAX_PENDING = 128
"""Pending queries of one connection at which it is no longer read."""
_MAX_UNSENT = 262_144
"""Unsent bytes of responses at which the connection is no longer read."""
_READ = 65_537
_IDLE_CHECK_SECONDS = 1.0


class TcpServer(QueryServer):
    """Serves one listening socket."""

    transport = "tcp"

    def __init__(self, sock: socket.socket, context: ServerContext, max_bytes: int) -> None:
        super().__init__(sock, context, max_bytes)
        self._connections: dict[int, _Connection] = {}
        self._by_client: Counter[str] = Counter()

    def open(self) -> None:
        """Start to accept connections."""
        self.loop.register(self.sock.fileno(), self._acceptable)
        self.loop.at(self.loop.now() + _IDLE_CHECK_SECONDS, self._close_idle)

    def close(self) -> None:
        """Close the listening socket and all connections."""
        super().close()
        for connection in tuple(self._connections.values()):
            connection.close()

    def closed(self, fd: int, address: str) -> None:
        """Forget a connection that has closed."""
        del self._connections[fd]
        self._by_client[address] -= 1
        if not self._by_client[address]:
            del self._by_client[address]

    def _acceptable(self) -> None:
        try:
            sock, peer = self.sock.accept()
        except OSError:
            # The client has gone, or descriptors have run out; connections that close free some.
            return
        address = str(peer[0]).partition("%")[0]
        if len(self._connections) >= MAX_CONNECTIONS or self._by_client[address] >= MAX_CONNECTIONS_PER_CLIENT:
            self.counter.refused_connections += 1
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._by_client[address] += 1
        self._connections[sock.fileno()] = _Connection(self, sock, address, peer[1])

    def _close_idle(self) -> None:
        if self.sock.fileno() < 0:
            return
        oldest = self.loop.now() - IDLE_SECONDS
        for connection in tuple(self._connections.values()):
            if connection.active_at < oldest:
                connection.close()
        self.loop.at(self.loop.now() + _IDLE_CHECK_SECONDS, self._close_idle)


class _Connection:
    def __init__(self, server: TcpServer, sock: socket.socket, address: str, port: int) -> None:
        self._server = server
        self._sock = sock
        self._fd = sock.fileno()
        self._client = DnsClient(address, "tcp")
        self._port = port
        self._in = bytearray()
        self._out = bytearray()
        self._pending = 0
        self._answering = False
        self._ended = False
        """The client has closed its side; its queries are still answered."""
        self.active_at = server.loop.now()
        """Time of the last query or of progress in sending."""
        self._watch()

    def close(self) -> None:
        if self._sock.fileno() < 0:
            return
        self._server.loop.unregister(self._fd)
        self._sock.close()
        self._server.closed(self._fd, self._client.address)

    def _watch(self) -> None:
        reads = not self._ended and self._pending < _MAX_PENDING and len(self._out) < _MAX_UNSENT
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
        self._serve()

    def _writable(self) -> None:
        self._flush()
        if self._sock.fileno() >= 0:
            self._serve()

    def _serve(self) -> None:
        """Answer all whole queries as far as the client takes the responses."""
        answered = 1
        while answered and self._sock.fileno() >= 0:
            answered = self._answer_queries()
            self._flush()

    def _answer_queries(self) -> int:
        """Answer whole queries until none is left or a limit is reached. Return their number."""
        started = time.perf_counter()
        at = answered = 0
        data = self._in
        self._answering = True
        while self._pending < _MAX_PENDING and len(self._out) < _MAX_UNSENT and at + 2 <= len(data):
            end = at + 2 + int.from_bytes(data[at : at + 2], "big")
            if end > len(data):
                break
            self._answer(bytes(data[at + 2 : end]))
            at = end
            answered += 1
        self._answering = False
        if answered:
            del data[:at]
            self.active_at = self._server.loop.now()
            self._server.counter.observe(self._server.dispatcher.main_zone, time.perf_counter() - started, answered)
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
                self.active_at = self._server.loop.now()
        if self._sock.fileno() < 0:
            return
        if self._ended and not self._out and not self._pending:
            self.close()
            return
        self._watch()

    def _answer(self, packet: bytes) -> None:
        server = self._server
        key = packet[2:]
        started = time.perf_counter()
        cached = server.cache.entries.get(key)
        if cached is not None:
            cached.counter[0] += 1
            message = packet[:2] + (cached.tail if cached.rotation is None else cached.rotation.next())
            server.log_query(cached.zone, packet, message, self._client, self._port, started)
            self._send(message)
            return
        answer = server.dispatcher.handle(packet, "tcp")
        if isinstance(answer, LocalAnswer):
            response, labels = answer.response, answer.labels
            counter = server.count(labels, packet, len(response.tail) + 2)
            message = packet[:2] + response.tail
            if response.rcode and server.log is None:
                server.cache.store_negative(key, response.tail, counter)
            else:
                server.cache.store(key, response, counter, labels.zone)
            server.log_query(labels.zone, packet, message, self._client, self._port, started)
            self._send(message)
        elif isinstance(answer, PendingQuery):
            self._pending += 1
            server.recursion.resolve(answer, self._client, lambda message: self._resolved(answer, message, started))
        elif answer is not None:
            server.count(answer.labels, packet, len(answer.message))
            self._send(answer.message)

    def _resolved(self, pending: PendingQuery, message: bytes | None, started: float) -> None:
        self._pending -= 1
        if self._sock.fileno() < 0:
            return
        if message is not None:
            packet = pending.query.packet
            self._server.log_query(pending.zone, packet, message, self._client, self._port, started)
            self._send(message)
        if not self._answering:
            self._serve()

    def _send(self, message: bytes) -> None:
        self._out += len(message).to_bytes(2, "big") + message
