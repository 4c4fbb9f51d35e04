"""Load on a Service: open connections, a stream of new ones, and a record of all failures.

Sockets are created in the namespaces to which they belong, so that clients and endpoints can share one process.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from narthex.linux.namespaces import in_namespace
from narthex.model import family_of, join_port
from narthex.testing.kernel.client import ADDRESS_FAMILY

PATIENCE = 20.0
"""Seconds that a connection or an answer may take before it counts as failed."""
PAUSE = 0.004
"""Seconds between two new connections of a stream, as a rule."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 2))
"""Seconds after which an endpoint looks for a client whose end was lost on the way, and how often."""
_MOST_DATAGRAM = 65536
"""Bytes of a datagram that are read: all that UDP can carry."""
_TOTAL_RETRANS = 100
"""Offset of `tcpi_total_retrans` in linux/tcp.h's `struct tcp_info`."""


class EchoEndpoints:
    """Endpoints that one thread serves, so that no socket is closed while another thread reads it.

    TCP endpoints send their own `address:port` as a line, and echo what they receive. UDP endpoints answer with a fixed text.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._listeners: dict[str, socket.socket] = {}
        self._taken: dict[str, set[socket.socket]] = {}
        self._responders: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, name="answers", daemon=True)
        self._ended = False

    def __enter__(self) -> EchoEndpoints:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        for name in list(self._listeners):
            self.close(name)
        for each in self._responders:
            each.close()
        self._selector.close()

    def open(self, namespace: str, address: str, port: int) -> str:
        """Serve at an address, and return the name that clients receive."""
        name = join_port(address, port)
        with in_namespace(namespace):
            listener = socket.socket(ADDRESS_FAMILY[family_of(address)], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        listener.setblocking(False)
        with self._lock:
            self._listeners[name], self._taken[name] = listener, set()
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(name))
        return name

    def answer_datagrams(self, namespace: str | None, address: str, port: int, text: str) -> None:
        """Answer each datagram to an address with a text. Several namespaces may have the same address.

        `namespace` is None for the current one.
        """
        with in_namespace(namespace):
            sock = socket.socket(ADDRESS_FAMILY[family_of(address)], socket.SOCK_DGRAM)
        self._responders.append(sock)
        sock.bind((address, port))
        sock.setblocking(False)
        with self._lock:
            self._selector.register(sock, selectors.EVENT_READ, lambda: _answer(sock, text.encode()))

    def close(self, name: str) -> int:
        """Close the listener and all connections of an endpoint, and return the number of connections."""
        with self._lock:
            listener, taken = self._listeners.pop(name), self._taken.pop(name)
            for each in (listener, *taken):
                self._selector.unregister(each)
                each.close()
            return len(taken)

    def open_connections(self, name: str) -> int:
        """Return the number of open connections of an endpoint."""
        with self._lock:
            return len(self._taken[name])

    def _serve(self) -> None:
        while not self._ended:
            ready = self._selector.select(0.05)
            with self._lock:
                for key, _ in ready:
                    # It may have been closed since, by another thread or by what came before in this round; a closed
                    # socket has no number of its own, and its old one may be another's by now.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data()

    def _accept(self, name: str) -> None:
        with suppress(BlockingIOError):
            while True:
                taken, _ = self._listeners[name].accept()
                taken.setblocking(True)
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEP_ALIVE:
                    taken.setsockopt(socket.IPPROTO_TCP, option, value)
                self._taken[name].add(taken)
                self._selector.register(taken, selectors.EVENT_READ, lambda taken=taken: self._echo(name, taken))
                # A client that is gone already is noticed when its end is read.
                with suppress(ConnectionError):
                    taken.sendall(f"{name}\n".encode())

    def _echo(self, name: str, taken: socket.socket) -> None:
        try:
            data = taken.recv(4096)
            taken.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(taken)
            self._taken[name].discard(taken)
            taken.close()


def _answer(sock: socket.socket, text: bytes) -> None:
    # An error may be about an earlier answer whose client is gone; what waits is read in the next round. The sender is always
    # known: only a blocking read of a socket that was shut down returns without one.
    with suppress(OSError):
        _, sender = sock.recvfrom(_MOST_DATAGRAM)
        sock.sendto(text, sender)


class ClientRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A client and the frontend that it connects to."""

    label: str
    namespace: str
    source: str
    destination: str
    port: int


class LoadFailure(msgspec.Struct, frozen=True):
    """One failure. Times are seconds of `time.monotonic`."""

    began: float
    """When it began to connect, or when an open connection was last known to work."""
    ended: float
    what: str
    established: bool
    """The connection was open before; otherwise, it could not be made."""


