"""The built playground on a loopback port, until a signal ends it. The page works alone: it only loads its files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import narthex
from narthex.runtime.connection_slots import SlotLimits
from narthex.runtime.http import HttpRequest, HttpResponse
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.process import StartError, ended_by_signal

BUILT = Path(narthex.__file__).parents[2] / "playground" / "build" / "site"
"""Where `make playground` puts the files, in a checkout."""
_START = "index.html"
_CONNECTIONS = 64
_SECONDS = 60.0
_HEADERS = (
    ("content-security-policy", "frame-ancestors 'none'"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-cache"),
)
_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "wasm": "application/wasm",
    "zip": "application/zip",
}


class PlaygroundFiles:
    """Answers requests with the files of a folder, which are read at once."""

    def __init__(self, folder: Path) -> None:
        """Read the files. Raises StartError if the folder is no built playground."""
        if not (folder / _START).is_file():
            raise StartError(
                f"{folder} holds no playground: run `make playground` in a checkout of Narthex, or name the folder with --site"
            )
        files = {f"/{path.name}": path for path in folder.iterdir() if path.suffix[1:] in _MEDIA_TYPES}
        self._files = {name: (path.read_bytes(), _MEDIA_TYPES[path.suffix[1:]]) for name, path in files.items()}
        self._files["/"] = self._files[f"/{_START}"]

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer one request."""
        if request.path not in self._files:
            return HttpResponse(404, b"Not Found\n", headers=_HEADERS)
        if request.method not in ("GET", "HEAD"):
            return HttpResponse(405, b"Method Not Allowed\n", headers=_HEADERS)
        body, media_type = self._files[request.path]
        return HttpResponse(200, body, media_type, _HEADERS)


@contextmanager
def playground(folder: Path = BUILT, port: int = 0) -> Iterator[str]:
    """Serve the playground at 127.0.0.1:`port` (0: any free port) while the block lasts.

    Yields the address to open. Raises StartError.
    """
    files = PlaygroundFiles(folder)
    try:
        sock = listen_tcp("127.0.0.1", port)
    except OSError as error:
        raise StartError(
            f"cannot listen on port {port} of 127.0.0.1: {error.strerror}; choose another --port"
        ) from None
    port = sock.getsockname()[1]
    server = HttpServer("playground")
    server.open(sock, files, _SECONDS, SlotLimits(_CONNECTIONS, _CONNECTIONS))
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.stop()


def serve(folder: Path, port: int, ready: Callable[[str], object]) -> None:
    """Serve the playground until a signal arrives. `ready` is called with its address. Raises StartError."""
    ended = threading.Event()
    with ended_by_signal(ended.set), playground(folder, port) as address:
        ready(address)
        ended.wait()
