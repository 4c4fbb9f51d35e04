"""DNS over HTTPS (RFC 8484): queries as HTTP requests, by HTTP/2 (library h2, if it is there) and HTTP/1.1 (h11).

Without plugin `tls` the requests are plain HTTP/1.1, for a proxy in front that encrypts.
"""

from __future__ import annotations

import base64
import binascii
import functools
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from narthex.dns.message.response import MalformedResponseError, parse_response
from narthex.dns.server.dispatcher import ServerContext
from narthex.dns.server.tcp import Plaintext, TcpConnection, TcpServer
from narthex.dns.server.tls import TlsStream
from narthex.runtime.http.connection import HttpLimits, MalformedRequest, RequestFraming

PATH = "/dns-query"
_TYPE = "application/dns-message"
_MAX_BODY = 65_535
MAX_STREAMS = 100
"""Requests at once on one HTTP/2 connection."""
_MAX_REQUESTS = 128
"""Requests of one connection that are received and not answered yet."""


def http_protocols() -> tuple[str, ...]:
    """Return the protocols that are offered to clients (ALPN)."""
    try:
        import h2.connection  # noqa: F401
    except ImportError:
        return ("http/1.1",)
    return "h2", "http/1.1"


class DohRequest(msgspec.Struct, frozen=True):
    """A query, or the status of a request that is none."""

    stream: int
    """Number of the stream; 0 with HTTP/1.1."""
    packet: bytes
    status: int = 200


