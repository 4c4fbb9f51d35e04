"""The protocol between relay and proxy (one order, one answer), and of the table that a relay shows."""

from __future__ import annotations

import socket

import msgspec

Key = tuple[str, int]
"""Protocol in lower case, and port."""


class RelayPort(msgspec.Struct, frozen=True, array_like=True):
    """One port to listen on, and the endpoints for its connections."""

    protocol: str
    """`tcp` or `udp`."""
    port: int
    service: tuple[str, str, str]
    """Namespace, name, and port name of the Service port. Entries of one Service port share session affinity."""
    endpoints: tuple[tuple[str, int], ...]
    affinity_seconds: int | None = None
    scope: str = "cluster"
    """Endpoint set of the Service port; for inspection."""

    @property
    def key(self) -> Key:
        """Unique key of the entry."""
        return self.protocol, self.port


class RelayOrder(msgspec.Struct, frozen=True):
    """What to do, in the order of the fields. An order without content only asks for the counters."""

    mark: int | None = None
    """New packet mark of the relay's own connections; 0: none, None: unchanged."""
    forget: bool = False
    """Close everything first, and forget all clients."""
    listen: tuple[RelayPort, ...] = ()
    """Ports to open, or whose endpoints change."""
    close: tuple[Key, ...] = ()
    """Ports to close. Their open connections continue."""


class RelayCounts(msgspec.Struct):
    """Counters of a relay since it started."""

    connections: int = 0
    """TCP connections taken."""
    clients: int = 0
    """UDP clients taken."""
    retries: int = 0
    """Endpoints that could not be reached while others were left to try."""
    errors: int = 0
    """Clients for which no endpoint could be reached."""
    short_of_files: int = 0
    """Times when a TCP client had to wait, or a UDP client was dropped, because no more files could be opened."""
    open: int = 0
    """Current TCP connections and UDP clients."""
    handed_over: int = 0
    """TCP connections with bulk data that the kernel forwards since then without the relay."""
    kept: dict[str, int] = {}
    """TCP connections with bulk data that the relay copies, by the reason."""


class PortFailure(msgspec.Struct, frozen=True):
    """A port that could not be opened."""

    protocol: str
    port: int
    taken: bool
    """Another program uses it."""
    reason: str


class RelayAnswer(msgspec.Struct, frozen=True):
    """The result of an order."""

    counts: RelayCounts
    failed: tuple[PortFailure, ...] = ()


class RelayTable(msgspec.Struct, frozen=True):
    """The ports that a relay serves, for inspection."""

    entries: tuple[RelayPort, ...]
    counts: RelayCounts


RELAY_TABLES = msgspec.msgpack.Decoder(RelayTable)

ADDRESS_FAMILIES = {4: int(socket.AF_INET), 6: int(socket.AF_INET6)}
"""By IP version."""


def shown_at(family: int) -> str:
    """Return the abstract Unix socket on which the relay of an address family shows its table to root."""
    return f"\0narthex-relay-{'6' if family == socket.AF_INET6 else '4'}"
