"""A conversation between a client and a program in a pod, over whatever carries its channels.

The program's ends are files that block, so threads read and write them.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, BinaryIO, Protocol

import msgspec

from narthex.lab.api.websocket import CLOSE, ERROR, RESIZE, STDERR, STDIN, STDOUT
from narthex.lab.server.pods import Process

_PIECE = 32 * 1024
_AHEAD = 8


class Carrier(Protocol):
    """What carries channels to a client and back."""

    async def send(self, channel: int, data: bytes) -> None:
        """Send on a channel. Raises ConnectionError."""
        ...

    async def close(self) -> None:
        """All has been said."""
        ...

    def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """What comes, by channel; on CLOSE the number of the channel that ends. It ends with the connection."""
        ...


async def converse(carrier: Carrier, process: Process) -> None:
    """Carry what is said until the program ends or the client goes, which ends the program."""
    loop = asyncio.get_running_loop()
    inputs = _Inputs(process)
    outputs = [
        asyncio.ensure_future(_output(carrier, channel, file))
        for channel, file in ((STDOUT, process.stdout), (STDERR, process.stderr))
        if file is not None
    ]
    listening = asyncio.ensure_future(_listen(carrier, inputs))
    try:
        said = asyncio.ensure_future(_all(outputs))
        await asyncio.wait((said, listening), return_when=asyncio.FIRST_COMPLETED)
        if not said.done():
            # The client is gone, and with it the reason for the program.
            raise ConnectionResetError
        await said
        code = await loop.run_in_executor(None, process.wait)
        await carrier.send(ERROR, msgspec.json.encode(exit_status(code)))
        await carrier.close()
    finally:
        process.kill()
        inputs.end()
        listening.cancel()
        for each in outputs:
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(listening, *outputs, return_exceptions=True)


def exit_status(code: int) -> dict[str, Any]:
    """How a program has ended, as remotecommand says it."""
    if not code:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


async def _all(outputs: Sequence[asyncio.Future[None]]) -> None:
    for each in outputs:
        await each


async def _listen(carrier: Carrier, inputs: _Inputs) -> None:
    async for channel, data in carrier.received():
        if channel == STDIN:
            inputs.write(data)
        elif channel == RESIZE:
            inputs.resize(data)
        elif channel == CLOSE and data[:1] == bytes((STDIN,)):
            inputs.end()


async def _output(carrier: Carrier, channel: int, file: BinaryIO) -> None:
    """What the program says on one channel, until it closes it."""
    reader = _Reader(file)
    while piece := await reader.next():
        await carrier.send(channel, piece)


class _Reader:
    """Pieces of a file, read by a thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._read: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = threading.Semaphore(_AHEAD)
        threading.Thread(target=self._pump, name="api-output", daemon=True).start()

    async def next(self) -> bytes:
        """The next piece, empty at the end."""
        piece = await self._read.get()
        self._room.release()
        return piece

    def _pump(self) -> None:
        read: Callable[[int], bytes] = getattr(self._file, "read1", self._file.read)
        while True:
            self._room.acquire()
            try:
                piece = read(_PIECE)
            except (OSError, ValueError):
                # A terminal whose program has ended says EIO.
                piece = b""
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._read.put_nowait, piece)
            if not piece:
                return


class _Inputs:
    """What the client says, written by a thread."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        if process.stdin is not None:
            threading.Thread(target=self._pump, args=(process.stdin,), name="api-input", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Some more of it."""
        if data:
            self._said.put(data)

    def end(self) -> None:
        """Nothing more comes."""
        self._said.put(None)

    def resize(self, data: bytes) -> None:
        """The terminal's size, as JSON."""
        try:
            size = msgspec.json.decode(data, type=_Size)
        except msgspec.DecodeError:
            return
        self._process.resize(size.height, size.width)

    def _pump(self, file: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (data := self._said.get()) is not None:
                file.write(data)
                file.flush()
        # A terminal's master is the program's output, too, and stays open.
        if file is not self._process.stdout:
            with contextlib.suppress(OSError, ValueError):
                file.close()


class _Size(msgspec.Struct, rename="pascal"):
    height: int = 0
    width: int = 0
