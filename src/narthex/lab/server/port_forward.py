"""`kubectl port-forward`: connections to the ports of a pod, over SPDY, SPDY in a WebSocket, or the channels of a WebSocket.

With SPDY, each connection has two streams with the same `requestid`: `data`, and `error` for a text that says what failed. Without,
port number i of the request has the channels 2i and 2i + 1, which begin with the port's number.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Protocol

from narthex.lab.api.errors import StatusError, bad_request, not_implemented
from narthex.lab.api.requests import ApiRequest, PortForwardRequest
from narthex.lab.server.channels import BadFrame, accept_spdy, is_spdy
from narthex.lab.server.pods import DIALERS, PodRuntime
from narthex.lab.server.spdy import BadSpdyFrame, SpdyData, SpdyFraming, SpdyReset, SpdyStream
from narthex.lab.server.websocket import MessageSocket
from narthex.runtime.http.connection import HttpConnection

_PROTOCOL = "portforward.k8s.io"
_TUNNEL = f"SPDY/3.1+{_PROTOCOL}"
_CHANNELS = ("v4.channel.k8s.io", _PROTOCOL)
_PIECE = 32 * 1024
_RECEIVE_BYTES = 64 * 1024


async def serve_port_forward(
    connection: HttpConnection, pods: PodRuntime | None, request: ApiRequest, to: PortForwardRequest
) -> None:
    """Carry connections until the client goes. Raises StatusError before anything is answered."""
    if pods is None:
        raise not_implemented(f"no pod runs here, so that nothing can be reached in {to.pod}")
    if is_spdy(request.headers):
        if _PROTOCOL not in request.headers.get("x-stream-protocol-version", ""):
            raise bad_request(f"Upgrade request required: the client does not offer {_PROTOCOL}")
        await accept_spdy(connection, _PROTOCOL)
        await _SpdyForwarder(_Plain(connection), pods, to).run()
        return
    try:
        messages = MessageSocket(request.headers, (_TUNNEL, *_CHANNELS))
    except BadFrame as error:
        raise bad_request(f"Upgrade request required: {error}") from None
    await connection.write(messages.accept())
    tunnel = _Tunnel(connection, messages)
    if messages.protocol == _TUNNEL:
        await _SpdyForwarder(tunnel, pods, to).run()
    else:
        await _ChannelForwarder(tunnel, pods, to).run()


class _Transport(Protocol):
    """What carries the frames."""

    async def write(self, data: bytes) -> None:
        """Send bytes."""

    def received(self) -> AsyncIterator[bytes]:
        """Yield what the client sends until it ends."""


class _Plain:
    """The connection itself."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection

    async def write(self, data: bytes) -> None:
        """Send data to the client."""
        await self._connection.write(data)

    async def received(self) -> AsyncIterator[bytes]:
        """Yield what follows the request head, then what the client sends until it ends."""
        data = self._connection.framing.take_trailing()
        while data or (data := await self._connection.reader.read(_RECEIVE_BYTES)):
            yield data
            data = b""


class _Tunnel:
    """Binary messages of a WebSocket."""

    def __init__(self, connection: HttpConnection, messages: MessageSocket) -> None:
        self._plain = _Plain(connection)
        self._messages = messages

    async def write(self, data: bytes) -> None:
        """Send data to the client as one binary message."""
        await self._plain.write(self._messages.binary(data))

    async def received(self) -> AsyncIterator[bytes]:
        """Yield the client's messages until it closes the WebSocket or sends a bad frame; answer its pings."""
        async for data in self._plain.received():
            try:
                for message in self._messages.messages(data):
                    yield message
            except BadFrame:
                return
            if self._messages.pending:
                await self._plain.write(self._messages.pending)
                self._messages.pending = b""
            if self._messages.ended:
                return


