"""The server in the lab's pods: it says which pod answered, and whom it saw asking.

One process serves every pod: a socket belongs for good to the network namespace it was made in, so the server enters
a pod's namespace only to open its listeners. It imports little and starts no thread by itself.

TCP answers HTTP/1.1 requests and any other text alike; UDP and SCTP answer each message. The body is one line:

    web-7d4b9-x2x4z on node-1, asked by 192.168.49.11:40312
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from collections.abc import Iterable

from narthex.host import netns

_IPPROTO_SCTP = 132
_LARGEST_REQUEST = 64 * 1024
_BACKLOG = 512
_HTTP_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"PATCH ", b"OPTIONS ")
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class EchoServer:
    """Listeners of many pods and one loop. `serve` belongs to one thread; `add` and `remove` may come from another."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._listeners: dict[str, list[socket.socket]] = {}
        self._doorbell, self._door = socket.socketpair()
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ, None)
        self._stopping = False

    def add(self, pod: str, node: str, namespace: str, ports: Iterable[tuple[str, int]], identity: str) -> None:
        """Listen for a pod on (`TCP`|`UDP`|`SCTP`, port) pairs, on all its addresses; returns when it listens.

        `identity` names the pod to `remove`. Raises OSError naming the port; then it listens on none.
        """
        opened: list[tuple[socket.socket, str]] = []
        try:
            with netns.entered(namespace):
                for protocol, port in ports:
                    opened.append((_listen(protocol, port), protocol))
        except OSError:
            for sock, _ in opened:
                sock.close()
            raise
        says = f"{pod} on {node}, asked by "
        self._listeners[identity] = [sock for sock, _ in opened]
        for sock, protocol in opened:
            self._selector.register(sock, selectors.EVENT_READ, _Listener(sock, protocol, says))

    def remove(self, identity: str) -> None:
        """Stop listening for a pod. Connections that are open stay until the client closes them."""
        for sock in self._listeners.pop(identity, []):
            self._selector.unregister(sock)
            sock.close()
        self._ring()

    def stop(self) -> None:
        """End `serve`. Safe from any thread."""
        self._stopping = True
        self._ring()

    def serve(self) -> None:
        """Answer until stopped."""
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._door.recv(64)
                else:
                    # A listener may have been closed by `remove` after select had found it ready.
                    with contextlib.suppress(OSError):
                        self._turn(key.data)

    def _ring(self) -> None:
        self._doorbell.send(b"!")

    def _turn(self, user: _Listener | _Conversation) -> None:
        if isinstance(user, _Conversation):
            if not user.turn():
                self._selector.unregister(user.sock)
                user.sock.close()
        elif user.protocol == "UDP":
            user.answer_datagrams()
        else:
            for sock, client in user.accept():
                self._selector.register(sock, selectors.EVENT_READ, _Conversation(sock, f"{user.says}{client}\n"))


class _Listener:
    """One open port of one pod."""

    def __init__(self, sock: socket.socket, protocol: str, says: str) -> None:
        self.sock = sock
        self.protocol = protocol
        self.says = says

    def accept(self) -> Iterable[tuple[socket.socket, str]]:
        """Connections that wait, with their clients' addresses."""
        while True:
            try:
                sock, peer = self.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    return
                raise
            sock.setblocking(False)
            yield sock, _printed(peer)

    def answer_datagrams(self) -> None:
        """One answer to each datagram that waits."""
        while True:
            try:
                _, peer = self.sock.recvfrom(_LARGEST_REQUEST)
                self.sock.sendto(f"{self.says}{_printed(peer)}\n".encode(), peer)
            except BlockingIOError:
                return


class _Conversation:
    """One TCP or SCTP connection."""

    def __init__(self, sock: socket.socket, says: str) -> None:
        self.sock = sock
        self._body = says.encode()
        self._got = b""

    def turn(self) -> bool:
        """Read and answer what is there; False when the conversation is over."""
        try:
            data = self.sock.recv(_LARGEST_REQUEST)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._got += data
        if not data or len(self._got) > _LARGEST_REQUEST:
            return False
        if not _may_be_http(self._got):
            self._got = b""
            return self._send(self._body)
        return self._answer_requests()

    def _answer_requests(self) -> bool:
        while b"\r\n\r\n" in self._got:
            head, _, rest = self._got.partition(b"\r\n\r\n")
            length = _content_length(head)
            if len(rest) < length:
                break
            self._got = rest[length:]
            lasting = b"HTTP/1.1" in head.split(b"\r\n", 1)[0] and b"connection: close" not in head.lower()
            answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n%s\r\n" % (
                len(self._body),
                b"" if lasting else b"Connection: close\r\n",
            )
            if not self._send(answer + (b"" if head.startswith(b"HEAD ") else self._body)) or not lasting:
                return False
        return True

    def _send(self, data: bytes) -> bool:
        try:
            # An answer is far smaller than a socket's buffer; a client that never reads loses the connection.
            return self.sock.send(data) == len(data)
        except OSError:
            return False


def _listen(protocol: str, port: int) -> socket.socket:
    """A listening socket for both families, or for IPv4 alone on a kernel without IPv6."""
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
    """`10.0.0.1:4711` or `[fd00::1]:4711`; IPv4 clients of a socket for both families show as IPv4."""
    host = peer[0].removeprefix("::ffff:")
    return f"[{host}]:{peer[1]}" if ":" in host else f"{host}:{peer[1]}"


def _may_be_http(data: bytes) -> bool:
    return any(data.startswith(method[: len(data)]) for method in _HTTP_METHODS)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return 0
