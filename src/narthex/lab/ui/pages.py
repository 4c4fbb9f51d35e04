"""What a browser gets: the page, its files, the picture as it changes, a path on request.

Any page in the same browser can send requests to this machine, and any user of it can reach the port. So each request must
come under a name of the loopback (against DNS rebinding) and bring the token, first in the address that was printed and from
then on in a cookie; and nothing but the page's own files may run or be loaded (Content-Security-Policy). Nothing here changes
anything.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from narthex.lab.ui.board import Board
from narthex.lab.ui.path import Tracer, path

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "html": "text/html"}
_LONGEST = 300
"""Characters of a source or a destination."""
_LOOK_SECONDS = 0.2
_QUIET_LOOKS = 50

Handler = Callable[[Request], Awaitable[Response]]


def application(board: Board, trace: Tracer, port: int, token: str) -> Starlette:
    """The page for one board. `token`: what a browser must bring."""
    cookie = f"narthex-{port}"
    """Cookies do not know ports, and there may be several of these pages."""
    names = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}
    files = {each.name: each.read_bytes() for each in resources.files("narthex.lab.ui").joinpath("static").iterdir()}

    def guarded(handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            if request.headers.get("host", "") not in names:
                return _refused(421, "this page is for this machine's loopback address only")
            if not _same(request.cookies.get(cookie, ""), token):
                return _refused(403, "open the address that `narthex ui` has printed, with its token")
            response = await handler(request)
            response.headers.update(_HEADERS)
            return response

        return answer

    async def enter(request: Request) -> Response:
        given = request.query_params.get("token", "")
        if request.headers.get("host", "") in names and _same(given, token):
            # Without the token in it the address can be shown to others.
            response: Response = RedirectResponse("/", 303, _HEADERS)
            response.set_cookie(cookie, token, httponly=True, samesite="strict", path="/")
            return response
        return await guarded(_file("index.html"))(request)

    def _file(name: str) -> Handler:
        async def send(_: Request) -> Response:
            return Response(files[name], media_type=_KINDS[name.rpartition(".")[2]])

        return send

    async def events(_: Request) -> Response:
        return StreamingResponse(_stream(board), media_type="text/event-stream")

    async def trace_path(request: Request) -> Response:
        asked = [request.query_params.get(name, "")[:_LONGEST] for name in ("from", "to")]
        found = await asyncio.to_thread(path, trace, board.snapshot, *asked)
        return Response(msgspec.json.encode(found), media_type="application/json")

    return Starlette(
        routes=[
            Route("/", enter),
            *(Route(f"/{name}", guarded(_file(name))) for name in files if name != "index.html"),
            Route("/events", guarded(events)),
            Route("/path", guarded(trace_path)),
        ]
    )


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())


def _refused(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status, _HEADERS)


async def _stream(board: Board) -> AsyncIterator[bytes]:
    """Server-sent events: all there is, then what changes."""
    since, quiet = 0, 0
    while not board.stop.is_set():
        since, found = board.news(since)
        for kind, body in found:
            yield b"event: %s\ndata: %s\n\n" % (kind.encode(), body)
        quiet = 0 if found else quiet + 1
        if quiet == _QUIET_LOOKS:
            # A word now and then shows when a browser is gone.
            yield b": still here\n\n"
            quiet = 0
        await asyncio.sleep(_LOOK_SECONDS)
