"""Runs the page on a loopback port until a signal ends it."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from narthex.lab.ui.board import Board
from narthex.lab.ui.path import Tracer
from narthex.runtime.process import ended_by_signal

_SIMULTANEOUS = 64


class UiError(RuntimeError):
    """The page cannot be served; the message says why."""


@contextmanager
def page(board: Board, trace: Tracer, port: int = 0) -> Iterator[str]:
    """Serve at 127.0.0.1:`port` (0: any free one) while the block lasts; the address to open, with its token. Raises UiError."""
    # They take a third of a second to load.
    import uvicorn

    from narthex.lab.ui.pages import application

    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
        sock.listen(_SIMULTANEOUS)
    except OSError as error:
        sock.close()
        raise UiError(f"port {port} of this machine cannot be had: {error.strerror}; choose another --port") from None
    port = sock.getsockname()[1]
    token = secrets.token_urlsafe(24)
    config = uvicorn.Config(
        application(board, trace, port, token),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
        limit_concurrency=_SIMULTANEOUS,
    )
    server = uvicorn.Server(config)
    # In a thread of its own it leaves signals alone.
    thread = threading.Thread(target=server.run, args=([sock],), name="page")
    board.begin()
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/?token={token}"
    finally:
        # Streams end with the board, and the server when they have.
        board.end()
        server.should_exit = True
        thread.join()
        sock.close()


def serve(board: Board, trace: Tracer, port: int, ready: Callable[[str], object]) -> None:
    """The page until a signal ends it; `ready` is told its address. Raises UiError."""
    ended = threading.Event()
    with ended_by_signal(ended.set), page(board, trace, port) as address:
        ready(address)
        ended.wait()
