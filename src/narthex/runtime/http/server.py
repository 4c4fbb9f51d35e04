"""The HTTP server: one thread with an asyncio loop for all ports of a program, and the table of open connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from narthex.runtime.connection_slots import (
    ACCEPT_RETRY_SECONDS,
    EVERY_PORT,
    EVICTED_SECONDS,
    FAILURE_LINES,
    LOG_SECONDS,
    MAX_CONNECTIONS,
    ConnectionSlots,
    SlotLimits,
    max_connections,
)
from narthex.runtime.http import Responder
from narthex.runtime.logs import LOGGER, LimitedLog

if TYPE_CHECKING:
    import asyncio
    import ssl

    from narthex.runtime.http.connection import HttpConnection

_BACKLOG = 1024
"""Connections that wait to be accepted. To accept as many takes a fraction of a probe's timeout of one second, and without room
here a client tries again only after that second."""


class _Listener(NamedTuple):
    sock: socket.socket
    limits: SlotLimits
    connect: Callable[[asyncio.StreamReader, asyncio.StreamWriter], HttpConnection]
    handle: Callable[[HttpConnection], Awaitable[None]]
    tls: ssl.SSLContext | None


def listen_tcp(address: str, port: int, *, both_families: bool = False) -> socket.socket:
    """Return a socket that listens on TCP, in the network namespace of the calling thread. Raises OSError.

    `both_families` makes `::` accept IPv4 as well.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both_families)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


