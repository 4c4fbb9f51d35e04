"""The server side of a WebSocket, without I/O. The framing is wsproto's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Event, Message, Ping, Request
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from narthex.lab.server.channels import BadFrame

MAX_MESSAGE = 4 * 1024 * 1024
"""Bytes of a message from a client."""


class MessageSocket:
    """A WebSocket on a connection."""

    def __init__(self, headers: Mapping[str, str], protocols: Sequence[str]) -> None:
        """Read a request's handshake. Raises BadFrame if it is none, or offers none of the subprotocols."""
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
        found = next((each for each in protocols if each in offered), None)
        if found is None or not headers.get("sec-websocket-key"):
            raise BadFrame("no key, or no subprotocol in common")
        self.protocol = found

    def accept(self) -> bytes:
        """Return the response to the handshake."""
        return self._send(AcceptConnection(subprotocol=self.protocol))

    def binary(self, data: bytes) -> bytes:
        """Return a binary message. Raises ConnectionResetError after the end."""
        return self._send(BytesMessage(data))

    def close(self) -> bytes:
        """Return the frame that ends the WebSocket."""
        return self._send(CloseConnection(1000))

    def messages(self, data: bytes) -> Iterator[bytes]:
        """Yield the complete messages of the client. Raises BadFrame."""
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

    def _collected(self, event: Message[Any]) -> Iterator[bytes]:
        self._message += event.data.encode() if isinstance(event.data, str) else event.data
        if len(self._message) > MAX_MESSAGE:
            raise BadFrame(f"a message has at most {MAX_MESSAGE} bytes here")
        if event.message_finished:
            message = bytes(self._message)
            self._message.clear()
            yield message

    def _send(self, event: Event) -> bytes:
        try:
            return self._socket.send(event)
        except LocalProtocolError:
            raise ConnectionResetError from None
