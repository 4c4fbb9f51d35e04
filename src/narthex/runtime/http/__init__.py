"""The HTTP/1.1 server of all programs: its requests and responses as values.

`connection` turns bytes into them and back (by h11) and carries one client's exchange on asyncio, and `server` owns the
thread, the listening sockets, and the table of open connections.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

Headers = Mapping[str, str]
"""Header fields by name. Of a request, names are in lower case, and a repeated field is one comma-separated list (RFC 9110, 5.3)."""


class HttpRequest(NamedTuple):
    """A request. Nothing in it is validated beyond HTTP's own syntax."""

    method: str
    path: str
    """Path without the query, still percent-encoded."""
    query: str = ""
    headers: Headers = {}
    body: bytes = b""


class HttpResponse(NamedTuple):
    """A response that is held in memory."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()
    """Header fields in addition to those that every response has."""


class SlowResponse(NamedTuple):
    """A response that takes a while to compute."""

    make: Callable[[], HttpResponse]
    """Called in a thread of its own, so that other requests are not delayed."""


class ChunkedResponse(NamedTuple):
    """A response that is sent as it is produced, without a time limit."""

    pieces: AsyncIterator[bytes]
    content_type: str
    headers: tuple[tuple[str, str], ...] = ()


Responder = Callable[[HttpRequest], HttpResponse | SlowResponse | ChunkedResponse]
"""Answers one request. Called in the server's thread, so it must not block."""