def doh_request(stream: int, method: str, target: str, content_type: str, body: bytes) -> DohRequest:
    """Return the query of an HTTP request."""
    url = urlsplit(target)
    if url.path != PATH:
        return DohRequest(stream, b"", 404)
    if method == "POST":
        if content_type.partition(";")[0].strip().lower() != _TYPE:
            return DohRequest(stream, b"", 415)
        return DohRequest(stream, body) if len(body) <= _MAX_BODY else DohRequest(stream, b"", 413)
    if method not in ("GET", "HEAD"):
        return DohRequest(stream, b"", 405)
    given = parse_qs(url.query, max_num_fields=10).get("dns", [""])[0]
    try:
        packet = base64.b64decode(given + "=" * (-len(given) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        packet = b""
    return DohRequest(stream, packet) if packet else DohRequest(stream, b"", 400)


def _fields(message: bytes) -> list[tuple[str, str]]:
    """Return the header fields of a response; it may be cached for as long as its records."""
    try:
        ttl = parse_response(message).ttl
    except MalformedResponseError:
        ttl = 0
    return [("content-type", _TYPE), ("cache-control", f"max-age={ttl}")]


class Http1:
    """Requests and responses of HTTP/1.1, one after the other."""

    def __init__(self) -> None:
        self._framing = RequestFraming(HttpLimits(body=_MAX_BODY + 1))
        self._waits = False
        """True while a request is not answered: the next one is not read."""
        self.ends = False

    def receive(self, data: bytes) -> tuple[list[DohRequest], bytes]:
        """Return the requests that are complete, and bytes to send at once."""
        self._framing.feed(data)
        return self._next(), b""

    def _next(self) -> list[DohRequest]:
        if self._waits or self.ends:
            return []
        try:
            request = self._framing.next_request()
        except MalformedRequest as error:
            self._waits = self.ends = True
            return [DohRequest(0, b"", error.status)]
        if request is None:
            return []
        self._waits = True
        kind = next((value for name, value in request.headers.items() if name.lower() == "content-type"), "")
        return [doh_request(0, request.method, f"{request.path}?{request.query}", kind, request.body)]

    def respond(self, _stream: int, status: int, message: bytes) -> tuple[bytes, list[DohRequest]]:
        """Return the bytes of a response, and the next request if it is complete."""
        fields = _fields(message) if status == 200 else [("content-type", "text/plain")]
        data = self._framing.response(status, message, fields)
        self._waits = False
        self.ends = self.ends or not self._framing.persistent
        return data, self._next()


class Http2:
    """Requests and responses of HTTP/2 (library h2)."""

    def __init__(self) -> None:
        import h2.config
        import h2.connection
        import h2.events
        import h2.exceptions
        import h2.settings

        self._events: Any = h2.events
        self._error = h2.exceptions.ProtocolError
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self._connection = h2.connection.H2Connection(config)
        self._connection.update_settings(
            {
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                h2.settings.SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            }
        )
        self._connection.initiate_connection()
        self._requests: dict[int, tuple[dict[str, str], bytearray]] = {}
        self._unsent: dict[int, bytes] = {}
        """Rest of responses by stream, while the client's windows are full."""
        self.ends = False

    def receive(self, data: bytes) -> tuple[list[DohRequest], bytes]:
        """Return the requests that are complete, and bytes to send at once."""
        found: list[DohRequest] = []
        try:
            for event in self._connection.receive_data(data) if data else ():
                self._take(event, found)
            self._send_more()
        except self._error:
            self.ends = True
        return found, self._connection.data_to_send()

    def _take(self, event: Any, found: list[DohRequest]) -> None:
        events = self._events
        if isinstance(event, events.RequestReceived):
            self._requests[event.stream_id] = dict(event.headers), bytearray()
        elif isinstance(event, events.DataReceived):
            _, body = self._requests.get(event.stream_id, ({}, bytearray()))
            if len(body) <= _MAX_BODY:
                body += event.data
            self._connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, events.StreamEnded):
            headers, body = self._requests.pop(event.stream_id, ({}, bytearray()))
            method, target, kind = (headers.get(name, "") for name in (":method", ":path", "content-type"))
            found.append(doh_request(event.stream_id, method, target, kind, bytes(body)))
        elif isinstance(event, events.StreamReset):
            self._requests.pop(event.stream_id, None)
            self._unsent.pop(event.stream_id, None)
        elif isinstance(event, events.ConnectionTerminated):
            self.ends = True

    def respond(self, stream: int, status: int, message: bytes) -> tuple[bytes, list[DohRequest]]:
        """Return the bytes of a response, as far as the client's windows take it."""
        fields = _fields(message) if status == 200 else []
        try:
            self._connection.send_headers(
                stream, [(":status", str(status)), *fields, ("content-length", str(len(message)))]
            )
            self._unsent[stream] = message
            self._send_more()
        except self._error:
            # The client has reset the stream.
            self._unsent.pop(stream, None)
        return self._connection.data_to_send(), []

    def _send_more(self) -> None:
        for stream, rest in tuple(self._unsent.items()):
            while True:
                room = min(self._connection.local_flow_control_window(stream), self._connection.max_outbound_frame_size)
                if rest and room <= 0:
                    self._unsent[stream] = rest
                    break
                part, rest = rest[:room], rest[room:]
                self._connection.send_data(stream, part, end_stream=not rest)
                if not rest:
                    del self._unsent[stream]
                    break


class HttpsConnection(TcpConnection):
    """One connection of HTTP requests."""

    def __init__(self, server: TcpServer, sock: socket.socket, address: str, port: int, stream: Plaintext) -> None:
        super().__init__(server, sock, address, port, stream)
        self._http: Http1 | Http2 | None = None
        self._requests: deque[DohRequest] = deque()

    def _answer_queries(self) -> int:
        """Answer complete requests until none is left or a limit is reached. Return their number."""
        started = time.perf_counter()
        if self._http is None:
            if not self._in and not self._ended:
                return 0
            self._http = Http2() if getattr(self._stream, "protocol", "") == "h2" else Http1()
        if self._in and len(self._requests) < _MAX_REQUESTS:
            found, reply = self._http.receive(bytes(self._in))
            self._in.clear()
            self._requests += found
            self._out += self._stream.send(reply) if reply else b""
        answered = 0
        self._answering = True
        while self._requests and self._may_answer():
            request = self._requests.popleft()
            answered += 1
            respond = functools.partial(self._respond, request.stream, 200)
            if request.status == 200:
                self._answer_request(request, respond)
            else:
                self._respond(request.stream, request.status)
        self._answering = False
        self._ended = self._ended or self._http.ends
        if answered:
            self._note_answers(started, answered)
        return answered

    def _answer_request(self, request: DohRequest, respond: Callable[[bytes], None]) -> None:
        answers: list[bytes] = []

        def send(message: bytes) -> None:
            """Keep the message for the check below, and send it to the client."""
            answers.append(message)
            respond(message)

        pending = self._pending
        self._answer(request.packet, send)
        if not answers and self._pending == pending:
            # A response, a transfer, or less than a header: over HTTP, silence would be a request without a response.
            self._transfer = None
            self._respond(request.stream, 400)

    def _respond(self, stream: int, status: int, message: bytes = b"") -> None:
        assert self._http is not None
        data, following = self._http.respond(stream, status, message)
        self._requests += following
        self._out += self._stream.send(data) if data else b""


class HttpsServer(TcpServer):
    """Serves DNS over HTTPS at one listening socket, or over plain HTTP without TLS settings."""

    def __init__(self, sock: socket.socket, context: ServerContext, max_bytes: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(sock, context, max_bytes)
        self._tls = tls

    def connection(self, sock: socket.socket, address: str, port: int) -> TcpConnection:
        """Return the connection of a socket that was accepted."""
        stream = Plaintext() if self._tls is None else TlsStream(self._tls)
        return HttpsConnection(self, sock, address, port, stream)
