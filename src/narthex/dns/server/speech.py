"""What the server's process and its workers say to each other, over a pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.interfaces import Transport
from narthex.dns.plugins.loop import Secrets
from narthex.dns.server.meter import ResolverCounts
from narthex.dns.server.tally import Counts
from narthex.dns.zone.changes import Change


class Listener(msgspec.Struct, frozen=True):
    """An inherited socket, and which server blocks answer at it."""

    fd: int
    transport: Transport
    blocks: tuple[int, ...]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first thing that a worker is told."""

    blocks: tuple[ServerBlock, ...]
    listeners: tuple[Listener, ...]
    own: tuple[str, ...] = ()
    """Addresses at which this server is reached (row D30)."""
    recursion: tuple[str, ...] = ()
    """Networks whose questions may be handed on to others."""
    first: bool = True
    """One worker of several does what need be done but once."""
    probes: Secrets = Secrets("", "")
    """What questions to ourselves are known by (row S11)."""


class News(msgspec.Struct, frozen=True, tag=True):
    """What has changed for the server block of this number."""

    block: int
    change: Change


class Open(msgspec.Struct, frozen=True, tag=True):
    """Begin to answer."""


class Count(msgspec.Struct, frozen=True, tag=True):
    """Say what has happened since this was asked last. The answer is Counted."""


class Counted(msgspec.Struct, frozen=True):
    """What a worker has done since this was asked last; of resolvers, by server block."""

    counts: Counts
    resolvers: dict[int, ResolverCounts] = {}


Told = Setup | News | Open | Count

_TOLD = msgspec.msgpack.Decoder(Told)
_COUNTED = msgspec.msgpack.Decoder(Counted)
_SIZE = 4
_READ = 1 << 20


def frame(message: object) -> bytes:
    """A message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_SIZE, "big") + body


class Reader:
    """The worker's side: bytes in, messages out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._held = bytearray()

    def read(self) -> Iterator[Told]:
        """The messages that are whole after one read. Raises EOFError when the server has gone."""
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the server has ended")
        self._held += data
        at = 0
        while at + _SIZE <= len(self._held):
            end = at + _SIZE + int.from_bytes(self._held[at : at + _SIZE], "big")
            if end > len(self._held):
                break
            yield _TOLD.decode(memoryview(self._held)[at + _SIZE : end].tobytes())
            at = end
        del self._held[:at]


def receive_counted(sock: socket.socket) -> Counted:
    """The server's side. Raises EOFError and OSError."""
    return _COUNTED.decode(_exactly(sock, int.from_bytes(_exactly(sock, _SIZE), "big")))


def _exactly(sock: socket.socket, size: int) -> bytes:
    held = bytearray()
    while len(held) < size:
        data = sock.recv(size - len(held))
        if not data:
            raise EOFError("the worker has ended")
        held += data
    return bytes(held)
