"""DNS over TCP: many queries per connection, answered as soon as each answer is known (RFC 7766)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Hashable, Iterator

from narthex.dns.message.query import DnsClient
from narthex.dns.server.dispatcher import LocalAnswer, PendingQuery, PendingTransfer, QueryServer, ServerContext
from narthex.runtime.connection_slots import (
    ACCEPT_RETRY_SECONDS,
    EVERY_PORT,
    EVICTED_SECONDS,
    FAILURE_LINES,
    LOG_SECONDS,
    ConnectionSlots,
    max_connections,
)
from narthex.runtime.logs import LOGGER, LimitedLog

MAX_CONNECTIONS = 512
"""Limit per worker and listening address. For each further connection, the one that has been silent longest is closed."""
MAX_CONNECTIONS_PER_CLIENT = 64
"""Of these, limit for one client address. For each further connection, one of the same client is closed."""
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
        self._connections: set[TcpConnection] = set()
        self.slots: ConnectionSlots[TcpConnection] = context.slots
        self._limit = max_connections()
        self._evictions = LimitedLog(LOGGER.warning, self._later, 1, LOG_SECONDS)
        self._failures = LimitedLog(LOGGER.error, self._later, FAILURE_LINES, LOG_SECONDS)

    def open(self) -> None:
        """Start to accept connections."""
        self._accept_from_now()
        self.loop.at(self.loop.now() + _IDLE_CHECK_SECONDS, self._close_idle)

    def close(self) -> None:
        """Close the listening socket and all connections."""
        super().close()
        for connection in tuple(self._connections):
            connection.close()

    def connection(self, sock: socket.socket, address: str, port: int) -> TcpConnection:
        """Return the connection of a socket that was accepted."""
        return TcpConnection(self, sock, address, port)

    def closed(self, connection: TcpConnection) -> None:
        """Forget a connection that has closed."""
        self._connections.discard(connection)
        self.slots.remove(connection)

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.loop.at(self.loop.now() + seconds, callback)

    def _accept_from_now(self) -> None:
        if self.sock.fileno() >= 0:
            self.loop.register(self.sock.fileno(), self._acceptable)

    def _acceptable(self) -> None:
        try:
            sock, peer = self.sock.accept()
        except (BlockingIOError, ConnectionError):
            # The client has left already.
            return
        except OSError as error:
            self._pause(error)
            return
        address = str(peer[0]).partition("%")[0]
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self.connection(sock, address, peer[1])
        self._connections.add(connection)
        limits: dict[Hashable, int] = {
            (self, address): MAX_CONNECTIONS_PER_CLIENT,
            self: MAX_CONNECTIONS,
            EVERY_PORT: self._limit,
        }
        for evicted in self.slots.add(connection, limits):
            self._evict(evicted)
            self._evictions.write(
                f"DNS over TCP has too many connections, the last one from {address} (limits: "
                f"{', '.join(map(str, limits.values()))} of one client, of one address, and of all); those that were silent longest are closed"
            )

    def _evict(self, connection: TcpConnection) -> None:
        self.counter.refused_connections += 1
        connection.close()

    def _pause(self, error: OSError) -> None:
        """Stop accepting until a file descriptor may be free: soon if a silent connection can be closed."""
        evicted = self.slots.evict(EVERY_PORT)
        if evicted is not None:
            self._evict(evicted)
        seconds = ACCEPT_RETRY_SECONDS if evicted is None else EVICTED_SECONDS
        self._failures.write(f"a TCP connection cannot be accepted: {error.strerror}; the next try is in {seconds:g} s")
        self.loop.unregister(self.sock.fileno())
        self._later(seconds, self._accept_from_now)

    def _close_idle(self) -> None:
        if self.sock.fileno() < 0:
            return
        oldest = self.loop.now() - IDLE_SECONDS
        for connection in tuple(self._connections):
            if connection.active_at < oldest:
                connection.close()
        self.loop.at(self.loop.now() + _IDLE_CHECK_SECONDS, self._close_idle)


class Plaintext:
    """What a connection receives and sends is not encrypted."""

    ended = False
    """True once the client has ended an encrypted stream."""

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Return what received bytes say, and bytes to send at once. Raises OSError for bytes that break the protocol."""
        return data, b""

    def send(self, data: bytes) -> bytes:
        """Return the bytes to send."""
        return data


