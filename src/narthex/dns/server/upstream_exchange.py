"""Sends one query to one upstream over UDP, TCP, or TLS, within the event loop of a worker. It neither chooses nor retries.

Protection from forged responses (RFC 5452): each UDP query has a socket of its own, connected, on a random port that the
kernel chooses; a random ID; and a question name with letters in random case. Responses that do not match are dropped and
counted, and the wait goes on.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from random import SystemRandom
from typing import TYPE_CHECKING, cast

from narthex.dns.corefile.settings import Upstream
from narthex.dns.message.query import Transport, UpstreamQuery, count_letters, match_response, randomize_case
from narthex.dns.message.response import MalformedResponseError, UpstreamResponse, parse_response
from narthex.dns.server.counters import UpstreamCounter
from narthex.dns.server.event_loop import EventLoop, EventTimer

if TYPE_CHECKING:
    import ssl

RANDOM = SystemRandom()
"""Numbers of the kernel, which cannot be guessed. `secrets` has the same, and loads OpenSSL, which is four megabytes of each worker."""

MAX_SOCKETS = 2048
"""Limit of open sockets; further queries fail at once."""
MAX_IDLE_CONNECTIONS = 32
"""Limit per upstream."""
LOWER_CASE_TIME = 600.0
"""Seconds for which queries go out in lower case after an upstream has changed the case of a name over TCP, where forging a
response requires a position on the path."""

NOT_UNDERSTOOD = "the upstream did not understand the query"
ExchangeOutcome = UpstreamResponse | str
"""A response, or the reason for its absence."""
ExchangeReport = Callable[[ExchangeOutcome], None]


class UpstreamExchange:
    """Sends the queries of one `forward`, and keeps idle connections."""

    def __init__(
        self,
        loop: EventLoop,
        counter: UpstreamCounter,
        expire: float,
        tls: ssl.SSLContext | None,
        server_name: str = "",
    ) -> None:
        """`expire` is the lifetime of idle connections in seconds. `tls` is required for upstreams with TLS."""
        self.loop = loop
        self.counter = counter
        self.tls = tls
        self.server_name = server_name
        self._expire = expire
        self._idle: dict[Upstream, list[UpstreamConnection]] = {}
        self._lower_case_until: dict[Upstream, float] = {}
        self.in_use: set[_UpstreamSocket] = set()
        """Sockets with a query in flight."""

    def send(
        self, upstream: Upstream, via: Transport, query: UpstreamQuery, deadline: float, report: ExchangeReport
    ) -> None:
        """Send a query and call `report` once, by `deadline` and possibly before this returns."""
        if len(self.in_use) >= MAX_SOCKETS:
            report(f"{MAX_SOCKETS} queries are in flight already")
            return
        name = query.name
        if self._lower_case_until.get(upstream, 0.0) < self.loop.now():
            self._lower_case_until.pop(upstream, None)
            name = randomize_case(name, RANDOM.getrandbits(count_letters(name) + 1))
        packet = query.packet(RANDOM.getrandbits(16), name)
        if via == "udp" and upstream.transport == "dns":
            self.counter.connection(str(upstream), "udp", reused=False)
            _UdpQuery(self, upstream).send(packet, deadline, report)
            return
        self._over_stream(upstream, packet, deadline, report)

    def close(self) -> None:
        """Close all sockets. Reports nothing any more."""
        for each in list(self.in_use):
            each.close()
        for waiting in self._idle.values():
            for connection in list(waiting):
                connection.close()
        self._idle.clear()

    def use_lower_case(self, upstream: Upstream) -> None:
        """Send lower-case names to an upstream that does not preserve the case."""
        self._lower_case_until[upstream] = self.loop.now() + LOWER_CASE_TIME

    def keep_idle(self, connection: UpstreamConnection) -> None:
        """Keep a connection for later queries."""
        self.in_use.discard(connection)
        idle = self._idle.setdefault(connection.upstream, [])
        if len(idle) >= MAX_IDLE_CONNECTIONS:
            connection.close()
            return
        idle.append(connection)
        connection.wait_idle(self.loop.at(self.loop.now() + self._expire, lambda: self.drop(connection)))

    def drop(self, connection: UpstreamConnection) -> None:
        """Close an idle connection."""
        idle = self._idle.get(connection.upstream, [])
        if connection in idle:
            idle.remove(connection)
        connection.close()

    def _over_stream(self, upstream: Upstream, packet: bytes, deadline: float, report: ExchangeReport) -> None:
        idle = self._idle.get(upstream)
        proto = "tcp-tls" if upstream.transport == "tls" else "tcp"
        self.counter.connection(str(upstream), proto, reused=bool(idle))
        if not idle:
            UpstreamConnection(self, upstream).send(packet, deadline, report)
            return

        def retry_if_closed(outcome: ExchangeOutcome) -> None:
            """Report the outcome, or send once more on a new connection if the upstream had closed this one."""
            # That the upstream has closed an idle connection says nothing about its health.
            if outcome == UpstreamConnection.CLOSED:
                UpstreamConnection(self, upstream).send(packet, deadline, report)
            else:
                report(outcome)

        idle.pop().send(packet, deadline, retry_if_closed)


class _UpstreamSocket:
    """A socket to an upstream, with one query at a time."""

    def __init__(self, exchange: UpstreamExchange, upstream: Upstream) -> None:
        self.upstream = upstream
        self._exchange = exchange
        self._socket: socket.socket | None = None
        self._sent = b""
        self._deadline = 0.0
        self._report: ExchangeReport | None = None
        self._timer: EventTimer | None = None

    def close(self) -> None:
        """Close the socket, if it is open, without a report."""
        self._stop_timer()
        self._report = None
        if self._socket is not None:
            self._exchange.loop.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._exchange.in_use.discard(self)

    def _begin(self, packet: bytes, deadline: float, report: ExchangeReport) -> None:
        self._stop_timer()
        self._sent = packet
        self._deadline = deadline
        self._report = report
        self._exchange.in_use.add(self)
        self._timer = self._exchange.loop.at(deadline, lambda: self._finish("no response in time"))

    def _open(self, kind: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.upstream.address else socket.AF_INET
        self._socket = socket.socket(family, kind | socket.SOCK_NONBLOCK)
        return self._socket

    def _finish(self, outcome: ExchangeOutcome) -> None:
        report = self._report
        self.close()
        if report is not None:
            report(outcome)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _UdpQuery(_UpstreamSocket):
    """A query over UDP."""

    def send(self, packet: bytes, deadline: float, report: ExchangeReport) -> None:
        """Send the packet and report its response or the error of the socket.

        A timeout is reported at `deadline`, in seconds of the loop's clock.
        """
        self._begin(packet, deadline, report)
        try:
            sock = self._open(socket.SOCK_DGRAM)
            sock.connect((self.upstream.address, self.upstream.port))
            sock.send(packet)
        except OSError as error:
            self._finish(_reason(error))
            return
        self._exchange.loop.register(sock.fileno(), self._readable)

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                packet = self._socket.recv(65_535)
            except BlockingIOError:
                return
            except OSError as error:
                self._finish(_reason(error))
                return
            self._take(packet)

    def _take(self, packet: bytes) -> None:
        match = match_response(packet, self._sent)
        if match == "no":
            self._exchange.counter.drop("question")
            return
        if match == "bare":
            self._finish(NOT_UNDERSTOOD)
            return
        if match == "case":
            # Either forged, or from a server that does not preserve the case: ask over TCP.
            self._exchange.counter.drop("case")
            self._over_tcp()
            return
        try:
            response = parse_response(packet)
        except MalformedResponseError:
            self._exchange.counter.drop("malformed")
            return
        self._finish(response)

    def _over_tcp(self) -> None:
        report = self._report
        assert report is not None
        self.close()

        def finish(outcome: ExchangeOutcome) -> None:
            """Report the outcome over TCP; after a failure, use lower-case names for this upstream from now on."""
            if isinstance(outcome, str):
                # The upstream does not answer over TCP, so the next attempt is in lower case.
                self._exchange.use_lower_case(self.upstream)
            report(outcome)

        UpstreamConnection(self._exchange, self.upstream).send(self._sent, self._deadline, finish)


class UpstreamConnection(_UpstreamSocket):
    """A TCP or TLS connection to an upstream."""

    CLOSED = "the upstream closed the connection"

    def __init__(self, exchange: UpstreamExchange, upstream: Upstream) -> None:
        super().__init__(exchange, upstream)
        self._ready = False
        self._out = b""
        self._in = bytearray()

    def send(self, packet: bytes, deadline: float, report: ExchangeReport) -> None:
        """Send a query on a new or idle connection."""
        self._begin(packet, deadline, report)
        self._out = len(packet).to_bytes(2, "big") + packet
        self._in.clear()
        if self._socket is None:
            self._connect()
        else:
            self._proceed()

    def wait_idle(self, timer: EventTimer) -> None:
        """Wait for the next query; any data closes the connection, since no response is due."""
        self._timer = timer
        if self._socket is not None:
            self._exchange.loop.register(self._socket.fileno(), lambda: self._exchange.drop(self))

    def _connect(self) -> None:
        try:
            sock = self._open(socket.SOCK_STREAM)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            result = sock.connect_ex((self.upstream.address, self.upstream.port))
        except OSError as error:
            self._finish(_reason(error))
            return
        if result not in (0, errno.EINPROGRESS):
            self._finish(_reason(OSError(result, "")))
            return
        self._exchange.loop.register(sock.fileno(), None, self._connected)

    def _connected(self) -> None:
        assert self._socket is not None
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._finish(_reason(OSError(error, "")))
            return
        if self.upstream.transport == "tls":
            if self._exchange.tls is None:
                self._finish("TLS is not configured")
                return
            name = self._exchange.server_name or self.upstream.address
            self._exchange.loop.unregister(self._socket.fileno())
            try:
                self._socket = self._exchange.tls.wrap_socket(
                    self._socket, server_hostname=name, do_handshake_on_connect=False
                )
            except (OSError, ValueError) as failure:
                self._finish(_tls_reason(failure))
                return
        self._proceed()

    def _proceed(self) -> None:
        """Handshake, send, and receive until the socket would block."""
        sock = self._socket
        assert sock is not None
        try:
            if self.upstream.transport == "tls" and not self._ready:
                cast("ssl.SSLSocket", sock).do_handshake()
            self._ready = True
            while self._out:
                self._out = self._out[sock.send(self._out) :]
            while (received := sock.recv(65_536)) and self._socket is not None:
                self._in += received
                if self._take_response():
                    return
        except BlockingIOError:
            self._await_data(sock)
        except (ConnectionResetError, BrokenPipeError):
            self._finish(self.CLOSED)
        except OSError as error:
            if self.upstream.transport == "tls":
                self._interrupted_tls(sock, error)
            else:
                self._finish(_reason(error))
        else:
            self._finish(self.CLOSED)

    def _await_data(self, sock: socket.socket) -> None:
        self._exchange.loop.register(sock.fileno(), self._proceed, self._proceed if self._out and self._ready else None)

    def _interrupted_tls(self, sock: socket.socket, error: OSError) -> None:
        # Loaded with the exchange's context; workers without such upstreams do without it.
        import ssl

        if isinstance(error, ssl.SSLWantReadError):
            self._await_data(sock)
        elif isinstance(error, ssl.SSLWantWriteError):
            self._exchange.loop.register(sock.fileno(), None, self._proceed)
        elif isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            self._finish(self.CLOSED)
        else:
            self._finish(_tls_reason(error))

    def _take_response(self) -> bool:
        """Take the response if it is complete. Return True if the query is finished."""
        while len(self._in) >= 2:
            size = int.from_bytes(self._in[:2], "big")
            if len(self._in) < 2 + size:
                return False
            packet = bytes(self._in[2 : 2 + size])
            del self._in[: 2 + size]
            match = match_response(packet, self._sent)
            if match == "no":
                self._exchange.counter.drop("question")
                continue
            if match == "bare":
                self._finish(NOT_UNDERSTOOD)
                return True
            try:
                response = parse_response(packet)
            except MalformedResponseError as error:
                self._exchange.counter.drop("malformed")
                self._finish(f"the response {error}")
                return True
            if match == "case":
                self._exchange.use_lower_case(self.upstream)
            self._succeed(response)
            return True
        return False

    def _succeed(self, response: UpstreamResponse) -> None:
        report = self._report
        self._report = None
        self._stop_timer()
        self._exchange.keep_idle(self)
        if report is not None:
            report(response)


def _tls_reason(error: Exception) -> str:
    import ssl

    return f"TLS: {error.reason or error}" if isinstance(error, ssl.SSLError) else _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error.errno)).lower() + (
            f": {error.strerror}" if error.strerror else ""
        )
    return str(error)
