"""The echo server of the lab's pods: each response names the pod and the client.

One process serves all pods: a socket stays in the network namespace in which it was created, so the server enters a pod's namespace
only to open its listeners. It starts no thread.

TCP ports answer HTTP/1.1 requests and any other text; UDP and SCTP ports answer each message. The body is one line:

    web-7d4b9-x2x4z on node-1, asked by 192.168.49.11:40312
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from narthex.linux.namespaces import in_namespace
from narthex.model import join_port
from narthex.runtime.http.connection import HttpLimits, MalformedRequest, RequestFraming

_IPPROTO_SCTP = 132
_MAX_REQUEST = 64 * 1024
_LIMITS = HttpLimits(head=_MAX_REQUEST, body=_MAX_REQUEST)
_BACKLOG = 512
_REMEMBERED = 200
"""Responses that a listener remembers."""
_HTTP_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"PATCH ", b"OPTIONS ")


class EchoServer:
    """The listeners of many pods and their loop. One thread calls `serve`, another one the other methods."""

    def __init__(self) -> None:
        """Create a server without listeners."""
        self._selector = selectors.DefaultSelector()
        self._pods: dict[str, list[_Listener]] = {}
        self._tasks: deque[Callable[[], None]] = deque()
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ, None)
        self._stopping = False
        self._wake_lock = threading.Lock()
        """Held while the loop is woken or the socket pair is closed, which different threads may do."""

    def add(self, identity: str, prefix: str, namespace: str | None, ports: Iterable[tuple[str, int]]) -> None:
        """Listen on (`TCP`|`UDP`|`SCTP`, port) pairs on all addresses of a namespace (None: this one).

        `identity` is for `remove`; `prefix` begins each response ("web-x2x4z on node-1"). If a port cannot be opened,
        raises OSError that names it, and listens on none.
        """
        listeners: list[_Listener] = []
        try:
            with in_namespace(namespace):
                for protocol, port in ports:
                    listeners.append(_Listener(_listen(protocol, port), protocol, f"{prefix}, asked by "))
        except OSError:
            for listener in listeners:
                listener.sock.close()
            raise
        self._pods[identity] = listeners
        self._do(lambda: self._open(listeners))

    def drain(self, identity: str) -> None:
        """From now on close each connection after its next response. All requests are still answered."""
        for listener in self._pods.get(identity, []):
            listener.draining = True

    def has_connections(self, identity: str) -> bool:
        """Return True if a client is connected."""
        return any(listener.connections for listener in self._pods.get(identity, []))

    def last_used(self, identity: str) -> float:
        """Return the time of the last connection or request by `time.monotonic`, 0.0 if there was none."""
        return max((listener.used_at for listener in self._pods.get(identity, [])), default=0.0)

    def responses(self, identity: str) -> list[tuple[float, str]]:
        """Return time (seconds since 1970) and client of the last responses, oldest first."""
        return sorted(each for listener in self._pods.get(identity, []) for each in tuple(listener.responses))

    def remove(self, identity: str) -> None:
        """Stop listening, answer what has arrived, and close all connections. `serve` must be running."""
        listeners = self._pods.pop(identity, [])
        done = threading.Event()
        self._do(lambda: self._close(listeners, done))
        done.wait()

    def stop(self) -> None:
        """End `serve`. Thread-safe."""
        self._stopping = True
        self._do(lambda: None)

    def serve(self) -> None:
        """Serve until `stop`, then close everything."""
        while not self._stopping:
            ready = self._selector.select()
            for key, _ in ready:
                if key.data is not None:
                    self._turn(key.data)
            # Tasks run last, because they may close sockets that are ready in this round.
            with contextlib.suppress(BlockingIOError):
                self._wakened.recv(64)
            while self._tasks:
                self._tasks.popleft()()

        for key in tuple(self._selector.get_map().values()):
            if isinstance(key.data, (_Listener, _Connection)):
                key.data.sock.close()
        self._selector.close()
        with self._wake_lock:
            self._wakened.close()
            self._waker.close()

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        with self._wake_lock:
            if self._waker.fileno() >= 0:
                self._waker.send(b"!")

    def _open(self, listeners: list[_Listener]) -> None:
        for listener in listeners:
            self._selector.register(listener.sock, selectors.EVENT_READ, listener)

    def _close(self, listeners: list[_Listener], done: threading.Event) -> None:
        for listener in listeners:
            listener.draining = True
            # Closing the listener would reset connections that wait to be accepted.
            self._turn(listener)
            for connection in tuple(listener.connections):
                self._turn(connection)
            for connection in tuple(listener.connections):
                self._end(connection)
            self._selector.unregister(listener.sock)
            listener.sock.close()
        done.set()

    def _end(self, connection: _Connection) -> None:
        connection.listener.connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _turn(self, user: _Listener | _Connection) -> None:
        if isinstance(user, _Connection):
            if not user.turn():
                self._end(user)
        elif user.protocol == "UDP":
            user.answer_datagrams()
        else:
            for connection in user.accept():
                self._selector.register(connection.sock, selectors.EVENT_READ, connection)


class _Listener:
    """An open port of a pod."""

    def __init__(self, sock: socket.socket, protocol: str, prefix: str) -> None:
        self.sock = sock
        self.protocol = protocol
        self.connections: set[_Connection] = set()
        self.draining = False
        self.used_at = 0.0
        self.responses: deque[tuple[float, str]] = deque(maxlen=_REMEMBERED)
        self._prefix = prefix

    def note(self, client: str) -> None:
        """Remember an answered request for the log of the container."""
        self.used_at = time.monotonic()
        self.responses.append((time.time(), f"{self.protocol} request from {client}"))

    def accept(self) -> Iterator[_Connection]:
        """Accept all waiting connections and yield each."""
        while True:
            try:
                sock, peer = self.sock.accept()
            except OSError:
                # None waits, the client has left, or file descriptors have run out: try again in the next round.
                return
            sock.setblocking(False)
            if self.protocol == "TCP":
                # Otherwise, responses to requests that follow each other closely wait for the client's delayed ACK (40 ms).
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.used_at = time.monotonic()
            connection = _Connection(self, sock, self._prefix, _printed(peer))
            self.connections.add(connection)
            yield connection

    def answer_datagrams(self) -> None:
        """Answer all waiting datagrams."""
        while True:
            try:
                _, peer = self.sock.recvfrom(_MAX_REQUEST)
                client = _printed(peer)
                self.sock.sendto(f"{self._prefix}{client}\n".encode(), peer)
                self.note(client)
            except OSError:
                # No datagram waits, or the kernel reports that an earlier response could not be delivered.
                return


class _Connection:
    """A TCP or SCTP connection."""

    def __init__(self, listener: _Listener, sock: socket.socket, prefix: str, client: str) -> None:
        self.listener = listener
        self.sock = sock
        self._client = client
        self._body = f"{prefix}{client}\n".encode()
        self._framing = RequestFraming(_LIMITS)
        self._received = b""
        """Bytes that may become HTTP's, before the framing gets them."""

    def turn(self) -> bool:
        """Read and answer what has arrived. Return False once the connection is over."""
        try:
            data = self.sock.recv(_MAX_REQUEST)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        if self._framing.idle:
            # The first bytes after a response show whether the client speaks HTTP.
            data = self._received = self._received + data
            if len(data) > _MAX_REQUEST:
                return False
            if not _may_be_http(data):
                self._received = b""
                return self._send(self._body)
            if b"\r\n\r\n" not in data:
                return True
            self._received = b""
        self._framing.feed(data)
        return self._answer_requests()

    def _answer_requests(self) -> bool:
        try:
            while self._framing.next_request() is not None:
                fields = [("Content-Type", "text/plain; charset=utf-8")]
                if self.listener.draining:
                    fields.append(("Connection", "close"))
                if not self._send(self._framing.response(200, self._body, fields)) or not self._framing.persistent:
                    return False
        except MalformedRequest:
            return False
        return True

    def _send(self, data: bytes) -> bool:
        self.listener.note(self._client)
        try:
            # A response is far smaller than a socket's buffer; a client that never reads is disconnected.
            return self.sock.send(data) == len(data)
        except OSError:
            return False


def _listen(protocol: str, port: int) -> socket.socket:
    """Return a listening socket for both families, or for IPv4 on a kernel without IPv6."""
    kind = socket.SOCK_DGRAM if protocol == "UDP" else socket.SOCK_STREAM
    number = _IPPROTO_SCTP if protocol == "SCTP" else 0
    try:
        try:
            sock = socket.socket(socket.AF_INET6, kind, number)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            where = "::"
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            sock = socket.socket(socket.AF_INET, kind, number)
            where = "0.0.0.0"
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((where, port))
            sock.setblocking(False)
            if protocol != "UDP":
                sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {protocol} port {port}: {error.strerror}") from None
    return sock


def _printed(peer: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return `10.0.0.1:4711` or `[fd00::1]:4711`. IPv4 clients of a dual-stack socket are shown as IPv4."""
    return join_port(peer[0].removeprefix("::ffff:"), peer[1])


def _may_be_http(data: bytes) -> bool:
    return any(data.startswith(method[: len(data)]) for method in _HTTP_METHODS)
