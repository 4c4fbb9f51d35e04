"""TCP through the relay: a listening socket, and new connections to an endpoint."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import Callable

from narthex.proxy.relay.choice import TIMEOUTS, Affinity, Place, Turns
from narthex.proxy.relay.handover import Handover, HandoverRefused
from narthex.proxy.relay.pipe import Pipes, RelayDirection
from narthex.proxy.relay.wire import RelayCounts

BACKLOG = 4096
PAUSE = 0.1
"""Seconds without accepting connections after no more files could be opened."""
ACCEPTS = 64
"""Maximum connections to accept before other sockets are served."""
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

HANDOVER_DELAYS = (0.0, 2.0, 8.0)
"""Seconds before each attempt to hand over a connection whose sides are busy."""

_SO_MARK = 36
_RESET = struct.pack("ii", 1, 0)
_KEEPALIVE_SECONDS = 15


def mark_as_own(sock: socket.socket, mark: int) -> None:
    """Set the packet mark by which rules recognize the relay's own connections; 0: none."""
    if mark:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MARK, mark)


def tune(sock: socket.socket) -> None:
    """Disable Nagle's algorithm, and enable keepalive so that connections to vanished peers end."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


class RelayShared:
    """State that all listeners of a relay share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, family: int, mark: int, now: Callable[[], float]) -> None:
        self.loop = loop
        self.family = family
        self.mark = mark
        self.now = now
        self.most_open = 1
        """TCP connections and UDP clients at once."""
        self.counts = RelayCounts()
        self.pipes = Pipes()
        self.handover = Handover(family)
        self.freed: list[Callable[[], object]] = []
        """To be called when a connection has ended: listeners that wait for that."""

    def bound(self, kind: socket.SocketKind, host: str, port: int, *options: tuple[int, int]) -> socket.socket:
        """Return a listening socket with these options (level and name) switched on. Raises OSError."""
        sock = socket.socket(self.family, kind)
        try:
            sock.setblocking(False)
            if self.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            for level, option in options:
                sock.setsockopt(level, option, 1)
            sock.bind((host, port))
            if kind is socket.SOCK_STREAM:
                sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock

    @property
    def full(self) -> bool:
        """True if another connection would exceed the available files."""
        return self.counts.open >= self.most_open

    def release(self) -> None:
        """Record the end of a connection, and wake listeners that wait for one."""
        self.counts.open -= 1
        waiting, self.freed = self.freed, []
        for each in waiting:
            each()


class RelayedConnection:
    """Two sockets and two directions. Each direction ends separately (half-close, unlike row 25.12)."""

    def __init__(
        self, shared: RelayShared, client: socket.socket, endpoint: socket.socket, gone: Callable[[], object]
    ) -> None:
        self._shared = shared
        self._client, self._endpoint = client, endpoint
        self._gone = gone
        self._left = 2
        self._handover: asyncio.Task[None] | None = None
        self._up = RelayDirection(
            shared.loop, client, endpoint, shared.pipes, lambda: self._ended(endpoint), self._broke, self._bulk
        )
        self._down = RelayDirection(
            shared.loop, endpoint, client, shared.pipes, lambda: self._ended(client), self._broke, self._bulk
        )

    def start(self) -> None:
        """Start to move bytes."""
        self._up.start()
        self._down.start()

    def abort(self) -> None:
        """Reset both sides."""
        self._stop()
        for sock in (self._client, self._endpoint):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._close()

    def _bulk(self) -> None:
        """Let the kernel forward the connection, if it can. Meanwhile and otherwise, the directions move the bytes."""
        if self._handover is None:
            self._handover = self._shared.loop.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        counts = self._shared.counts
        for delay in HANDOVER_DELAYS:
            await asyncio.sleep(delay)
            try:
                await self._shared.handover.take(self._client, self._endpoint, self._idle)
            except HandoverRefused as error:
                if error.again and delay != HANDOVER_DELAYS[-1]:
                    continue
                counts.kept[str(error)] = counts.kept.get(str(error), 0) + 1
            except OSError:
                self.abort()
            else:
                counts.handed_over += 1
                self._stop()
                self._close()
            return

    def _stop(self) -> None:
        self._up.stop()
        self._down.stop()

    def _idle(self) -> bool:
        if self._left != 2:
            raise HandoverRefused("a side has ended the connection")
        return self._up.idle and self._down.idle

    def _ended(self, sink: socket.socket) -> None:
        self._left -= 1
        if not self._left:
            self._close()
            return
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._broke(error)

    def _broke(self, error: OSError) -> None:  # noqa: ARG002 (either side's failure is the other's reset)
        self.abort()

    def _close(self) -> None:
        if self._handover is not None and self._handover is not asyncio.current_task(self._shared.loop):
            self._handover.cancel()
        self._client.close()
        self._endpoint.close()
        self._gone()