class TcpConnection:
    """One connection: DNS messages, each after its length, in plain text or encrypted."""

    def __init__(
        self, server: TcpServer, sock: socket.socket, address: str, port: int, stream: Plaintext | None = None
    ) -> None:
        self._stream = Plaintext() if stream is None else stream
        self._server = server
        self._sock = sock
        self._fd = sock.fileno()
        self._client = DnsClient(address, "tcp", port)
        self._port = port
        self._in = bytearray()
        self._out = bytearray()
        self._pending = 0
        self._answering = False
        self._transfer: Iterator[bytes] | None = None
        """Messages of a zone transfer that are not sent yet. The next query waits for its end."""
        self._ended = False
        """The client has closed its side; its queries are still answered."""
        self.active_at = server.loop.now()
        """Time of the last query or of progress in sending."""
        self._watch()

    def close(self) -> None:
        """Close the connection; no effect if it is closed."""
        if self._sock.fileno() < 0:
            return
        self._server.loop.unregister(self._fd)
        self._sock.close()
        self._server.closed(self)

    def _may_answer(self) -> bool:
        """Return True while the client takes responses, and not too many queries are pending."""
        return self._pending < _MAX_PENDING and len(self._out) < _MAX_UNSENT and self._transfer is None

    def _watch(self) -> None:
        reads = self._may_answer() and not self._ended
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
        try:
            said, reply = self._stream.receive(data)
        except OSError:
            self.close()
            return
        self._ended = not data or self._stream.ended
        self._in += said
        self._out += reply
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
        while self._may_answer() and at + 2 <= len(data):
            end = at + 2 + int.from_bytes(data[at : at + 2], "big")
            if end > len(data):
                break
            self._answer(bytes(data[at + 2 : end]))
            at = end
            answered += 1
        self._answering = False
        if answered:
            del data[:at]
            self._note_answers(started, answered)
        return answered

    def _note_answers(self, started: float, answered: int) -> None:
        self._note_progress()
        self._server.counter.observe(self._server.dispatcher.main_zone, time.perf_counter() - started, answered)

    def _continue_transfer(self) -> None:
        while self._transfer is not None and len(self._out) < _MAX_UNSENT:
            message = next(self._transfer, None)
            if message is None:
                self._transfer = None
            else:
                self._send(message)

    def _flush(self) -> None:
        self._continue_transfer()
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
                self._note_progress()
        if self._sock.fileno() < 0:
            return
        if self._ended and not self._out and not self._pending and self._transfer is None:
            self.close()
            return
        self._watch()

    def _note_progress(self) -> None:
        self.active_at = self._server.loop.now()
        self._note_turn()

    def _note_turn(self) -> None:
        """Note who is to move: the server while queries are pending, otherwise the client."""
        slots = self._server.slots
        (slots.note_working if self._pending else slots.note_silent)(self)

    def _answer(self, packet: bytes, send: Callable[[bytes], None] | None = None) -> None:
        """Answer a query. `send` sends the response, and closes nothing."""
        send = self._send if send is None else send
        server = self._server
        key = packet[2:]
        started = time.perf_counter()
        cached = server.cache.entries.get(key)
        if cached is not None:
            cached.counter[0] += 1
            message = packet[:2] + (cached.tail if cached.rotation is None else cached.rotation.next())
            server.log_query(cached.zone, packet, message, self._client, self._port, started)
            send(message)
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
            send(message)
        elif isinstance(answer, PendingQuery):
            self._pending += 1
            server.recursion.resolve(
                answer, self._client, lambda message: self._resolved(answer, message, started, send)
            )
        elif isinstance(answer, PendingTransfer):
            self._transfer = answer.plugin.transfer(answer.query, self._client)
            server.count(answer.labels, packet, 0)
        elif answer is not None:
            server.count(answer.labels, packet, len(answer.message))
            send(answer.message)

    def _resolved(
        self, pending: PendingQuery, message: bytes | None, started: float, send: Callable[[bytes], None]
    ) -> None:
        self._pending -= 1
        if self._sock.fileno() < 0:
            return
        self._note_turn()
        if message is not None:
            packet = pending.query.packet
            self._server.log_query(pending.zone, packet, message, self._client, self._port, started)
            send(message)
        if not self._answering:
            self._serve()

    def _send(self, message: bytes) -> None:
        self._out += self._stream.send(len(message).to_bytes(2, "big") + message)