class OpenConnection:
    """One open connection. Raises OSError if it cannot be made."""

    def __init__(self, way: ClientRoute, patience: float = PATIENCE) -> None:
        self.way = way
        with in_namespace(way.namespace):
            self._socket = socket.socket(ADDRESS_FAMILY[family_of(way.source)], socket.SOCK_STREAM)
        # A socket is closed when its file is, too.
        self._answers = self._socket.makefile("rb")
        try:
            self._socket.settimeout(patience)
            self._socket.bind((way.source, 0))
            self._socket.connect((way.destination, way.port))
            self.endpoint = self._answers.readline().decode().strip()
            if not self.endpoint:
                raise ConnectionError("closed before the first word")
            self.used = time.monotonic()
            """When it was last known to work."""
        except OSError:
            self.close()
            raise

    def exchange(self) -> None:
        """Send data and receive it back. Raises OSError."""
        said = b"still there?\n"
        self._socket.sendall(said)
        heard = self._answers.readline()
        if heard != said:
            raise ConnectionError("closed by the other side" if not heard else f"answered {heard!r}")
        self.used = time.monotonic()

    @property
    def resent(self) -> int:
        """Segments that this side had to send again."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(struct.unpack_from("=I", info, _TOTAL_RETRANS)[0])

    def close(self) -> None:
        """Close the connection with FIN."""
        self._answers.close()
        self._socket.close()


class Load:
    """Connects to a Service repeatedly along several routes, and records failures."""

    def __init__(self, ways: Sequence[ClientRoute]) -> None:
        self._ways = itertools.cycle(ways)
        self._lock = threading.RLock()
        self.held: list[OpenConnection] = []
        self.failures: list[LoadFailure] = []
        self.made = 0
        """New connections that were made, said a word, heard it back and ended."""
        self.resent = 0
        """Segments that these had to send again: a packet was lost on the way."""
        self.endpoints: Counter[str] = Counter()
        """Who answered them."""

    @property
    def tried(self) -> int:
        """Number of attempts that ended, well or not."""
        return self.made + len(self.failures)

    def hold(self, count: int) -> None:
        """Open connections and keep them open."""
        for _ in range(count):
            with self._lock, self._noting("opening"):
                self.held.append(OpenConnection(next(self._ways)))

    def exchange(self) -> None:
        """Use every open connection. Those that fail are closed and no longer kept."""
        for line in list(self.held):
            self._use(line)

    def leave(self, endpoint: str) -> None:
        """Close the connections to an endpoint, as clients do on request, and open others instead."""
        with self._lock:
            leaving = [line for line in self.held if line.endpoint == endpoint]
            self.held = [line for line in self.held if line.endpoint != endpoint]
            for line in leaving:
                self._use(line)
                line.close()
            self.hold(len(leaving))

    @contextmanager
    def streaming(self, pause: float = PAUSE) -> Iterator[Load]:
        """Open a new connection every `pause` seconds while the block runs, and use the open ones in between."""
        ended = threading.Event()
        thread = threading.Thread(target=self._stream, args=(ended, pause), name="load", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()

    def close(self) -> None:
        """Close all connections."""
        for line in self.held:
            line.close()
        self.held.clear()

    def _stream(self, ended: threading.Event, pause: float) -> None:
        for number in itertools.count():
            if ended.wait(pause):
                return
            with self._lock:
                self._call()
                if self.held:
                    self._use(self.held[number % len(self.held)])

    def _call(self) -> None:
        way = next(self._ways)
        with self._noting(f"new connection {way.label}"):
            line = OpenConnection(way)
            try:
                line.exchange()
                self.resent += line.resent
            finally:
                line.close()
            self.endpoints[line.endpoint] += 1
            self.made += 1

    def _use(self, line: OpenConnection) -> None:
        # One at a time: a buffered reader drops what it has read ahead when two threads want a line of it at once.
        with self._lock:
            try:
                line.exchange()
            except OSError as error:
                self._fail(f"open connection {line.way.label} to {line.endpoint}", error, line.used, established=True)
                line.close()
                self.held = [each for each in self.held if each is not line]

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except OSError as error:
            self._fail(what, error, began)

    def _fail(self, what: str, error: OSError, began: float, *, established: bool = False) -> None:
        text = f"{what}: {type(error).__name__}: {error}"
        self.failures.append(LoadFailure(began, time.monotonic(), text, established))


def until(condition: Callable[[], bool], what: str, patience: float = 60.0, also: Callable[[], str] = str) -> None:
    """Wait for a condition. Raises TimeoutError with `what` and the text of `also` if it does not hold in time."""
    ticks = threading.Event()
    for _ in range(int(patience / 0.01)):
        if condition():
            return
        ticks.wait(0.01)
    raise TimeoutError(f"{what} did not come within {patience:g} s\n{also()}")