class TcpListener:
    """Accepts connections on one port. `host` is the address to bind, normally any."""

    def __init__(self, shared: RelayShared, host: str, port: int, turns: Turns) -> None:
        """Bind and listen. Raises OSError if the port is not available."""
        self._shared = shared
        self.turns = turns
        self.affinity: Affinity | None = None
        self._connections: set[RelayedConnection] = set()
        self._dialling: set[asyncio.Task[None]] = set()
        self._socket = shared.bound(socket.SOCK_STREAM, host, port, (socket.SOL_SOCKET, socket.SO_REUSEADDR))
        self.port: int = self._socket.getsockname()[1]
        self._open = True
        self._listen()

    def use(self, places: tuple[Place, ...]) -> None:
        """Connect new clients to these endpoints. Open connections continue (row 3.11)."""
        self.turns.use(places)

    def close(self) -> None:
        """Stop accepting connections. Open connections continue."""
        if self._open:
            self._open = False
            self._shared.loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def abort(self) -> None:
        """Close, and reset all connections."""
        self.close()
        for task in list(self._dialling):
            task.cancel()
        for connection in list(self._connections):
            connection.abort()

    def _listen(self) -> None:
        if self._open:
            self._shared.loop.add_reader(self._socket.fileno(), self._acceptable)

    def _rest(self) -> None:
        """Leave new clients in the kernel's queue for a while."""
        self._shared.loop.remove_reader(self._socket.fileno())

    def _acceptable(self) -> None:
        shared = self._shared
        for _ in range(ACCEPTS):
            if shared.full:
                shared.counts.short_of_files += 1
                shared.freed.append(self._listen)
                self._rest()
                return
            try:
                client, peer = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in SHORT:
                    # Network errors of the new connection are reported here, too (accept(2)).
                    continue
                shared.counts.short_of_files += 1
                self._rest()
                shared.loop.call_later(PAUSE, self._listen)
                return
            client.setblocking(False)
            shared.counts.connections += 1
            shared.counts.open += 1
            task = shared.loop.create_task(self._serve(client, peer[0].partition("%")[0]))
            self._dialling.add(task)
            task.add_done_callback(self._dialling.discard)

    async def _serve(self, client: socket.socket, who: str) -> None:
        try:
            endpoint = await self._reach(who)
            if endpoint is not None:
                tune(client)
                tune(endpoint)
        except (OSError, asyncio.CancelledError):
            endpoint = None
        if endpoint is None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            self._shared.counts.errors += 1
            self._shared.release()
            return

        def gone() -> None:
            """Forget the ended connection and release its place in the shared limit."""
            self._connections.discard(connection)
            self._shared.release()

        connection = RelayedConnection(self._shared, client, endpoint, gone)
        self._connections.add(connection)
        connection.start()

    async def _reach(self, who: str) -> socket.socket | None:
        """Return a connection to the first endpoint that accepts; None if none does.

        Endpoints that refuse are not tried again. Silent ones are, with growing timeouts, unless no other is left.
        """
        now = self._shared.now
        affinity = self.affinity
        first = affinity.remembered(who, sorted(self.turns.places), now()) if affinity is not None else None
        left = list(self.turns.candidates(now(), first))
        tried = set(left)
        for seconds in TIMEOUTS:
            silent = []
            for position, place in enumerate(left):
                if place not in self.turns.places:
                    continue
                try:
                    endpoint = await self._dial(place, seconds)
                except OSError as error:
                    self.turns.failed(place, now())
                    if affinity is not None:
                        affinity.forget(who, place)
                    if isinstance(error, TimeoutError):
                        silent.append(place)
                    if silent or position + 1 < len(left):
                        self._shared.counts.retries += 1
                    continue
                self.turns.reached(place)
                if affinity is not None:
                    affinity.touch(who, place, now())
                return endpoint
            # Who has joined meanwhile may be all that is left.
            left = silent + sorted(self.turns.places - tried)
            tried.update(left)
        return None

    async def _dial(self, place: Place, seconds: float) -> socket.socket:
        """Connect to an endpoint. Raises OSError; TimeoutError if there is no answer."""
        endpoint = await self._socket_for_endpoint()
        try:
            endpoint.setblocking(False)
            mark_as_own(endpoint, self._shared.mark)
            async with asyncio.timeout(seconds):
                await self._shared.loop.sock_connect(endpoint, place)
        except BaseException as error:
            # A loop that was held up finds the answer and the end of its patience at the same moment.
            if isinstance(error, TimeoutError) and _is_connected(endpoint):
                return endpoint
            endpoint.close()
            raise
        return endpoint

    async def _socket_for_endpoint(self) -> socket.socket:
        """Return a new socket; if no more files can be opened, wait until a connection ends."""
        while True:
            try:
                return socket.socket(self._shared.family, socket.SOCK_STREAM)
            except OSError as error:
                if error.errno not in SHORT:
                    raise
                self._shared.counts.short_of_files += 1
                await asyncio.sleep(PAUSE)
