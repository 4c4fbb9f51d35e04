"""Requests to the API server through one HTTP client, which is rebuilt when its files change (rotated certificates).

Each write is one request and one response, without retries:

    async with writing(access, seconds=10.0) as writer:
        node = await writer.get("/api/v1/nodes/a")
        await writer.patch("/api/v1/nodes/a", {"metadata": {"annotations": {...}}})

`metadata.resourceVersion` in a body is a precondition: if the object has another version, the server answers 409 and
`ConflictError` is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from narthex.kube.access import Access, AccessError, ServerConnection, open_connection
from narthex.kube.messages import ApiStatus, WatchRequest, read_status
from narthex.model import quoted
from narthex.runtime.files import file_stamp
from narthex.runtime.logs import LOGGER, printable

if TYPE_CHECKING:
    from httpx2 import Response

_LONGEST_REFUSAL = 65536

_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""TCP keepalive detects a vanished peer within a minute, even on an idle watch."""


_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
"""A warning of an API server in the header `Warning` (RFC 7234, section 5.5)."""
_MOST_WARNINGS, _MOST_TEXT = 100, 500
"""Distinct warnings that are shown by one process, and characters of each: a server may say something else each time."""
_shown_warnings: set[str] = set()


def show_warnings(headers: Iterable[str]) -> None:
    """Log warnings of an API server, such as those about deprecated fields, each text once in this process."""
    for header in headers:
        for found in _WARNING.finditer(header):
            text = re.sub(r"\\(.)", r"\1", found[1])[:_MOST_TEXT]
            if text not in _shown_warnings and len(_shown_warnings) < _MOST_WARNINGS:
                _shown_warnings.add(text)
                LOGGER.warning("the API server warns: %s", printable(text))


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

    async def exchange(self, method: str, path: str, body: bytes | None, content_type: str) -> tuple[int, bytes]:
        """Send a request whose response is one object; return its status and body. Raises Unreachable."""
        fields = {"content": body, "headers": {"Content-Type": content_type}} if body is not None else {}
        async with self._send(method, path, **fields) as answer:
            return answer.code, b"".join([chunk async for chunk in answer.chunks()])

    async def aclose(self) -> None:
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
                show_warnings(response.headers.get_list("Warning"))
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
                await self.aclose()
        if self._way is None:
            self._way = open_connection(self.access)
            self._stamps = tuple(map(file_stamp, self._way.files))
        return self._way


def _keep_alive(response: Response) -> None:
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


JsonObject = dict[str, Any]
PatchKind = Literal["merge", "strategic", "json"]

_PATCHES: Mapping[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}
_JSON = "application/json"
_LONGEST_SAID = 400
"""Characters of the server's message to keep. The missing permission is named at its end."""
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ApiError(RuntimeError):
    """A write failed, or its result is unknown (NoResponseError). The message names the object and what to do."""

    def __init__(self, code: int, method: str, path: str, why: str) -> None:
        super().__init__(f"{method} {path}: {why}")
        self.code = code
        """HTTP status; 0 without a response."""


class NoResponseError(ApiError):
    """The server did not respond; the write may have succeeded."""


class ConflictError(ApiError):
    """The object has changed since the given version: read it again and decide anew."""


class AlreadyExistsError(ApiError):
    """An object with this name exists already."""


class NotFoundError(ApiError):
    """The object or its kind does not exist."""


class ApiWriter:
    """Reads and writes objects by full path, such as `/api/v1/namespaces/shop/services/web`."""

    def __init__(self, api: ApiClient, seconds: float) -> None:
        self._api = api
        self.seconds = seconds
        """Time for each request."""

    async def get(self, path: str) -> JsonObject:
        """Return the object. Raises ApiError, as all methods do."""
        return await self._request("GET", path)

    async def create(self, path: str, body: JsonObject) -> JsonObject:
        """Create an object with POST to the collection's path; return the stored object. Raises AlreadyExistsError."""
        return await self._request("POST", path, body, _JSON)

    async def update(self, path: str, body: JsonObject, *, subresource: str = "") -> JsonObject:
        """Replace the whole object with PUT; return the stored object. Raises ConflictError."""
        return await self._request("PUT", _below(path, subresource), body, _JSON)

    async def patch(
        self, path: str, body: JsonObject | list[JsonObject], *, kind: PatchKind = "merge", subresource: str = ""
    ) -> JsonObject:
        """Change parts of an object; return the stored object. `kind` json takes a list of operations.

        Raises ConflictError.
        """
        return await self._request("PATCH", _below(path, subresource), body, _PATCHES[kind])

    async def delete(self, path: str) -> None:
        """Delete an object. Raises NotFoundError."""
        await self._request("DELETE", path)

    async def _request(
        self, method: str, path: str, body: JsonObject | list[JsonObject] | None = None, type: str = ""
    ) -> JsonObject:
        data = msgspec.json.encode(body) if body is not None else None
        try:
            async with asyncio.timeout(self.seconds):
                code, said = await self._api.exchange(method, path, data, type)
        except (Unreachable, TimeoutError) as error:
            why = str(error) or f"no answer within {self.seconds:.3g} s"
            raise NoResponseError(0, method, path, f"{why}; it will be retried") from error
        if 200 <= code < 300:
            try:
                answer = msgspec.json.decode(said)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise NoResponseError(
                    code, method, path, f"status {code}, but the body is not JSON: {error}"
                ) from error
            return answer if isinstance(answer, dict) else {}
        raise _refusal(code, method, path, read_status(said, code))


@asynccontextmanager
async def writing(access: Access, seconds: float) -> AsyncIterator[ApiWriter]:
    """Open a writer with connections of its own while the block runs; `seconds` limits each request."""
    async with contextlib.aclosing(ApiClient(access)) as api:
        yield ApiWriter(api, seconds)


def _below(path: str, subresource: str) -> str:
    return f"{path}/{subresource}" if subresource else path


def _refusal(code: int, method: str, path: str, status: ApiStatus) -> ApiError:
    said = f"status {code}" + (f" {status.reason}" if status.reason else "")
    said += f": {quoted(status.message, _LONGEST_SAID)}" if status.message else ""
    if code == 409:
        if status.reason == "AlreadyExists":
            return AlreadyExistsError(code, method, path, f"{said}; it is there already")
        return ConflictError(code, method, path, f"{said}; it has changed: read it again and decide again")
    if code == 404:
        return NotFoundError(code, method, path, f"{said}; it is gone, or its kind is not installed")
    if code in (401, 403):
        return ApiError(code, method, path, f"{said}; grant the verb {_VERBS[method]} on it to this account")
    if code == 422:
        return ApiError(code, method, path, f"{said}; the server does not allow this content")
    return ApiError(code, method, path, f"{said}; it will be retried")
