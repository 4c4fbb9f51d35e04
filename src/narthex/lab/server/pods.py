"""What the API server needs from the nodes: the logs of containers, programs within them, and threads that read both."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol

from narthex.lab.api.requests import LogRequest
from narthex.linux.namespaces import in_namespace


class PodProcess(Protocol):
    """A program that was started in a pod.

    With a terminal, `stdin` and `stdout` are the terminal's master, and `stderr` is None.
    """

    @property
    def stdin(self) -> BinaryIO | None:
        """Its standard input, None if nothing is sent to it."""

    @property
    def stdout(self) -> BinaryIO | None:
        """Its standard output."""

    @property
    def stderr(self) -> BinaryIO | None:
        """Its standard error."""

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal."""

    def wait(self) -> int:
        """Wait for the program. Return its exit status; for one that a signal ended, 128 and the signal."""

    def kill(self) -> None:
        """Kill the program, if it still runs."""


class PodRuntime(Protocol):
    """The pods that run, on any node. Its methods raise StatusError and are called without the registry's lock."""

    def logs(self, request: LogRequest) -> Iterator[bytes]:
        """Yield a container's log in pieces of whole lines. The caller applies `request.limit`.

        With `follow`, it continues until the container ends, and yields `b""` at least once a second while there is nothing new, so that
        the server notices a client that is gone and closes the iterator.
        """

    def node_logs(self, node: str) -> Mapping[str, Path]:
        """Return the log files of a node, by their paths in its directory of logs."""

    def exec(self, namespace: str, pod: str, container: str, argv: Sequence[str], stdin: bool, tty: bool) -> PodProcess:
        """Start a program in a container."""

    def attach(self, namespace: str, pod: str, container: str, stdin: bool, stdout: bool, stderr: bool) -> PodProcess:
        """Attach to the program of a container. To kill it detaches."""

    def dial(self, node: str, host: str, port: int) -> socket.socket:
        """Connect from a node, within DIAL_SECONDS. Raises OSError or StatusError."""

    def connect(self, namespace: str, pod: str, port: int) -> socket.socket:
        """Connect to a port of a pod on its loopback address. Raises OSError or StatusError."""


DIAL_SECONDS = 30.0
"""Time to connect to a server in a pod, as upstream."""
DIALERS = ThreadPoolExecutor(64, thread_name_prefix="api-dial")
"""Connects to pods, which may take DIAL_SECONDS, while the loop's own threads start programs. They begin with the first connections."""


def dial_from(namespace: str, host: str, port: int, seconds: float = DIAL_SECONDS) -> socket.socket:
    """Connect from a network namespace. Raises OSError."""
    with in_namespace(namespace):
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect((host, port))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


_AHEAD = 16
"""Pieces that are read before they are sent."""


class ThreadedReader:
    """The pieces of an iterator that blocks, read by a thread of its own."""

    def __init__(self, pieces: Iterator[bytes], name: str) -> None:
        """Start the thread. `name` is the thread's."""
        self._pieces = pieces
        self._loop = asyncio.get_running_loop()
        self._read: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._room = threading.Semaphore(_AHEAD)
        self._ended = False
        threading.Thread(target=self._pump, name=name, daemon=True).start()

    async def next(self) -> bytes | None:
        """Return the next piece, None at the end. Raises what the iterator raised."""
        piece = await self._read.get()
        self._room.release()
        if isinstance(piece, Exception):
            raise piece
        return piece

    def end(self) -> None:
        """Let the thread end with the piece that it waits for."""
        self._ended = True
        self._room.release()

    def _pump(self) -> None:
        last: Exception | None = None
        try:
            for piece in self._pieces:
                self._room.acquire()
                if self._ended:
                    break
                self._put(piece)
        except Exception as error:
            last = error
        finally:
            close = getattr(self._pieces, "close", None)
            if close is not None:
                close()
        self._put(last)

    def _put(self, piece: bytes | Exception | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._read.put_nowait, piece)
