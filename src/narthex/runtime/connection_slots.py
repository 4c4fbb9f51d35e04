"""Which connection a server closes when a limit is reached: the one that has been silent longest.

A connection that is refused at the limit lets silent clients shut out all others. Here a new connection is always taken, and
the longest silence pays for it: first that of the same client, then that of the same port, then that of the server.
"""

from __future__ import annotations

import resource
from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

ACCEPT_RETRY_SECONDS = 1.0
"""Pause of a server that could not accept a connection because the process has no file descriptors left."""
EVICTED_SECONDS = 0.01
"""The same pause after a silent connection was closed, whose descriptor is free by then."""
LOG_SECONDS = 60.0
"""Period in which a server's log has one line on connections that were closed for others."""
FAILURE_LINES = 5
"""Lines on connections that could not be accepted, in the same period."""
EVERY_PORT = "every port"
"""The group of all connections of a server, whatever their port."""
MAX_CONNECTIONS = 4096
"""Limit of a server with all its ports, 16 of them full; a connection takes 8 KB of memory."""
_Connection = TypeVar("_Connection", bound=Hashable)


class SlotLimits(NamedTuple):
    """How many connections a port may have at a time."""

    port: int = 256
    client: int = 64
    """Of these, limit for one client address. Four clients at their limit fill a port, and then the silent ones leave."""


def max_connections(most: int = MAX_CONNECTIONS) -> int:
    """Return the limit of a server with all its ports: `most`, but at most half of the files that this process may open.

    Each port has slots of its own, so that many ports together could take the files that the process itself needs.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 2)


class _Group(Generic[_Connection]):
    """Connections that share a limit. Each dict has the one that waits longest first."""

    def __init__(self) -> None:
        self.silent: dict[_Connection, None] = {}
        self.working: dict[_Connection, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.working)

    def oldest(self) -> _Connection | None:
        """Return the connection that has been silent longest, or the oldest working one; None if there is none."""
        return next(iter(self.silent or self.working), None)


class ConnectionSlots(Generic[_Connection]):
    """The open connections of a server, by the groups whose limits they count against. Every method takes constant time."""

    def __init__(self) -> None:
        """Start without connections."""
        self._groups: dict[Hashable, _Group[_Connection]] = {}
        self._of: dict[_Connection, tuple[Hashable, ...]] = {}

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._of)

    def add(self, connection: _Connection, limits: Mapping[Hashable, int]) -> list[_Connection]:
        """Take a new connection, silent so far. Return those that must be closed for it; they are removed already.

        `limits` has the limit of each group that the connection belongs to, the smallest group first.
        """
        evicted = []
        for group, limit in limits.items():
            members = self._groups.get(group)
            while members and len(members) >= limit:
                oldest = members.oldest()
                assert oldest is not None
                self.remove(oldest)
                evicted.append(oldest)
        self._of[connection] = tuple(limits)
        for group in limits:
            self._groups.setdefault(group, _Group()).silent[connection] = None
        return evicted

    def note_silent(self, connection: _Connection) -> None:
        """Note that the client is to move from now on. Call it after progress only, not for each byte of half a request."""
        for group in self._of.get(connection, ()):
            members = self._groups[group]
            members.working.pop(connection, None)
            members.silent.pop(connection, None)
            members.silent[connection] = None

    def note_working(self, connection: _Connection) -> None:
        """Note that the server is to move: this connection is closed only if all others work as well."""
        for group in self._of.get(connection, ()):
            members = self._groups[group]
            members.silent.pop(connection, None)
            members.working.setdefault(connection, None)

    def remove(self, connection: _Connection) -> None:
        """Forget a connection. No effect if it has been removed."""
        for group in self._of.pop(connection, ()):
            members = self._groups[group]
            members.silent.pop(connection, None)
            members.working.pop(connection, None)
            if not members:
                del self._groups[group]

    def evict(self, group: Hashable) -> _Connection | None:
        """Remove and return the connection of a group that has been silent longest, or None if all of them work."""
        members = self._groups.get(group)
        if members is None or not members.silent:
            return None
        oldest = next(iter(members.silent))
        self.remove(oldest)
        return oldest
