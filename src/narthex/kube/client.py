"""Requests to the API server through one HTTP client, which is rebuilt when its files change (rotated certificates)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from narthex.kube.access import Access, AccessError, ServerConnection, open_connection
from narthex.kube.exchange import WatchRequest
from narthex.runtime.watched_files import file_stamp

if TYPE_CHECKING:
    from httpx2 import Response

_LONGEST_REFUSAL = 65536


_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""TCP keepalive detects a vanished peer within a minute, even on an idle watch."""


class Unreachable(Exception):
    """The server sent no complete response; the message states the reason."""


class StreamedResponse:
    """A response whose head has arrived."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self.code: int = response.status_code

    @property
    def retry_after(self) -> float | None:
        """Return the seconds of the Retry-After header, or None."""
        value = self._response.headers.get("Retry-After", "")
        return float(value) if value.isascii() and value.isdigit() else None

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the decoded body as it arrives."""
        return self._response.aiter_bytes()

    async def refusal(self) -> bytes:
        """Return the body of an error response, cut at a limit."""
        parts: list[bytes] = []
        async for chunk in self.chunks():
            parts.append(chunk)
            if sum(map(len, parts)) >= _LONGEST_REFUSAL:
                break
        return b"".join(parts)[:_LONGEST_REFUSAL]


class ApiClient:
    """A client of one API server, to be used and closed within one asyncio loop."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._pace = RateLimiter(access.connection.qps, access.connection.burst)
        self._way: ServerConnection | None = None
        self._stamps: Any = None

    @asynccontextmanager
    async def get(self, request: WatchRequest) -> AsyncIterator[StreamedResponse]:
        """Send a GET request and yield the response. Raises Unreachable, also while the body is read."""
        async with self._send("GET", request.path, params=request.query) as answer:
            yield answer

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Create an object from JSON; return the status and body of the response. Raises Unreachable."""
        headers = {"Content-Type": "application/json"}
        async with self._send("POST", path, content=body, headers=headers) as answer:
            return answer.code, await answer.refusal()

    async def exchange(self, method: str, path: str, body: bytes | None, content_type: str) -> tuple[int, bytes]:
        """Send a request whose response is one object; return its status and body. Raises Unreachable."""
        fields = {"content": body, "headers": {"Content-Type": content_type}} if body is not None else {}
        async with self._send(method, path, **fields) as answer:
            return answer.code, b"".join([chunk async for chunk in answer.chunks()])

    async def close(self) -> None:
        """Close all connections."""
        way, self._way = self._way, None
        if way is not None:
            await way.client.aclose()

    @asynccontextmanager
    async def _send(self, method: str, path: str, **fields: Any) -> AsyncIterator[StreamedResponse]:
        import httpx2
        from lightkube.core.exceptions import ConfigError

        await asyncio.sleep(self._pace.wait(asyncio.get_running_loop().time()))
        try:
            way = await self._ready()
            fields["extensions"] = way.extensions
            async with way.client.stream(method, path, **fields) as response:
                _keep_alive(response)
                yield StreamedResponse(response)
        except (AccessError, ConfigError) as error:
            raise Unreachable(str(error)) from error
        except (httpx2.HTTPError, httpx2.StreamError, ssl.SSLError, OSError, RuntimeError) as error:
            # RuntimeError: the client was closed by another request that found its files changed.
            where = self._way.server if self._way is not None else self.access.origin
            raise Unreachable(f"{where}: {str(error) or type(error).__name__}") from error

    async def _ready(self) -> ServerConnection:
        """Return a client built from the current files."""
        if self._way is not None and self._stamps != tuple(map(file_stamp, self._way.files)):
            with contextlib.suppress(OSError, RuntimeError):
                await self.close()
        if self._way is None:
            self._way = open_connection(self.access)
            self._stamps = tuple(map(file_stamp, self._way.files))
        return self._way


def _keep_alive(response: Response) -> None:
    """Enable TCP keepalive."""
    stream = response.extensions.get("network_stream")
    sock = stream.get_extra_info("socket") if stream is not None else None
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


DEFAULT_QPS, DEFAULT_BURST = 5.0, 10


class RateLimiter:
    """A token bucket for `clientConnection.qps` and `burst` (row 27.2).

    0 selects the default; a negative `qps` means no limit.
    """

    def __init__(self, qps: float, burst: int) -> None:
        self._qps = qps or DEFAULT_QPS
        self._burst = float(burst or DEFAULT_BURST)
        self._left = self._burst
        self._at: float | None = None

    def wait(self, now: float) -> float:
        """Take a token and return the seconds until the request may be sent."""
        if self._qps < 0:
            return 0.0
        passed = now - self._at if self._at is not None else 0.0
        self._at = now
        self._left = min(self._burst, self._left + passed * self._qps) - 1
        return max(0.0, -self._left / self._qps)
