"""The two small HTTP servers of a node proxy: health for balancers and kubelets, metrics and state for people.

One thread with an asyncio loop serves both, and speaks no more HTTP than these need: GET and HEAD of fixed paths, one
request per connection. A web framework costs 0.17 s of start-up here, more than all the rest of a first sync.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from narthex.apps.health import Health
from narthex.apps.logs import LOGGER
from narthex.apps.metrics import Metrics
from narthex.model.net import join_port

if TYPE_CHECKING:
    import asyncio

RETRY_SECONDS = 5.0
"""A port that is taken is tried again this often (row 17.8)."""
_REQUEST_SECONDS = 5.0
_REQUEST_BYTES = 16384
_CONNECTIONS = 256
"""More at one time are closed at once: these ports face the network of the node."""
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 500: "Internal Server Error"}


class Reply(NamedTuple):
    """One answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], Reply]]
"""Path to answer; called in the server's thread."""


class Listener(NamedTuple):
    """One address to serve on."""

    purpose: str
    """Said when it fails: "health"."""
    address: str
    port: int
    routes: Routes

    def __str__(self) -> str:
        return f"{self.purpose} server on {join_port(self.address, self.port)}"


class BindError(RuntimeError):
    """An address cannot be listened on, and `bindAddressHardFail` says that this is fatal."""


def health_routes(health: Health, metrics: Metrics) -> Routes:
    """`/healthz` and `/livez` of the health port; both are counted (row 17.9)."""

    def answer(name: str, ask: Callable[[], tuple[int, dict[str, Any]]]) -> Reply:
        status, body = ask()
        metrics.answered(name, status)
        return _json(body, status)

    return {
        "/healthz": lambda: answer("healthz", health.healthz),
        "/livez": lambda: answer("livez", health.livez),
    }


def metrics_routes(metrics: Metrics, mode: str, configuration: Any) -> Routes:
    """`/metrics`, `/proxyMode`, `/healthz`, `/configz` of the metrics port (row 20.25)."""
    return {
        "/metrics": lambda: Reply(200, metrics.exposition(), "text/plain; version=0.0.4; charset=utf-8"),
        "/proxyMode": lambda: Reply(200, mode.encode()),
        "/healthz": lambda: Reply(200, b"ok"),
        "/configz": lambda: _json({"kubeproxy.config.k8s.io": configuration}),
    }


def _json(body: Any, status: int = 200) -> Reply:
    return Reply(status, msgspec.json.encode(body), "application/json")


class StatusServer:
    """Serves until stopped. `start` listens at once, so that a caller knows of a taken port."""

    def __init__(
        self, listeners: Sequence[Listener], *, hard_fail: bool = False, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._listeners = list(listeners)
        self._hard_fail = hard_fail
        self._retry_seconds = retry_seconds
        self._bound: list[tuple[Listener, socket.socket]] = []
        self._missing: list[Listener] = []
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._running = threading.Event()
        self._connections = 0

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        """Where each purpose is served now."""
        return {listener.purpose: sock.getsockname()[:2] for listener, sock in self._bound}

    def start(self) -> None:
        """Listen, in the network namespace of the calling thread. Raises BindError when that is fatal."""
        for listener in self._listeners:
            try:
                self._bound.append((listener, _listen(listener)))
            except OSError as error:
                if self._hard_fail:
                    self._close()
                    raise BindError(f"{listener}: {error.strerror}; bindAddressHardFail is set") from error
                self._say_missing(listener, error)
                self._missing.append(listener)
        if self._listeners:
            self._thread.start()

    def stop(self) -> None:
        """Close everything and wait for the thread."""
        if not self._thread.is_alive():
            self._close()
            return
        self._running.wait()
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _close(self) -> None:
        for _, sock in self._bound:
            sock.close()
        self._bound.clear()

    def _say_missing(self, listener: Listener, error: OSError) -> None:
        LOGGER.error(
            "%s: %s; it is tried again every %g s; stop what else listens there, or give another address",
            listener,
            error.strerror,
            self._retry_seconds,
        )

    def _run(self) -> None:
        # Loaded here: the first sync need not wait for it.
        import asyncio

        asyncio.run(self._serve())

    async def _serve(self) -> None:
        import asyncio

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        servers = [await self._open(listener, sock) for listener, sock in self._bound]
        self._running.set()
        while not self._stop.is_set():
            for listener in tuple(self._missing):
                try:
                    sock = _listen(listener)
                except OSError:
                    continue
                self._missing.remove(listener)
                self._bound.append((listener, sock))
                servers.append(await self._open(listener, sock))
                LOGGER.info("%s: listening now", listener)
            try:
                await asyncio.wait_for(self._stop.wait(), self._retry_seconds if self._missing else None)
            except TimeoutError:
                continue
        for server in servers:
            server.close()
        self._bound.clear()

    async def _open(self, listener: Listener, sock: socket.socket) -> asyncio.Server:
        import asyncio

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connected(listener.routes, reader, writer)

        return await asyncio.start_server(connected, sock=sock, limit=_REQUEST_BYTES)

    async def _connected(self, routes: Routes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import asyncio

        self._connections += 1
        try:
            if self._connections <= _CONNECTIONS:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_answer(routes, head))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # A client that asks for nothing gets nothing.
            pass
        finally:
            self._connections -= 1
            writer.close()


def _listen(listener: Listener) -> socket.socket:
    """A listening socket. `::` takes IPv4 too, as it does for kube-proxy."""
    family = socket.AF_INET6 if ":" in listener.address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, listener.address != "::")
        sock.bind((listener.address, listener.port))
        sock.listen(128)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _answer(routes: Routes, head: bytes) -> bytes:
    """The whole response to a request's head."""
    words = head.split(b"\r\n", 1)[0].split()
    method, path = (words[0], words[1].split(b"?")[0].decode("latin-1")) if len(words) == 3 else (b"", "")
    route = routes.get(path)
    if method not in (b"GET", b"HEAD"):
        reply = Reply(405, b"only GET and HEAD\n")
    elif route is None:
        reply = Reply(404, f"not found; there is {', '.join(routes)}\n".encode())
    else:
        try:
            reply = route()
        except Exception as error:
            LOGGER.error("%s: %s: %s", path, type(error).__name__, error)
            reply = Reply(500, b"internal error; the log says more\n")
    lines = (
        f"HTTP/1.1 {reply.status} {_REASONS.get(reply.status, 'Service Unavailable')}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == b"HEAD" else reply.body)
