"""Blocking reads in threads, for the server's asyncio loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

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
