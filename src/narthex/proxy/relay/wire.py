"""What a relay process says to its proxy (one order, one answer, over a pair of sockets) and to those who look."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

T = TypeVar("T")

Key = tuple[str, int]
"""Protocol in lower case, and port."""


class RelayPort(msgspec.Struct, frozen=True, array_like=True):
    """One port to listen on, and where its connections go."""

    protocol: str
    """`tcp` or `udp`."""
    port: int
    service: tuple[str, str, str]
    """Whose it is: namespace, name and name of the port. Entries of one Service port share what is remembered of
    clients."""
    endpoints: tuple[tuple[str, int], ...]
    affinity_seconds: int | None = None
    scope: str = "cluster"
    """Which of the Service port's endpoint sets; for those who look."""

    @property
    def key(self) -> Key:
        """What no other entry has."""
        return self.protocol, self.port


class RelayOrder(msgspec.Struct, frozen=True):
    """What to do, in this order. An order without content only asks how it goes."""

    mark: int | None = None
    """From now on the bit of the packet mark that the relay's own connections have; 0: none, None: as before."""
    forget: bool = False
    """Close everything first, and forget all clients."""
    listen: tuple[RelayPort, ...] = ()
    """Listen there, or go elsewhere from there."""
    close: tuple[Key, ...] = ()
    """Take no more connections there. Those that are open go on."""


class RelayCounts(msgspec.Struct):
    """What the relay did since it began."""

    connections: int = 0
    """TCP connections taken."""
    clients: int = 0
    """UDP clients taken."""
    retries: int = 0
    """Endpoints that could not be reached while another was left to try."""
    errors: int = 0
    """Clients for which no endpoint could be reached."""
    short_of_files: int = 0
    """Times when a client had to wait, or a UDP client was given up, because no more files could be opened."""
    open: int = 0
    """TCP connections and UDP clients at present."""


class PortFailure(msgspec.Struct, frozen=True):
    """A port that cannot be listened on."""

    protocol: str
    port: int
    taken: bool
    """Somebody else has it."""
    reason: str


class RelayAnswer(msgspec.Struct, frozen=True):
    """How it went."""

    counts: RelayCounts
    failed: tuple[PortFailure, ...] = ()


class RelayTable(msgspec.Struct, frozen=True):
    """What a relay serves, for those who look."""

    entries: tuple[RelayPort, ...]
    counts: RelayCounts


ADDRESS_FAMILIES = {4: int(socket.AF_INET), 6: int(socket.AF_INET6)}
"""By IP version."""


def shown_at(family: int) -> str:
    """The abstract Unix socket at which the relay of an address family shows its table to root."""
    return f"\0narthex-relay-{'6' if family == socket.AF_INET6 else '4'}"


_SIZE = 4


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the wire."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_SIZE, "big") + body


def receive(sock: socket.socket, kind: type[T]) -> T:
    """Wait for a message. Raises EOFError when the other side is gone, TimeoutError as the socket is set."""
    return msgspec.msgpack.decode(_exactly(sock, int.from_bytes(_exactly(sock, _SIZE), "big")), type=kind)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the other side has closed")
        data += part
    return bytes(data)
