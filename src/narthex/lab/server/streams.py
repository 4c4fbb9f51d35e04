"""What comes from a pod, sent as it comes: a thread reads, since those who read pods wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

from narthex.lab.api.errors import ApiFault
from narthex.lab.api.requests import Logs
from narthex.lab.server.connection import Connection
from narthex.lab.server.pods import Pods

_AHEAD = 16
"""Pieces that are read before they can be sent."""


async def send_logs(connection: Connection, pods: Pods | None, asked: Logs) -> None:
    """What a container writes, until it or the client ends. Raises ApiFault before anything is sent."""
    if pods is None:
        raise ApiFault(501, "NotImplemented", f"no pod runs here, so that pod {asked.namespace}/{asked.pod} has no log")
    pieces = pods.logs(
        asked.namespace,
        asked.pod,
        asked.container,
        asked.tail,
        asked.follow,
        asked.since,
        asked.previous,
        asked.timestamps,
    )
    pump = _Pump(pieces)
    try:
        # A refusal may come with the first piece, when the iterator is a generator.
        piece = await pump.next()
        await connection.head(200, {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"})
        left = asked.limit
        while piece is not None and left != 0:
            piece = piece if left is None else piece[:left]
            left = None if left is None else left - len(piece)
            if piece:
                await connection.chunks([piece])
            if connection.gone or connection.writer.is_closing():
                raise ConnectionResetError
            piece = await pump.next()
        await connection.last_chunk()
    finally:
        pump.end()


class _Pump:
    """Pieces out of an iterator that blocks, in a thread that ends with it or when nobody wants more."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._loop = asyncio.get_running_loop()
        self._read: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._room = threading.Semaphore(_AHEAD)
        self._over = False
        threading.Thread(target=self._pump, name="api-logs", daemon=True).start()

    async def next(self) -> bytes | None:
        """The next piece, None at the end. Raises what reading raised."""
        found = await self._read.get()
        self._room.release()
        if isinstance(found, Exception):
            raise found
        return found

    def end(self) -> None:
        """Nothing more is wanted."""
        self._over = True
        self._room.release()

    def _pump(self) -> None:
        last: Exception | None = None
        try:
            for piece in self._pieces:
                self._room.acquire()
                if self._over:
                    break
                self._put(piece)
        except Exception as error:
            last = error
        finally:
            close = getattr(self._pieces, "close", None)
            if close is not None:
                close()
        self._put(last)

    def _put(self, found: bytes | Exception | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._read.put_nowait, found)
