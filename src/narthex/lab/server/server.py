"""The lab's API server: HTTP/1.1 over TLS, on any number of sockets.

    server = ApiServer(Api(registry), lock, token="...")
    server.start()
    server.listen(sock, tls)        # repeated for each socket, which may belong to another network namespace

Code that changes the registry directly holds the lock meanwhile, and calls `wake` afterwards.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import re
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Sequence
from urllib.parse import parse_qsl, unquote

from narthex.lab.api.api import ApiHandler, error_response
from narthex.lab.api.errors import StatusError
from narthex.lab.api.proxy_path import KubeletProxyRequest, ProxyRequest
from narthex.lab.api.reads import WatchCursor
from narthex.lab.api.requests import ApiRequest, ApiResponse, ExecRequest, LogRequest, PortForwardRequest
from narthex.lab.api.tokens import is_valid_token
from narthex.lab.server.metrics import PATH as METRICS_PATH
from narthex.lab.server.metrics import RequestMetrics
from narthex.lab.server.pod_requests import serve_from_pod
from narthex.lab.server.pods import PodRuntime
from narthex.runtime.connection_slots import SlotLimits
from narthex.runtime.http import HttpRequest
from narthex.runtime.http.connection import HttpConnection, HttpLimits, MalformedRequest
from narthex.runtime.http.server import HttpServer

_MIN_GZIP_BYTES = 128 * 1024
"""Shorter responses are not compressed, as upstream."""
LIMITS = HttpLimits(head=1024 * 1024, body=3 * 1024 * 1024)
_CONNECTIONS = 1 << 16
_PUBLIC = re.compile(r"/(?:version|healthz|livez|readyz)(?:/.*)?")
"""Paths that need no token, as the role system:public-info-viewer has them."""
_UNAUTHORIZED = StatusError(401, "Unauthorized", "Unauthorized")


class ApiConnection(HttpConnection):
    """A connection of an API client, on which a watch may be open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wrap a connection."""
        super().__init__(reader, writer, LIMITS)
        self.changed = asyncio.Event()
        """Set when a watch on this connection may have new events."""

    def reset(self) -> None:
        """Close at once, and end the watch."""
        super().reset()
        self.changed.set()


class ApiServer:
    """An API server. `start` and `stop` may alternate."""

    connection_type = ApiConnection
    """Class of its connections, which a subclass may replace."""

    def __init__(
        self,
        api: ApiHandler,
        lock: threading.RLock,
        *,
        token: str = "",
        pods: PodRuntime | None = None,
        bookmark_seconds: float = 60.0,
        changed: Callable[[], None] = lambda: None,
        gather: float = 0.0,
    ) -> None:
        """Prepare a server.

        Args:
            api: what it serves.
            lock: held while `api` is used.
            token: bearer token; requests without it are answered 401. Empty: none is required.
            pods: reader of logs and starter of programs.
            bookmark_seconds: interval of bookmarks in watches.
            changed: called after a write, without the lock.
            gather: seconds after `wake` for which changes are collected before they are sent to watchers.
        """
        self.api = api
        self.lock = lock
        self.token = token
        self._pods = pods
        self._bookmark_seconds = bookmark_seconds
        self._changed = changed
        self._gather = gather
        self._waking = False
        self.metrics = RequestMetrics(api, lock)
        self._http = HttpServer("api", _CONNECTIONS)
        self._ports: dict[int, socket.socket] = {}
        self._serving = False

    def start(self) -> None:
        """Begin to serve the sockets that `listen` adds."""
        self._serving = True

    def listen(self, where: socket.socket | tuple[str, int], tls: ssl.SSLContext | None = None) -> int:
        """Serve a bound socket, or an address and port (0: any) in the calling thread's network namespace.

        Returns the port.
        """
        sock = where if isinstance(where, socket.socket) else socket.create_server(where)
        sock.listen(128)
        port = int(sock.getsockname()[1])
        self._ports[port] = sock
        self._http.serve(sock, self.connection_type, self._serve, SlotLimits(_CONNECTIONS, _CONNECTIONS), tls)
        return port

    def silence(self, port: int) -> None:
        """Stop listening on a port. Open connections stay."""
        if sock := self._ports.pop(port, None):
            self._http.close(sock)

    def wake(self) -> None:
        """Send changes of the registry to the watchers."""
        if not self._serving or self._waking:
            return
        self._waking = self._gather > 0
        if self._gather > 0:
            self._http.later(self._gather, self._wake)
        else:
            self._http.call(self._wake)

    def drop(self) -> None:
        """Reset all connections."""
        self._http.call(self._drop)

    def stop(self) -> None:
        """Stop listening and reset open connections."""
        self._serving = False
        self._http.reset()
        self._ports.clear()
        self._waking = False

    def close(self) -> None:
        """End the thread, after `stop`."""
        self._http.stop()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._http.connections)

    def _knows(self, request: ApiRequest) -> bool:
        """Return True if a request has the server's token, or one that it has issued."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer":
            return False
        if hmac.compare_digest(given.encode(), self.token.encode()):
            return True
        with self.lock:
            return is_valid_token(self.api.registry, given)

    async def answer(self, connection: ApiConnection, request: ApiRequest) -> None:
        """Answer one request."""
        if self.token and not _PUBLIC.fullmatch(request.path) and not self._knows(request):
            await self._send(connection, request, error_response(_UNAUTHORIZED), ("WWW-Authenticate", "Bearer"))
            return
        if request.path == METRICS_PATH and request.method == "GET":
            await self._send(connection, request, self.metrics.response())
            return
        with self.lock:
            before = self.api.registry.version
            reply = self.api.answer(request)
            after = self.api.registry.version
        if after != before:
            self._wake()
            self._changed()
        try:
            self.metrics.note(request, reply.status if isinstance(reply, ApiResponse) else 200)
            if isinstance(reply, ApiResponse):
                self.answered(request, reply.status)
                await self._send(connection, request, reply)
            elif isinstance(reply, LogRequest | ExecRequest | PortForwardRequest):
                await serve_from_pod(connection, self._pods, request, reply)
            elif isinstance(reply, ProxyRequest):
                from narthex.lab.server.proxy import serve_proxy

                await serve_proxy(connection, self._pods, request, reply)
            elif isinstance(reply, KubeletProxyRequest):
                from narthex.lab.server.kubelet_api import serve_kubelet

                await serve_kubelet(connection, self._pods, reply.node, request, reply.path)
            else:
                await self._stream(connection, reply)
        except StatusError as fault:
            await self._send(connection, request, error_response(fault))

    def answered(self, request: ApiRequest, code: int) -> None:
        """Note that a request is about to be answered with this status."""

    def sent(self) -> None:
        """Note that events are about to be sent to a watcher."""

    def _drop(self) -> None:
        for connection in self._http.connections:
            connection.reset()

    def _wake(self) -> None:
        # First, so that a change from here on is not missed.
        self._waking = False
        for connection in self._http.connections:
            if isinstance(connection, ApiConnection):
                connection.changed.set()

    async def _serve(self, connection: HttpConnection) -> None:
        assert isinstance(connection, ApiConnection)
        try:
            while self._serving and (request := await connection.request()) is not None:
                await self.answer(connection, api_request(request))
                if not connection.framing.persistent:
                    await connection.close()
                    return
        except MalformedRequest as error:
            await _refuse(connection, StatusError(error.status, "BadRequest", str(error)))
        except OSError:
            raise
        except Exception as error:
            traceback.print_exc()
            await _refuse(connection, StatusError(500, "InternalError", f"{type(error).__name__}: {error}"))

    async def _send(
        self, connection: HttpConnection, request: ApiRequest, reply: ApiResponse, *fields: tuple[str, str]
    ) -> None:
        packed = len(reply.body) >= _MIN_GZIP_BYTES and "gzip" in request.headers.get("accept-encoding", "")
        body = gzip.compress(reply.body, 1) if packed else reply.body
        headers = {"Content-Type": reply.content_type, **reply.headers, **dict(fields)}
        if packed:
            headers["Content-Encoding"] = "gzip"
        await connection.respond(reply.status, body, headers.items())

    async def _stream(self, connection: ApiConnection, cursor: WatchCursor) -> None:
        """Send a watch until its time is over."""
        loop = asyncio.get_running_loop()
        end, bookmark = loop.time() + cursor.timeout, loop.time() + self._bookmark_seconds
        await connection.begin(200, (("Content-Type", cursor.content_type), ("Transfer-Encoding", "chunked")))
        while True:
            connection.changed.clear()
            with self.lock:
                lines = list(cursor.lines())
                if self.api.abilities.bookmarks and loop.time() >= bookmark:
                    bookmark = loop.time() + self._bookmark_seconds
                    lines += [line] if (line := cursor.bookmark()) else []
            if lines:
                self.sent()
            await connection.send(lines)
            if connection.is_reset:
                raise ConnectionResetError
            if cursor.broken or loop.time() >= end:
                break
            try:
                async with asyncio.timeout_at(min(end, bookmark)):
                    await connection.changed.wait()
            except TimeoutError:
                continue
        await connection.end()


def api_request(request: HttpRequest) -> ApiRequest:
    """Return an HTTP request as one of the API."""
    pairs: Sequence[tuple[str, str]] = parse_qsl(request.query, keep_blank_values=True)
    target = f"{request.path}?{request.query}" if request.query else request.path
    return ApiRequest(
        request.method, unquote(request.path), dict(pairs), request.headers, request.body, tuple(pairs), target
    )


async def _refuse(connection: HttpConnection, fault: StatusError) -> None:
    """Send a last Status and close."""
    reply = error_response(fault)
    await connection.respond(reply.status, reply.body, (("Content-Type", reply.content_type), ("Connection", "close")))
    await connection.close()
