"""One question to one upstream, over UDP, TCP or TLS, in a worker's loop. Nothing here chooses or repeats.

What keeps forged answers out (RFC 5452): a socket of its own for every question over UDP, whose random port the kernel
draws, connected, so that only the upstream's address is heard; a random id; and the letters of the name in random case.
Whatever does not fit is dropped and counted, and the wait goes on.
"""

from __future__ import annotations

import errno
import secrets
import socket
import ssl
from collections.abc import Callable

from narthex.dns.corefile.settings import Upstream
from narthex.dns.interfaces import Loop, Timer
from narthex.dns.message import question as questions
from narthex.dns.message.question import Question
from narthex.dns.message.response import Answer, Malformed, read
from narthex.dns.plugins.forward import Via
from narthex.dns.server.meter import Meter

MOST_SOCKETS = 2048
"""Open at one time; a question beyond them fails at once."""
MOST_IDLE = 32
"""Connections kept for one upstream."""
FOLDING = 600.0
"""Seconds for which an upstream is asked in lower case after it has not kept the case of a question over TCP, where
nobody can forge answers without sitting in the middle."""

BARE = "the upstream did not understand the question"
Outcome = Answer | str
"""An answer, or why there is none."""
Report = Callable[[Outcome], None]


class Exchange:
    """Asks the upstreams of one `forward`."""

    def __init__(
        self, loop: Loop, meter: Meter, expire: float, tls: ssl.SSLContext | None, server_name: str = ""
    ) -> None:
        """`expire`: seconds that an idle connection is kept. `tls` for upstreams that are asked so."""
        self.loop = loop
        self.meter = meter
        self.tls = tls
        self.server_name = server_name
        self._expire = expire
        self._idle: dict[Upstream, list[Connection]] = {}
        self._folds: dict[Upstream, float] = {}
        self._open: set[_Datagram | Connection] = set()

    def ask(self, upstream: Upstream, via: Via, question: Question, deadline: float, report: Report) -> None:
        """Ask, and report once: an answer that belongs to the question, or by `deadline` that there is none. The report
        may come before this returns."""
        if len(self._open) >= MOST_SOCKETS:
            report(f"{MOST_SOCKETS} questions are on their way already")
            return
        name = question.name
        if self._folds.get(upstream, 0.0) < self.loop.now():
            self._folds.pop(upstream, None)
            name = questions.mixed(name, secrets.randbits(questions.letters(name) + 1))
        packet = question.packet(secrets.randbits(16), name)
        if via == "udp" and upstream.transport == "dns":
            self.meter.connection(str(upstream), "udp", reused=False)
            _Datagram(self, upstream, question, packet, deadline, report).start()
            return
        self._over_stream(upstream, packet, deadline, report)

    def close(self) -> None:
        """Give up all that is open. Nothing is reported any more."""
        for each in list(self._open):
            each.end()
        for waiting in self._idle.values():
            for connection in list(waiting):
                connection.end()
        self._idle.clear()

    def folds(self, upstream: Upstream) -> None:
        """This upstream does not keep a question's case."""
        self._folds[upstream] = self.loop.now() + FOLDING

    def opened(self, each: _Datagram | Connection) -> None:
        """It is in use."""
        self._open.add(each)

    def closed(self, each: _Datagram | Connection) -> None:
        """It is in use no longer."""
        self._open.discard(each)

    def rest(self, connection: Connection) -> None:
        """Keep a connection whose answer has come."""
        self._open.discard(connection)
        waiting = self._idle.setdefault(connection.upstream, [])
        if len(waiting) >= MOST_IDLE:
            connection.end()
            return
        waiting.append(connection)
        connection.idle(self.loop.at(self.loop.now() + self._expire, lambda: self.drop(connection)))

    def drop(self, connection: Connection) -> None:
        """Close a connection that rests."""
        waiting = self._idle.get(connection.upstream, [])
        if connection in waiting:
            waiting.remove(connection)
        connection.end()

    def _over_stream(self, upstream: Upstream, packet: bytes, deadline: float, report: Report) -> None:
        waiting = self._idle.get(upstream)
        proto = "tcp-tls" if upstream.transport == "tls" else "tcp"
        if not waiting:
            self.meter.connection(str(upstream), proto, reused=False)
            self._fresh(upstream, packet, deadline, report)
            return
        self.meter.connection(str(upstream), proto, reused=True)

        def again(outcome: Outcome) -> None:
            # What the upstream has closed meanwhile says nothing about how it is.
            if outcome == Connection.HUNG_UP:
                self._fresh(upstream, packet, deadline, report)
            else:
                report(outcome)

        connection = waiting.pop()
        connection.ask(packet, deadline, again)

    def _fresh(self, upstream: Upstream, packet: bytes, deadline: float, report: Report) -> None:
        Connection(self, upstream).ask(packet, deadline, report)