class HttpServer:
    """A server whose ports open and close while it runs.

    Its methods may be called from any thread, except where they say otherwise. The first port or timer starts its thread.
    """

    def __init__(self, name: str = "http", connections: int = MAX_CONNECTIONS) -> None:
        """Prepare a server. `name` is its thread's; `connections` is the limit of all its ports (see `max_connections`)."""
        self._name = name
        self._most = connections
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: list[Callable[[], object]] = []
        """Calls that wait for the loop."""
        self._ended: asyncio.Event | None = None
        self._listening: set[socket.socket] = set()
        self._connections: dict[asyncio.Task[None], HttpConnection | None] = {}
        """Open connections by the task that serves each; None during its TLS handshake. Both belong to the loop."""
        self._slots: ConnectionSlots[asyncio.Task[None]] = ConnectionSlots()
        self._evictions = LimitedLog(LOGGER.warning, self.later, 1, LOG_SECONDS)
        self._failures = LimitedLog(LOGGER.error, self.later, FAILURE_LINES, LOG_SECONDS)

    def open(
        self,
        sock: socket.socket,
        responder: Responder,
        seconds: float = 0.0,
        limits: SlotLimits = SlotLimits(),  # noqa: B008 - immutable
    ) -> None:
        """Answer one request per connection at a listening socket, which the server owns from now on.

        `seconds` is the time for one request and its response (0: as on a status port). `limits` are of this port alone.
        """

        async def handle(connection: HttpConnection) -> None:
            """Answer one request and close the connection."""
            from narthex.runtime.http.connection import answer_once

            await answer_once(connection, responder, seconds)

        def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpConnection:
            """Return a connection for one request; the import waits until a client connects."""
            from narthex.runtime.http.connection import ONE_REQUEST, HttpConnection

            return HttpConnection(reader, writer, ONE_REQUEST)

        self.serve(sock, connect, handle, limits)

    def serve(
        self,
        sock: socket.socket,
        connect: Callable[[asyncio.StreamReader, asyncio.StreamWriter], HttpConnection],
        handle: Callable[[HttpConnection], Awaitable[None]],
        limits: SlotLimits = SlotLimits(),  # noqa: B008 - immutable
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Serve connections at a listening socket, which the server owns from now on.

        `connect` makes the object for each connection, which `handle` then serves. The connection is reset when `handle`
        returns without having closed it. When a limit is reached, the connection that has been silent longest is closed.
        """
        sock.setblocking(False)
        self.call(lambda: self._open(_Listener(sock, limits, connect, handle, tls)))

    def close(self, sock: socket.socket) -> None:
        """Stop listening and return once the port is free. Open connections stay. Not to be called in the server's thread."""
        done = threading.Event()
        self.call(lambda: self._close(sock))
        self.call(done.set)
        done.wait()

    def call(self, action: Callable[[], object]) -> None:
        """Call something in the server's thread."""
        with self._lock:
            if self._loop is None:
                self._early.append(action)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                return
        self._loop.call_soon_threadsafe(action)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Call something in the server's thread after a delay, unless the server has stopped by then."""

        def wait() -> None:
            """Start the timer in the loop's thread."""
            assert self._loop is not None
            self._loop.call_later(seconds, action)

        self.call(wait)

    @property
    def connections(self) -> tuple[HttpConnection, ...]:
        """Established connections."""
        return tuple(each for each in tuple(self._connections.values()) if each is not None)

    def reset(self) -> None:
        """Close all ports, reset all connections, and wait for both. Ports may be opened again afterwards."""
        if self._thread is None:
            return
        done = threading.Event()

        def start() -> None:
            """Reset the connections in the loop's thread, and let the caller continue then."""
            assert self._loop is not None
            task = self._loop.create_task(self._reset())
            task.add_done_callback(lambda _: done.set())

        self.call(start)
        done.wait()

    def stop(self) -> None:
        """Close everything and wait for the thread. Nothing can be opened afterwards."""
        if self._thread is None:
            return
        self.call(self._end)
        self._thread.join()

    def _run(self) -> None:
        # A program's first sync need not wait for this import.
        import asyncio

        asyncio.run(self._main())

    async def _main(self) -> None:
        import asyncio

        self._ended = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
        for action in self._early:
            action()
        await self._ended.wait()
        await self._reset()

    async def _reset(self) -> None:
        import asyncio

        for sock in tuple(self._listening):
            self._close(sock)
        while self._connections:
            for task in self._connections:
                task.cancel()
            await asyncio.wait(tuple(self._connections))

    def _end(self) -> None:
        assert self._ended is not None
        self._ended.set()

    def _open(self, listener: _Listener) -> None:
        self._listening.add(listener.sock)
        self._accept_from_now(listener)

    def _accept_from_now(self, listener: _Listener) -> None:
        # asyncio's own servers lose a connection that is accepted while they close (CPython 3.11).
        if listener.sock in self._listening:
            assert self._loop is not None
            self._loop.add_reader(listener.sock, self._accept, listener)

    def _close(self, sock: socket.socket) -> None:
        assert self._loop is not None
        self._listening.discard(sock)
        self._loop.remove_reader(sock)
        sock.close()

    def _accept(self, listener: _Listener) -> None:
        assert self._loop is not None
        try:
            client, address = listener.sock.accept()
        except (BlockingIOError, ConnectionError):
            # The client has left already.
            return
        except OSError as error:
            self._pause(listener, error)
            return

        def forget(task: asyncio.Task[None]) -> None:
            """Release the slot of an ended connection and close its socket."""
            del self._connections[task]
            self._slots.remove(task)
            client.close()

        client.setblocking(False)
        task = self._loop.create_task(self._converse(client, listener))
        self._connections[task] = None
        task.add_done_callback(forget)
        self._take_slot(task, listener, str(address[0]))

    def _take_slot(self, task: asyncio.Task[None], listener: _Listener, client: str) -> None:
        port, (in_all, of_client) = listener.sock, listener.limits
        limits = {(port, client): of_client, port: in_all, EVERY_PORT: max_connections(self._most)}
        for evicted in self._slots.add(task, limits):
            evicted.cancel()
            self._evictions.write(
                f"port {listener.sock.getsockname()[1]} has too many connections, the last one from {client} "
                f"(limits: {', '.join(map(str, limits.values()))} of one client, of the port, and of all ports); "
                "those that were silent longest are closed"
            )

    def _pause(self, listener: _Listener, error: OSError) -> None:
        """Stop accepting until a file descriptor may be free: soon if a silent connection can be closed."""
        assert self._loop is not None
        evicted = self._slots.evict(EVERY_PORT)
        if evicted is not None:
            evicted.cancel()
        seconds = ACCEPT_RETRY_SECONDS if evicted is None else EVICTED_SECONDS
        self._failures.write(f"a connection cannot be accepted: {error.strerror}; the next try is in {seconds:g} s")
        self._loop.remove_reader(listener.sock)
        self._loop.call_later(seconds, self._accept_from_now, listener)

    async def _converse(self, client: socket.socket, listener: _Listener) -> None:
        import asyncio

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        connection: HttpConnection | None = None
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, client, ssl=listener.tls)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            connection = self._connections[task] = listener.connect(reader, writer)
            connection.on_waiting = lambda waits: (self._slots.note_silent if waits else self._slots.note_working)(task)
            await listener.handle(connection)
        except OSError:
            # The client left, took too long, or failed the TLS handshake.
            pass
        except Exception as error:
            LOGGER.error("serving a connection: %s: %s", type(error).__name__, error)
        finally:
            if connection is not None:
                connection.reset()
