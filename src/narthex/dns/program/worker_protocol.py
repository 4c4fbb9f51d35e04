"""The messages between the main process and its workers, over a pair of sockets: a length, then MessagePack."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Literal

import msgspec

from narthex.dns.corefile.settings import ServerBlock
from narthex.dns.plugins.loop import LoopProbeSecrets
from narthex.dns.server.counters import AnswerCounts, ResolverCounts
from narthex.dns.zone.changes import ZoneChange
from narthex.linux.module_process import LENGTH_BYTES


class DnsListener(msgspec.Struct, frozen=True):
    """An inherited socket, and the numbers of the server blocks that answer at it."""

    fd: int
    transport: Literal["udp", "tcp", "tls", "https"]
    blocks: tuple[int, ...]


class WorkerSetup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker."""

    blocks: tuple[ServerBlock, ...]
    listeners: tuple[DnsListener, ...]
    own: tuple[str, ...] = ()
    """Addresses of this server (row D30)."""
    recursion: tuple[str, ...] = ()
    first: bool = True
    """True for one of the workers, which logs what would be the same for all."""
    probes: LoopProbeSecrets = LoopProbeSecrets("", "")


class ZoneUpdate(msgspec.Struct, frozen=True, tag=True):
    """A change of the zone of a server block, given by its number."""

    block: int
    change: ZoneChange


class StartServing(msgspec.Struct, frozen=True, tag=True):
    """Makes a worker start to answer queries."""


class CountsRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for a `CountsReport`."""


class CountsReport(msgspec.Struct, frozen=True):
    """The sums of a worker since its last report; those of plugin chains by number of the server block."""

    counts: AnswerCounts
    resolvers: dict[int, ResolverCounts] = {}


WorkerMessage = WorkerSetup | ZoneUpdate | StartServing | CountsRequest

_DECODER = msgspec.msgpack.Decoder(WorkerMessage)
_READ = 1 << 20


class MessageReader:
    """Reads the messages to a worker from its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def read(self) -> Iterator[WorkerMessage]:
        """Yield the messages that are complete after one read. Raises EOFError if the main process has ended."""
        try:
            data = self._sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the main process has ended")
        self._buffer += data
        at = 0
        while at + LENGTH_BYTES <= len(self._buffer):
            end = at + LENGTH_BYTES + int.from_bytes(self._buffer[at : at + LENGTH_BYTES], "big")
            if end > len(self._buffer):
                break
            yield _DECODER.decode(memoryview(self._buffer)[at + LENGTH_BYTES : end].tobytes())
            at = end
        del self._buffer[:at]
