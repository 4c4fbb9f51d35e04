"""The HTTP that a node proxy speaks: one thread with an asyncio loop, one reader of requests, for all its ports.

It does no more than such ports need: one request per connection, answered from memory. A web framework costs 0.17 s of
start-up here, more than all the rest of a first sync (ADR 0003).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from narthex.runtime.logs import LOGGER

if TYPE_CHECKING:
    import asyncio

_REQUEST_SECONDS = 5.0
_REQUEST_BYTES = 16384
_BACKLOG = 128
_REST_SECONDS = 1.0
"""Pause after a connection that could not be accepted, because files have run out."""
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Request(NamedTuple):
    """The first line of a request. Both are the client's words, checked for nothing."""

    method: str
    path: str
    """Without what follows a question mark."""


class Reply(NamedTuple):
    """One answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()
    """Besides those that every answer has."""


class Slow(NamedTuple):
    """An answer that takes a while to make."""

    make: Callable[[], Reply]
    """Called in a thread of its own, so that other answers need not wait for it."""


Answer = Callable[[Request], Reply | Slow]
"""Called in the server's thread; must not block."""


class Seats:
    """Connections that a group of ports may have at one time. More are closed at once: these ports face the network of
    the node, and a crowd at one group must not shut out the other."""

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self.taken = 0


class _Listener(NamedTuple):
    """One open port."""

    sock: socket.socket
    answer: Answer
    seats: Seats


def listening(address: str, port: int, *, both_families: bool = False) -> socket.socket:
    """A socket that listens on TCP, in the network namespace of the calling thread. Raises OSError.

    `both_families` lets an IPv6 address take IPv4 too, which only `::` can.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both_families)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class HttpServer:
    """Answers at sockets that come and go. Its methods may be called from any thread; the first `open` or `later`
    starts the server's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: list[Callable[[], object]] = []
        """What to do as soon as there is a loop."""
        self._ended: asyncio.Event | None = None
        self._open_here: set[socket.socket] = set()
        self._conversations: set[asyncio.Task[None]] = set()
        """Both belong to the loop."""

    def open(self, sock: socket.socket, answer: Answer, seats: Seats) -> None:
        """Answer requests at a listening socket, which is the server's from now on."""
        self._do(lambda: self._open(_Listener(sock, answer, seats)))

    def close(self, sock: socket.socket) -> None:
        """Stop listening; returns when the port is free. Not to be called in an answer or a `later`."""
        done = threading.Event()
        self._do(lambda: self._close(sock))
        self._do(done.set)
        done.wait()

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Call something in the server's thread, unless the server has stopped by then."""

        def wait() -> None:
            assert self._loop is not None
            self._loop.call_later(seconds, action)

        self._do(wait)

    def stop(self) -> None:
        """Close everything and wait for the thread. Nothing can be opened afterwards."""
        if self._thread is None:
            return
        self._do(self._end)
        self._thread.join()

    def _do(self, task: Callable[[], object]) -> None:
        with self._lock:
            if self._loop is None:
                self._early.append(task)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="http", daemon=True)
                    self._thread.start()
                return
        self._loop.call_soon_threadsafe(task)

    def _run(self) -> None:
        # Loaded here: the first sync need not wait for it.
        import asyncio

        asyncio.run(self._serve())

    async def _serve(self) -> None:
        import asyncio

        self._ended = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
        for task in self._early:
            task()
        await self._ended.wait()
        for sock in tuple(self._open_here):
            self._close(sock)

    def _end(self) -> None:
        assert self._ended is not None
        self._ended.set()

    def _open(self, listener: _Listener) -> None:
        self._open_here.add(listener.sock)
        self._watch(listener)

    def _watch(self, listener: _Listener) -> None:
        # asyncio's own servers leave a connection hanging that is accepted while they close (CPython 3.11).
        if listener.sock in self._open_here:
            assert self._loop is not None
            self._loop.add_reader(listener.sock, self._accept, listener)

    def _close(self, sock: socket.socket) -> None:
        assert self._loop is not None
        self._open_here.discard(sock)
        self._loop.remove_reader(sock)
        sock.close()

    def _accept(self, listener: _Listener) -> None:
        assert self._loop is not None
        try:
            client, _ = listener.sock.accept()
        except (BlockingIOError, ConnectionError):
            # The client has left already.
            return
        except OSError as error:
            LOGGER.error("a connection cannot be accepted: %s; the next try is in %g s", error.strerror, _REST_SECONDS)
            self._loop.remove_reader(listener.sock)
            self._loop.call_later(_REST_SECONDS, self._watch, listener)
            return
        if listener.seats.taken >= listener.seats.limit:
            client.close()
            return
        client.setblocking(False)
        listener.seats.taken += 1
        conversation = self._loop.create_task(_converse(self._loop, client, listener))
        self._conversations.add(conversation)
        conversation.add_done_callback(self._conversations.discard)


async def _converse(loop: asyncio.AbstractEventLoop, client: socket.socket, listener: _Listener) -> None:
    """Read one request, answer it."""
    import asyncio

    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            got = b""
            while b"\r\n\r\n" not in got:
                data = await loop.sock_recv(client, _REQUEST_BYTES)
                got += data
                if not data or len(got) > _REQUEST_BYTES:
                    # A client that asks for nothing gets nothing.
                    return
            await loop.sock_sendall(client, await _response(listener.answer, got))
            client.shutdown(socket.SHUT_WR)
            # To close while a request's body is on its way would take the answer from the client.
            while len(got) <= _REQUEST_BYTES and (data := await loop.sock_recv(client, _REQUEST_BYTES)):
                got += data
    except OSError:
        # It left, or took too long.
        pass
    finally:
        listener.seats.taken -= 1
        client.close()


async def _response(answer: Answer, head: bytes) -> bytes:
    """All that is sent back for a request's head."""
    import asyncio

    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(words) == 3:
        request = Request(words[0], words[1].split("?")[0])
        try:
            found = answer(request)
            reply = await asyncio.to_thread(found.make) if isinstance(found, Slow) else found
        except Exception as error:
            LOGGER.error("answering %r: %s: %s", request.path, type(error).__name__, error)
            reply = Reply(500, b"internal error; the log says more\n")
    else:
        request = Request("", "")
        reply = Reply(400, b"not a request\n")
    lines = (
        f"HTTP/1.1 {reply.status} {_REASONS[reply.status]}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in reply.headers),
        "Connection: close",
    )
    body = b"" if request.method == "HEAD" else reply.body
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
