"""The page on a loopback port, until a signal ends it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from narthex.lab.ui.board import Board
from narthex.lab.ui.pages import PageResponder
from narthex.lab.ui.path import Tracer
from narthex.runtime.http.messages import ConnectionSlots
from narthex.runtime.http.server import HttpServer, listen_tcp
from narthex.runtime.process import ended_by_signal

_CONNECTIONS = 64
_SECONDS = 60.0
"""Time for one request; the path of a packet in a large cluster takes seconds."""


class UiError(RuntimeError):
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
    server.open(sock, PageResponder(board, trace, port, token), ConnectionSlots(_CONNECTIONS), _SECONDS)
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