class _Connections:
    """The connections to a pod, by a number of the caller's."""

    def __init__(self, pods: PodRuntime, to: PortForwardRequest) -> None:
        self._pods = pods
        self._to = to
        self._writers: dict[int, asyncio.Future[asyncio.StreamWriter | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, number: int, port: int, client: _Client) -> None:
        """Connect to a port, and send the client what comes from there."""
        self._writers[number] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._carry(number, port, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def write(self, number: int, data: bytes, *, last: bool = False) -> None:
        """Send data to the pod; the client waits while the pod does not read."""
        writer = await self._writers[number] if number in self._writers else None
        if writer is None:
            return
        with contextlib.suppress(OSError, RuntimeError):
            writer.write(data)
            await writer.drain()
            if last:
                writer.write_eof()

    def end(self, number: int) -> None:
        """Reset a connection."""
        future = self._writers.pop(number, None)
        if future is not None and future.done() and (writer := future.result()) is not None:
            writer.transport.abort()

    async def close(self) -> None:
        """Reset all connections."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for number in tuple(self._writers):
            self.end(number)

    async def _carry(self, number: int, port: int, client: _Client) -> None:
        future = self._writers[number]

        def connect() -> socket.socket:
            """Return a connection to the pod's port."""
            return self._pods.connect(self._to.namespace, self._to.pod, port)

        try:
            sock = await asyncio.get_running_loop().run_in_executor(DIALERS, connect)
            reader, writer = await asyncio.open_connection(sock=sock)
        except (OSError, StatusError) as error:
            why = error.message if isinstance(error, StatusError) else error.strerror or str(error)
            future.set_result(None)
            await client.ended(number, f"error forwarding port {port} to pod {self._to.pod}: {why}")
            return
        future.set_result(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                await client.data(number, data)
        with contextlib.suppress(OSError):
            await client.ended(number, "")


class _Client(Protocol):
    """The client's side of connections."""

    async def data(self, number: int, data: bytes) -> None:
        """Send what the pod has sent."""

    async def ended(self, number: int, why: str) -> None:
        """Say that a connection has ended, and why if it failed."""


class _SpdyForwarder:
    """Connections by their data streams."""

    def __init__(self, transport: _Transport, pods: PodRuntime, to: PortForwardRequest) -> None:
        self._transport = transport
        self._framing = SpdyFraming()
        self._connections = _Connections(pods, to)
        self._errors: dict[str, int] = {}
        """Error streams by request."""
        self._requests: dict[int, str] = {}
        """Requests by data stream."""

    async def run(self) -> None:
        """Handle the client's frames until it ends or sends a bad one; then reset the connections to the pod."""
        try:
            async for data in self._transport.received():
                for event in self._framing.feed(data):
                    await self._handle(event)
                if self._framing.pending:
                    pending, self._framing.pending = self._framing.pending, b""
                    await self._transport.write(pending)
        except BadSpdyFrame:
            return
        finally:
            await self._connections.close()

    async def _handle(self, event: SpdyStream | SpdyData | SpdyReset) -> None:
        if isinstance(event, SpdyReset):
            self._connections.end(event.number)
        elif isinstance(event, SpdyData):
            if event.number in self._requests:
                await self._connections.write(event.number, event.data, last=event.last)
        elif event.headers.get("streamtype") == "error":
            self._errors[event.headers.get("requestid", "")] = event.number
        else:
            port = event.headers.get("port", "")
            self._requests[event.number] = event.headers.get("requestid", "")
            self._connections.open(event.number, int(port) if port.isdigit() else 0, self)

    async def data(self, number: int, data: bytes) -> None:
        """Send the pod's data on its data stream."""
        await self._transport.write(self._framing.data(number, data))

    async def ended(self, number: int, why: str) -> None:
        """Send the reason on the error stream of a request, and close both of its streams."""
        error = self._errors.pop(self._requests.pop(number, ""), 0)
        await self._transport.write(
            self._framing.data(error, why.encode(), last=True) + self._framing.data(number, b"", last=True)
        )
        for each in (number, error):
            self._framing.forget(each)


class _ChannelForwarder:
    """Connections by their data channels, one for each port."""

    def __init__(self, transport: _Transport, pods: PodRuntime, to: PortForwardRequest) -> None:
        self._transport = transport
        self._ports = to.ports
        self._connections = _Connections(pods, to)

    async def run(self) -> None:
        """Announce each port on its two channels, and handle the client's messages until it ends."""
        try:
            for index, port in enumerate(self._ports):
                for channel in (2 * index, 2 * index + 1):
                    await self._transport.write(bytes((channel,)) + port.to_bytes(2, "little"))
                self._connections.open(2 * index, port, self)
            async for message in self._transport.received():
                if message:
                    await self._connections.write(message[0], message[1:])
        finally:
            await self._connections.close()

    async def data(self, number: int, data: bytes) -> None:
        """Send the pod's data on its data channel."""
        await self._transport.write(bytes((number,)) + data)

    async def ended(self, number: int, why: str) -> None:
        """Send the reason of a failure on the port's error channel."""
        if why:
            await self._transport.write(bytes((number + 1,)) + why.encode())