class _Datagram:
    """A question over UDP."""

    def __init__(
        self, exchange: Exchange, upstream: Upstream, question: Question, packet: bytes, deadline: float, report: Report
    ) -> None:
        self._exchange = exchange
        self._upstream = upstream
        self._question = question
        self._packet = packet
        self._deadline = deadline
        self._report = report
        self._socket: socket.socket | None = None
        self._timer: Timer | None = None

    def start(self) -> None:
        try:
            self._socket = _socket(self._upstream, socket.SOCK_DGRAM)
            self._socket.connect((self._upstream.address, self._upstream.port))
            self._socket.send(self._packet)
        except OSError as error:
            self._finish(_reason(error))
            return
        self._exchange.opened(self)
        self._exchange.loop.register(self._socket.fileno(), self._readable)
        self._timer = self._exchange.loop.at(self._deadline, lambda: self._finish("no answer in time"))

    def end(self) -> None:
        """Give up without a word."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._exchange.loop.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._exchange.closed(self)

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
        fits = questions.belongs(packet, self._packet)
        if fits == "no":
            self._exchange.meter.drop("question")
            return
        if fits == "bare":
            self._finish(BARE)
            return
        if fits == "case":
            # Forged, or from a server that does not keep the case: TCP tells which.
            self._exchange.meter.drop("case")
            self.end()
            self._over_tcp()
            return
        try:
            answer = read(packet)
        except Malformed:
            self._exchange.meter.drop("malformed")
            return
        self._finish(answer)

    def _over_tcp(self) -> None:
        def tell(outcome: Outcome) -> None:
            if isinstance(outcome, str):
                # Without TCP there is no other way to ask it; the next attempt is in lower case.
                self._exchange.folds(self._upstream)
            self._report(outcome)

        Connection(self._exchange, self._upstream).ask(self._packet, self._deadline, tell)

    def _finish(self, outcome: Outcome) -> None:
        self.end()
        self._report(outcome)


class Connection:
    """A connection to an upstream, one question at a time."""

    HUNG_UP = "the upstream closed the connection"

    def __init__(self, exchange: Exchange, upstream: Upstream) -> None:
        self.upstream = upstream
        self._exchange = exchange
        self._socket: socket.socket | None = None
        self._ready = False
        self._out = b""
        self._in = bytearray()
        self._sent = b""
        self._report: Report | None = None
        self._timer: Timer | None = None

    def ask(self, packet: bytes, deadline: float, report: Report) -> None:
        """Ask, on a new connection or one that rests."""
        self._stop_timer()
        self._sent = packet
        self._out = len(packet).to_bytes(2, "big") + packet
        self._in.clear()
        self._report = report
        self._exchange.opened(self)
        self._timer = self._exchange.loop.at(deadline, lambda: self._finish("no answer in time"))
        if self._socket is None:
            self._connect()
        else:
            self._work()

    def idle(self, timer: Timer) -> None:
        """Rest. What comes now is no answer to anything."""
        self._timer = timer
        if self._socket is not None:
            self._exchange.loop.register(self._socket.fileno(), lambda: self._exchange.drop(self))

    def end(self) -> None:
        """Close without a word."""
        self._stop_timer()
        self._report = None
        if self._socket is not None:
            self._exchange.loop.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._exchange.closed(self)

    def _connect(self) -> None:
        try:
            self._socket = _socket(self.upstream, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            result = self._socket.connect_ex((self.upstream.address, self.upstream.port))
        except OSError as error:
            self._finish(_reason(error))
            return
        if result not in (0, errno.EINPROGRESS):
            self._finish(_reason(OSError(result, "")))
            return
        self._exchange.loop.register(self._socket.fileno(), None, self._connected)

    def _connected(self) -> None:
        assert self._socket is not None
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._finish(_reason(OSError(error, "")))
            return
        if self.upstream.transport == "tls":
            if self._exchange.tls is None:
                self._finish("there are no TLS settings")
                return
            name = self._exchange.server_name or self.upstream.address
            self._exchange.loop.unregister(self._socket.fileno())
            try:
                self._socket = self._exchange.tls.wrap_socket(
                    self._socket, server_hostname=name, do_handshake_on_connect=False
                )
            except (OSError, ValueError) as failure:
                self._finish(_reason(failure))
                return
        self._work()

    def _work(self) -> None:
        """Go on as far as the socket lets us, and wait for what it wants."""
        sock = self._socket
        assert sock is not None
        try:
            if isinstance(sock, ssl.SSLSocket) and not self._ready:
                sock.do_handshake()
            self._ready = True
            while self._out:
                self._out = self._out[sock.send(self._out) :]
            while (received := sock.recv(65_536)) and self._socket is not None:
                self._in += received
                if self._whole():
                    return
        except (BlockingIOError, ssl.SSLWantReadError):
            self._exchange.loop.register(sock.fileno(), self._work, self._work if self._out and self._ready else None)
            return
        except ssl.SSLWantWriteError:
            self._exchange.loop.register(sock.fileno(), None, self._work)
            return
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self._finish(self.HUNG_UP)
            return
        except OSError as error:
            self._finish(_reason(error))
            return
        self._finish(self.HUNG_UP)

    def _whole(self) -> bool:
        """Take the answer if all of it is there. Whether the question is over."""
        while len(self._in) >= 2:
            size = int.from_bytes(self._in[:2], "big")
            if len(self._in) < 2 + size:
                return False
            packet = bytes(self._in[2 : 2 + size])
            del self._in[: 2 + size]
            fits = questions.belongs(packet, self._sent)
            if fits == "no":
                self._exchange.meter.drop("question")
                continue
            if fits == "bare":
                self._finish(BARE)
                return True
            try:
                answer = read(packet)
            except Malformed as error:
                self._exchange.meter.drop("malformed")
                self._finish(f"the answer {error}")
                return True
            if fits == "case":
                self._exchange.folds(self.upstream)
            self._rest(answer)
            return True
        return False

    def _rest(self, answer: Answer) -> None:
        report = self._report
        self._report = None
        self._stop_timer()
        self._exchange.rest(self)
        if report is not None:
            report(answer)

    def _finish(self, outcome: Outcome) -> None:
        report = self._report
        self.end()
        if report is not None:
            report(outcome)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _socket(upstream: Upstream, kind: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in upstream.address else socket.AF_INET
    made = socket.socket(family, kind)
    made.setblocking(False)
    return made


def _reason(error: Exception) -> str:
    """An error's words. Those of TLS say more than their number."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error.errno)).lower() + (
            f": {error.strerror}" if error.strerror else ""
        )
    return str(error)
