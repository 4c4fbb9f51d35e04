"""Numbered channels between a client and a program (remotecommand), and how SPDY carries them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from narthex.lab.server.spdy import BadSpdyFrame, SpdyData, SpdyFraming, SpdyStream
from narthex.runtime.http.connection import HttpConnection

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
_STREAMS = {"stdin": STDIN, "stdout": STDOUT, "stderr": STDERR, "error": ERROR, "resize": RESIZE}
_SPDY = "SPDY/3.1"
_PROTOCOL = "v4.channel.k8s.io"
_OPEN_SECONDS = 30.0
"""Time for a client to open its streams, as in upstream's streamCreationTimeout."""
_RECEIVE_BYTES = 64 * 1024


class BadFrame(ValueError):
    """A handshake or bytes that cannot be read, or too large a message."""


class Channels(Protocol):
    """The client's side of a program."""

    async def accept(self) -> None:
        """Answer the handshake."""

    async def send(self, channel: int, data: bytes) -> None:
        """Send data on a channel."""

    async def close(self) -> None:
        """End all channels."""

    def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield what the client sends, by channel; on CLOSE the number of the channel that ends."""


def is_spdy(headers: Mapping[str, str]) -> bool:
    """Return True if a request asks for SPDY."""
    return headers.get("upgrade", "").lower() == _SPDY.lower()


async def accept_spdy(connection: HttpConnection, protocol: str) -> None:
    """Answer a request that asks for SPDY."""
    fields = (("Connection", "Upgrade"), ("Upgrade", _SPDY), ("X-Stream-Protocol-Version", protocol))
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    await connection.write(f"HTTP/1.1 101 Switching Protocols\r\n{head}\r\n".encode())


class SpdyChannels:
    """SPDY on a connection, with one stream for each channel."""

    def __init__(self, connection: HttpConnection, headers: Mapping[str, str], expected: set[int]) -> None:
        """Read a request's handshake. `expected` are the channels that the client will open. Raises BadFrame."""
        if _PROTOCOL not in headers.get("x-stream-protocol-version", ""):
            raise BadFrame(f"the client does not offer {_PROTOCOL}")
        self._connection = connection
        self._expected = expected
        self._framing = SpdyFraming()
        self._streams: dict[int, int] = {}
        """Numbers of streams by channel."""
        self._early: deque[tuple[int, bytes]] = deque()
        """What was received while streams were still missing; the client's window bounds it."""

    async def accept(self) -> None:
        """Answer the handshake and wait for the streams. Raises ConnectionResetError if they do not come."""
        await accept_spdy(self._connection, _PROTOCOL)
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                while not self._expected <= self._streams.keys():
                    if not await self._receive():
                        raise ConnectionResetError
        except (TimeoutError, BadSpdyFrame):
            raise ConnectionResetError from None

    async def send(self, channel: int, data: bytes) -> None:
        """Send data on a channel, unless the client has not opened it."""
        if channel in self._streams:
            await self._connection.write(self._framing.data(self._streams[channel], data))

    async def close(self) -> None:
        """End all streams."""
        ends = [self._framing.data(number, b"", last=True) for number in self._streams.values()]
        await self._connection.write(b"".join(ends) + self._framing.goaway())

    async def received(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield what the client sends, by channel; on CLOSE the number of the channel that ends."""
        while True:
            while self._early:
                yield self._early.popleft()
            try:
                if not await self._receive():
                    return
            except BadSpdyFrame:
                return

    async def _receive(self) -> bool:
        """Read once; return False at the end."""
        data = self._connection.framing.take_trailing() or await self._connection.reader.read(_RECEIVE_BYTES)
        channels = {number: channel for channel, number in self._streams.items()}
        for event in self._framing.feed(data):
            if isinstance(event, SpdyStream):
                channel = _STREAMS.get(event.headers.get("streamtype", ""))
                if channel is not None:
                    self._streams[channel] = event.number
                    channels[event.number] = channel
            elif isinstance(event, SpdyData) and event.number in channels:
                if event.data:
                    self._early.append((channels[event.number], event.data))
                if event.last:
                    self._early.append((CLOSE, bytes((channels[event.number],))))
        if self._framing.pending:
            await self._connection.write(self._framing.pending)
            self._framing.pending = b""
        return bool(data)
