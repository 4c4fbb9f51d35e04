"""The API's server: HTTP/1.1 on as many sockets as there are, in one thread of its own.

    server = ApiServer(Api(registry), lock, token="...")
    server.start()
    server.listen(sock, tls)        # again for each socket, which may have been made in another network namespace

Whoever changes the registry by itself holds the lock while it does, and calls `wake` afterwards.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from narthex.lab.api.api import Api, refusal
from narthex.lab.api.errors import ApiFault
from narthex.lab.api.requests import Exec, Logs, Request, Stream, Whole
from narthex.lab.server.connection import Connection, Malformed
from narthex.lab.server.pods import Pods
from narthex.lab.server.remote_command import serve_exec
from narthex.lab.server.streams import send_logs

T = TypeVar("T")

_LEAST_GZIP = 128 * 1024
"""Shorter answers are sent as they are, as upstream does."""
_HEAD_LIMIT = 1024 * 1024
_UNAUTHORIZED = ApiFault(401, "Unauthorized", "Unauthorized")
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class ApiServer:
    """A server. `start` and `stop` may take turns."""

    def __init__(
        self,
        api: Api,
        lock: threading.RLock,
        *,
        token: str = "",
        pods: Pods | None = None,
        bookmark_seconds: float = 60.0,
        changed: Callable[[], None] = lambda: None,
        gather: float = 0.0,
    ) -> None:
        """With a `token`, requests without it are answered 401. `changed` is called, without the lock, after a write. Watchers
        are told `gather` seconds after `wake`, of all that has come by then."""
        self.api = api
        self.lock = lock
        self.token = token
        self._pods = pods
        self._bookmark_seconds = bookmark_seconds
        self._changed = changed
        self._gather = gather
        self._waking = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api", daemon=True)
        self._servers: dict[int, asyncio.Server] = {}
        self._connections: set[Connection] = set()
        self._serving = False

    def start(self) -> None:
        """Begin to serve; nobody is listened to before `listen`."""
        if not self._thread.is_alive():
            self._thread.start()
        self._serving = True

    def listen(self, where: socket.socket | tuple[str, int], tls: ssl.SSLContext | None = None) -> int:
        """Serve a socket that is bound, or an address and port (0: any) of the network namespace in which `start` was
        called; returns the port."""
        return self._run(self._listen(where, tls))

    def silence(self, port: int) -> None:
        """Listen no more on a port; connections that are open stay."""
        self._run(self._close(port))

    def wake(self) -> None:
        """Tell the watchers that something has changed."""
        if self._loop.is_closed() or self._waking:
            return
        self._waking = self._gather > 0
        self._loop.call_soon_threadsafe(self._wake_later)

    def drop(self) -> None:
        """Reset all connections."""
        self._loop.call_soon_threadsafe(self._reset)

    def stop(self) -> None:
        """Be gone: connections are reset, and nobody listens."""
        self._serving = False
        self._run(self._end())

    def close(self) -> None:
        """After `stop`: end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection:
        """A new connection. Others may make another sort of it."""
        return Connection(reader, writer)

    async def answer(self, connection: Connection, request: Request) -> None:
        """Answer one request."""
        if self.token and not hmac.compare_digest(
            request.headers.get("authorization", "").encode(), f"Bearer {self.token}".encode()
        ):
            await self._send(connection, request, _with(refusal(_UNAUTHORIZED), _CHALLENGE))
            return
        with self.lock:
            before = self.api.registry.version
            reply = self.api.answer(request)
            after = self.api.registry.version
        if after != before:
            self._wake()
            self._changed()
        try:
            if isinstance(reply, Whole):
                self.answered(request, reply.status)
                await self._send(connection, request, reply)
            elif isinstance(reply, Logs):
                await send_logs(connection, self._pods, reply)
            elif isinstance(reply, Exec):
                await serve_exec(connection, self._pods, request, reply)
                # What was a conversation is no HTTP any more.
                raise ConnectionResetError
            else:
                await self._stream(connection, reply)
        except ApiFault as fault:
            await self._send(connection, request, refusal(fault))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self, where: socket.socket | tuple[str, int], tls: ssl.SSLContext | None) -> int:
        sock = where if isinstance(where, socket.socket) else socket.create_server(where, backlog=128)
        server = await asyncio.start_server(self._serve, sock=sock, ssl=tls, limit=_HEAD_LIMIT)
        port = int(server.sockets[0].getsockname()[1])
        self._servers[port] = server
        return port

    async def _close(self, port: int) -> None:
        server = self._servers.pop(port, None)
        if server is None:
            return
        # asyncio loses connections that are just being accepted when their server closes: let them come first.
        for sock in server.sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
        await asyncio.sleep(0.001)
        server.close()

    async def _end(self) -> None:
        for port in list(self._servers):
            await self._close(port)
        while asyncio.all_tasks() - {asyncio.current_task()}:
            self._reset()
            await asyncio.sleep(0.001)

    def _reset(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    def _wake_later(self) -> None:
        if self._gather > 0:
            self._loop.call_later(self._gather, self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        # First, so that a change from here on is not missed.
        self._waking = False
        for connection in self._connections:
            connection.news.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self.connected(reader, writer)
        self._connections.add(connection)
        try:
            while self._serving and (request := await connection.request()) is not None:
                await self.answer(connection, request)
                if request.headers.get("connection", "").lower() == "close":
                    writer.close()
                    await writer.wait_closed()
                    break
        except Malformed as error:
            await _last_word(connection, refusal(ApiFault(error.code, "BadRequest", str(error))))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            pass
        except Exception as error:
            traceback.print_exc()
            await _last_word(connection, refusal(ApiFault(500, "InternalError", f"{type(error).__name__}: {error}")))
        finally:
            self._connections.discard(connection)
            connection.reset()

    async def _send(self, connection: Connection, request: Request, reply: Whole) -> None:
        packed = len(reply.body) >= _LEAST_GZIP and "gzip" in request.headers.get("accept-encoding", "")
        body = gzip.compress(reply.body, 1) if packed else reply.body
        headers = {
            "Content-Type": reply.content_type,
            **reply.headers,
            **({"Content-Encoding": "gzip"} if packed else {}),
        }
        await connection.whole(reply.status, body, headers)

    async def _stream(self, connection: Connection, cursor: Stream) -> None:
        """A watch, until its time is over."""
        loop = asyncio.get_running_loop()
        end, bookmark = loop.time() + cursor.timeout, loop.time() + self._bookmark_seconds
        await connection.head(200, {"Content-Type": cursor.content_type, "Transfer-Encoding": "chunked"})
        while True:
            connection.news.clear()
            with self.lock:
                lines = list(cursor.lines())
                if self.api.abilities.bookmarks and loop.time() >= bookmark:
                    bookmark = loop.time() + self._bookmark_seconds
                    lines += [line] if (line := cursor.bookmark()) else []
            if lines:
                self.told()
            await connection.chunks(lines)
            if connection.gone:
                raise ConnectionResetError
            if cursor.broken or loop.time() >= end:
                break
            try:
                async with asyncio.timeout_at(min(end, bookmark)):
                    await connection.news.wait()
            except TimeoutError:
                continue
        await connection.last_chunk()

    def answered(self, request: Request, code: int) -> None:
        """A request is about to be answered with this status."""

    def told(self) -> None:
        """A watcher is told of something."""


async def _last_word(connection: Connection, reply: Whole) -> None:
    try:
        await connection.whole(reply.status, reply.body, {"Content-Type": reply.content_type, "Connection": "close"})
        connection.writer.close()
        await connection.writer.wait_closed()
    except (ConnectionError, ssl.SSLError):
        pass


def _with(reply: Whole, headers: dict[str, str]) -> Whole:
    return Whole(reply.status, reply.body, {**reply.headers, **headers}, reply.content_type)
