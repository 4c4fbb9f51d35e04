"""The page on a loopback port, until a signal ends it."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from urllib.parse import parse_qsl

import msgspec

from narthex.lab.ui.board import Board
from narthex.lab.ui.path import Tracer, path
from narthex.runtime.connection_slots import SlotLimits
from narthex.runtime.http import ChunkedResponse, HttpRequest, HttpResponse, SlowResponse
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.process import StartError, ended_by_signal

_CONNECTIONS = 64
_SECONDS = 60.0
"""Time for one request; the path of a packet in a large cluster takes seconds."""


class UiError(StartError):
    """The page cannot be served; the message says why."""


@contextmanager
def page(board: Board, trace: Tracer, port: int = 0) -> Iterator[str]:
    """Serve the page at 127.0.0.1:`port` (0: any free port) while the block lasts.

    Yields the address to open, which contains the token. Raises UiError.
    """
    try:
        sock = listen_tcp("127.0.0.1", port)
    except OSError as error:
        raise UiError(f"cannot listen on port {port} of 127.0.0.1: {error.strerror}; choose another --port") from None
    port = sock.getsockname()[1]
    token = secrets.token_urlsafe(24)
    server = HttpServer("page")
    board.begin()
    server.open(sock, PageResponder(board, trace, port, token), _SECONDS, SlotLimits(_CONNECTIONS, _CONNECTIONS))
    try:
        yield f"http://127.0.0.1:{port}/?token={token}"
    finally:
        board.end()
        server.stop()


def serve(board: Board, trace: Tracer, port: int, ready: Callable[[str], object]) -> None:
    """Serve the page until a signal arrives. `ready` is called with its address. Raises UiError."""
    ended = threading.Event()
    with ended_by_signal(ended.set), page(board, trace, port) as address:
        ready(address)
        ended.wait()


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
)
_MEDIA_TYPES = {
    name: f"text/{kind}; charset=utf-8" for name, kind in (("css", "css"), ("js", "javascript"), ("html", "html"))
} | {"svg": "image/svg+xml"}
_MAX_ENDPOINT = 300
"""Characters of a source or a destination."""
_POLL_SECONDS = 0.2
_KEEPALIVE_POLLS = 50

_PageResponse = HttpResponse | SlowResponse | ChunkedResponse


class PageResponder:
    """Answers the requests of a browser that shows one board."""

    def __init__(self, board: Board, trace: Tracer, port: int, token: str) -> None:
        """Load the page's files. `token` is what a browser must present."""
        self._board = board
        self._trace = trace
        self._token = token
        # Cookies do not distinguish ports, and several of these pages may be open.
        self._cookie = f"narthex-{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
        files = resources.files("narthex.lab.ui").joinpath("static").iterdir()
        self._files = {each.name: each.read_bytes() for each in files}
        self._routes: dict[str, Callable[[HttpRequest], _PageResponse]] = {
            "/": lambda _: self._file("index.html"),
            "/events": lambda _: ChunkedResponse(_events(board), "text/event-stream; charset=utf-8", _HEADERS),
            "/path": self._path,
            **{f"/{name}": self._static for name in self._files if name != "index.html"},
        }

    def __call__(self, request: HttpRequest) -> _PageResponse:
        """Answer one request."""
        route = self._routes.get(request.path)
        if route is None:
            return _text(404, "Not Found")
        if request.method not in ("GET", "HEAD"):
            return _text(405, "Method Not Allowed")
        if request.headers.get("host", "") not in self._hosts:
            return _text(421, "this page is for this machine's loopback address only\n")
        if request.path == "/" and self._is_token(dict(parse_qsl(request.query)).get("token", "")):
            # The address without the token can be shared.
            cookie = f"{self._cookie}={self._token}; HttpOnly; Path=/; SameSite=strict"
            return _text(303, "", ("location", "/"), ("set-cookie", cookie))
        if not self._is_token(_cookie(request.headers.get("cookie", ""), self._cookie)):
            return _text(403, "open the address that `narthex ui` has printed, with its token\n")
        return route(request)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _static(self, request: HttpRequest) -> HttpResponse:
        return self._file(request.path[1:])

    def _file(self, name: str) -> HttpResponse:
        return HttpResponse(200, self._files[name], _MEDIA_TYPES[name.rpartition(".")[2]], _HEADERS)

    def _path(self, request: HttpRequest) -> SlowResponse:
        query = dict(parse_qsl(request.query))
        source, destination = (query.get(name, "")[:_MAX_ENDPOINT] for name in ("from", "to"))

        def trace() -> HttpResponse:
            """Trace outside of the event loop, and respond with the path as JSON."""
            found = path(self._trace, self._board.snapshot, source, destination)
            return HttpResponse(200, msgspec.json.encode(found), "application/json", _HEADERS)

        return SlowResponse(trace)


def _text(status: int, text: str, *headers: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, text.encode(), headers=(*_HEADERS, *headers))


def _cookie(header: str, name: str) -> str:
    """Return a cookie's value, empty if there is none."""
    try:
        cookies = SimpleCookie(header)
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


async def _events(board: Board) -> AsyncIterator[bytes]:
    """Yield server-sent events: the present state, then each change."""
    since, quiet = 0, 0
    while not board.stop.is_set():
        since, found = board.news(since)
        for kind, body in found:
            yield b"event: %s\ndata: %s\n\n" % (kind.encode(), body)
        quiet = 0 if found else quiet + 1
        if quiet == _KEEPALIVE_POLLS:
            # A comment now and then reveals that a browser is gone.
            yield b": still here\n\n"
            quiet = 0
        await asyncio.sleep(_POLL_SECONDS)
