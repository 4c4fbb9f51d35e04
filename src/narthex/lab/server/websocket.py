"""The WebSocket of `kubectl exec`: a program's channels as messages. Framing is wsproto's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Message, Ping, Request
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Subprotocols that are spoken, the preferred one first. The fifth can close a channel (KEP-4006)."""
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
MAX_MESSAGE = 4 * 1024 * 1024
"""Bytes of a message from a client."""


class BadFrame(ValueError):
    """The client's bytes are no WebSocket frames, or too large a message."""


class ChannelSocket:
    """The server side of a WebSocket whose messages begin with the number of a channel. It does no I/O."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """Read a request's handshake. Raises BadFrame if it is none, or offers no subprotocol that is spoken here."""
        self._socket = WSConnection(ConnectionType.SERVER)
        self._message = bytearray()
        self.pending = b""
        """Bytes to send to the client: replies to its control frames."""
        self.ended = False
        """True once the client has closed the WebSocket."""
        try:
            fields = [(name.encode(), value.encode()) for name, value in headers.items()]
            self._socket.initiate_upgrade_connection(fields, "/")
            request = next(self._socket.events())
        except (RemoteProtocolError, LocalProtocolError) as error:
            raise BadFrame(str(error)) from None
        offered = request.subprotocols if isinstance(request, Request) else []
        self._protocol = next((each for each in PROTOCOLS if each in offered), None)
        if self._protocol is None or not headers.get("sec-websocket-key"):
            raise BadFrame("no key, or no subprotocol in common")

    def accept(self) -> bytes:
        """Return the response to the handshake."""
        return self._send(AcceptConnection(subprotocol=self._protocol))

    def message(self, channel: int, data: bytes) -> bytes:
        """Return a message on a channel. Raises ConnectionResetError after the end."""
        return self._send(BytesMessage(bytes((channel,)) + data))

    def close(self) -> bytes:
        """Return the frame that ends the WebSocket."""
        return self._send(CloseConnection(1000))

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the complete messages of the client, by channel. Raises BadFrame."""
        try:
            self._socket.receive_data(data)
            for event in self._socket.events():
                if isinstance(event, CloseConnection):
                    if self._socket.state is not ConnectionState.REMOTE_CLOSING:
                        raise BadFrame(event.reason)
                    self.ended = True
                elif isinstance(event, Ping):
                    self.pending += self._send(event.response())
                elif isinstance(event, Message):
                    yield from self._collected(event)
        except RemoteProtocolError as error:
            raise BadFrame(str(error)) from None

    def _collected(self, event: Message[Any]) -> Iterator[tuple[int, bytes]]:
        self._message += event.data.encode() if isinstance(event.data, str) else event.data
        if len(self._message) > MAX_MESSAGE:
            raise BadFrame(f"a message has at most {MAX_MESSAGE} bytes here")
        if event.message_finished:
            message = bytes(self._message)
            self._message.clear()
            if message:
                yield message[0], message[1:]

    def _send(self, event: Event) -> bytes:
        try:
            return self._socket.send(event)
        except LocalProtocolError:
            raise ConnectionResetError from None
