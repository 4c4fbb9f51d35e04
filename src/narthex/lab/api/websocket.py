"""WebSockets (RFC 6455): the handshake's answer and frames, as bytes; and the channels that Kubernetes sends in them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
"""Those that are spoken, the best first. The fifth can close a channel (KEP-4006)."""
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
_TEXT, _BINARY, _END, _PING, _PONG = 1, 2, 8, 9, 10
MOST_MESSAGE = 4 * 1024 * 1024
"""Bytes of a message from a client."""


class BadFrame(ValueError):
    """What came is no WebSocket."""


def wanted(headers: Mapping[str, str]) -> bool:
    """Whether a request asks for a WebSocket."""
    connection = headers.get("connection", "").lower()
    return headers.get("upgrade", "").lower() == "websocket" and "upgrade" in connection


def handshake(headers: Mapping[str, str]) -> dict[str, str] | None:
    """The headers of the answer 101, None when the client speaks none of the protocols."""
    offered = [each.strip() for each in headers.get("sec-websocket-protocol", "").split(",")]
    protocol = next((each for each in PROTOCOLS if each in offered), None)
    key = headers.get("sec-websocket-key", "")
    if protocol is None or not key:
        return None
    accept = base64.b64encode(hashlib.sha1((key + _GUID).encode(), usedforsecurity=False).digest()).decode()
    return {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": accept,
        "Sec-WebSocket-Protocol": protocol,
    }


def message(data: bytes) -> bytes:
    """A binary message, as a server sends it."""
    return _frame(_BINARY, data)


def closing(code: int = 1000) -> bytes:
    """The end."""
    return _frame(_END, code.to_bytes(2, "big"))


def _frame(opcode: int, data: bytes) -> bytes:
    length = len(data)
    if length < 126:
        head = bytes((0x80 | opcode, length))
    elif length < 1 << 16:
        head = bytes((0x80 | opcode, 126)) + length.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 127)) + length.to_bytes(8, "big")
    return head + data


class Incoming:
    """What a client sends: bytes in, messages out. Answers to pings are collected in `replies`."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._message = bytearray()
        self.replies: list[bytes] = []
        self.ended = False
        """The client has said goodbye."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Messages that are whole now. Raises BadFrame."""
        self._buffer += data
        while not self.ended and (found := self._next()) is not None:
            final, opcode, payload = found
            if opcode == _END:
                self.ended = True
            elif opcode == _PING:
                self.replies.append(_frame(_PONG, payload))
            elif opcode in (0, _TEXT, _BINARY):
                self._message += payload
                if len(self._message) > MOST_MESSAGE:
                    raise BadFrame(f"a message has at most {MOST_MESSAGE} bytes here")
                if final:
                    yield bytes(self._message)
                    self._message.clear()
            elif opcode != _PONG:
                raise BadFrame(f"opcode {opcode} is not known")

    def _next(self) -> tuple[bool, int, bytes] | None:
        held = self._buffer
        if len(held) < 2:
            return None
        length, at = held[1] & 0x7F, 2
        if length > 125:
            size = 2 if length == 126 else 8
            if len(held) < at + size:
                return None
            length = int.from_bytes(held[at : at + size], "big")
            at += size
        if length > MOST_MESSAGE:
            raise BadFrame(f"a frame has at most {MOST_MESSAGE} bytes here")
        if not held[1] & 0x80:
            raise BadFrame("frames of clients are masked")
        if len(held) < at + 4 + length:
            return None
        mask, payload = held[at : at + 4], held[at + 4 : at + 4 + length]
        final, opcode = bool(held[0] & 0x80), held[0] & 0x0F
        del held[: at + 4 + length]
        return final, opcode, _unmasked(payload, mask)


def _unmasked(data: bytearray, mask: bytearray) -> bytes:
    length = len(data)
    key = (bytes(mask) * (length // 4 + 1))[:length]
    return (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(length, "big")
