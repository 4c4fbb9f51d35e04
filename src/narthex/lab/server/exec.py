"""`kubectl exec` and `attach`: a WebSocket or SPDY connection carries the channels of a program in a pod.

The program's ends are files that block, so threads read and write them. The framing of the WebSocket is wsproto's.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, BinaryIO

import msgspec

from narthex.lab.api.errors import StatusError, bad_request, not_implemented
from narthex.lab.api.requests import ApiRequest, ExecRequest
from narthex.lab.server.channels import (
    CLOSE,
    ERROR,
    RESIZE,
    STDERR,
    STDIN,
    STDOUT,
    BadFrame,
    Channels,
    SpdyChannels,
    is_spdy,
)
from narthex.lab.server.pods import PodProcess, PodRuntime, ThreadedReader
from narthex.lab.server.websocket import MessageSocket
from narthex.runtime.http.connection import HttpConnection

_PIECE = 32 * 1024
_RECEIVE_BYTES = 64 * 1024


async def serve_exec(
    connection: HttpConnection, pods: PodRuntime | None, request: ApiRequest, command: ExecRequest
) -> None:
    """Start a program and carry its channels until it ends. Raises StatusError before anything is answered."""
    if pods is None:
        raise not_implemented(f"no pod runs here, so that nothing can be started in {command.pod}")
    channels: Channels
    try:
        if is_spdy(request.headers):
            channels = SpdyChannels(connection, request.headers, _expected(command))
        else:
            channels = _Channels(connection, ChannelSocket(request.headers))
    except BadFrame as error:
        raise bad_request(f"Upgrade request required: {error}") from None
    try:
        process = await asyncio.get_running_loop().run_in_executor(None, _start, pods, command)
    except StatusError as fault:
        # Clients answer an error before the upgrade by trying an older protocol.
        await channels.accept()
        await channels.send(ERROR, msgspec.json.encode(fault.status()))
        await channels.close()
        return
    try:
        await channels.accept()
        await _converse(channels, process)
    finally:
        process.kill()


def _start(pods: PodRuntime, command: ExecRequest) -> PodProcess:
    if not command.argv:
        streams = (command.stdin, command.stdout, command.stderr)
        return pods.attach(command.namespace, command.pod, command.container, *streams)
    return pods.exec(command.namespace, command.pod, command.container, command.argv, command.stdin, command.tty)


def _expected(command: ExecRequest) -> set[int]:
    """Return the channels that a client opens before it waits for the program."""
    needed = ((ERROR, True), (STDIN, command.stdin), (STDOUT, command.stdout), (RESIZE, command.tty))
    return {channel for channel, is_needed in (*needed, (STDERR, command.stderr)) if is_needed}


class _Channels:
    """A WebSocket on a connection."""

    def __init__(self, connection: HttpConnection, socket: ChannelSocket) -> None:
        self._connection = connection
        self._socket = socket

    async def accept(self) -> None:
        """Complete the WebSocket handshake."""
        await self._connection.write(self._socket.accept())

    async def send(self, channel: int, data: bytes) -> None:
        """Send data on a channel."""
        await self._connection.write(self._socket.message(channel, data))

    async def close(self) -> None:
        """Send the frame that closes the WebSocket."""
        await self._connection.write(self._socket.close())

    async def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield what the client sends, by channel; on CLOSE the number of the channel that ends."""
        data = self._connection.framing.trailing()
        while data or (data := await self._connection.reader.read(_RECEIVE_BYTES)):
            try:
                for message in self._socket.feed(data):
                    yield message
            except BadFrame:
                return
            if self._socket.pending:
                await self._connection.write(self._socket.pending)
                self._socket.pending = b""
            if self._socket.ended:
                return
            data = b""


async def _converse(channels: Channels, process: PodProcess) -> None:
    """Carry the channels until the program ends or the client goes, which ends the program."""
    loop = asyncio.get_running_loop()
    inputs = _Inputs(process)
    outputs = [
        asyncio.ensure_future(_output(channels, channel, file))
        for channel, file in ((STDOUT, process.stdout), (STDERR, process.stderr))
        if file is not None
    ]
    listening = asyncio.ensure_future(_listen(channels, inputs))
    try:
        written = asyncio.gather(*outputs)
        await asyncio.wait((written, listening), return_when=asyncio.FIRST_COMPLETED)
        if not written.done():
            # The client is gone; `finally` ends the program.
            raise ConnectionResetError
        await written
        code = await loop.run_in_executor(None, process.wait)
        await channels.send(ERROR, msgspec.json.encode(exit_status(code)))
        await channels.close()
    finally:
        process.kill()
        inputs.end()
        listening.cancel()
        for each in outputs:
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.gather(listening, *outputs, return_exceptions=True)


def exit_status(code: int) -> dict[str, Any]:
    """Return the Status that reports a program's exit status (remotecommand)."""
    if not code:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


async def _listen(channels: Channels, inputs: _Inputs) -> None:
    async for channel, data in channels.received():
        if channel == STDIN:
            inputs.write(data)
        elif channel == RESIZE:
            inputs.resize(data)
        elif channel == CLOSE and data[:1] == bytes((STDIN,)):
            inputs.end()


async def _output(channels: Channels, channel: int, file: BinaryIO) -> None:
    """Send what the program writes to one file until it closes it."""
    reader = ThreadedReader(_pieces(file), "api-output")
    try:
        while piece := await reader.next():
            await channels.send(channel, piece)
    finally:
        reader.end()


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    read: Callable[[int], bytes] = getattr(file, "read1", file.read)
    # Reading a terminal whose program has ended fails with EIO.
    with contextlib.suppress(OSError, ValueError):
        while piece := read(_PIECE):
            yield piece


class _Inputs:
    """The program's standard input, written by a thread."""

    def __init__(self, process: PodProcess) -> None:
        self._process = process
        self._received: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        if process.stdin is not None:
            threading.Thread(target=self._pump, args=(process.stdin,), name="api-input", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Queue data for the program, if there is any."""
        if data:
            self._received.put(data)

    def end(self) -> None:
        """Close the program's standard input after the queued data."""
        self._received.put(None)

    def resize(self, data: bytes) -> None:
        """Set the terminal's size, given as JSON."""
        try:
            size = _SIZES.decode(data)
        except msgspec.DecodeError:
            return
        self._process.resize(size.height, size.width)

    def _pump(self, file: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (data := self._received.get()) is not None:
                file.write(data)
                file.flush()
        # A terminal's master is the program's output, too, and stays open.
        if file is not self._process.stdout:
            with contextlib.suppress(OSError, ValueError):
                file.close()


class _TerminalSize(msgspec.Struct, rename="pascal"):
    height: int = 0
    width: int = 0


_SIZES = msgspec.json.Decoder(_TerminalSize)


PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Subprotocols that are spoken, the preferred one first. The fifth can close a channel (KEP-4006)."""


class ChannelSocket(MessageSocket):
    """A WebSocket whose messages begin with the number of a channel."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """Read a request's handshake. Raises BadFrame if it is none, or offers no subprotocol that is spoken here."""
        super().__init__(headers, PROTOCOLS)

    def message(self, channel: int, data: bytes) -> bytes:
        """Return a message on a channel. Raises ConnectionResetError after the end."""
        return self.binary(bytes((channel,)) + data)

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the complete messages of the client, by channel. Raises BadFrame."""
        for message in self.messages(data):
            if message:
                yield message[0], message[1:]
