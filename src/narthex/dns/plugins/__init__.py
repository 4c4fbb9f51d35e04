"""CoreDNS plugins: the logic of each in a file of its name, without I/O.

`Resolver` is the interface of those that may answer later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from narthex.dns.message.query import DnsClient, Query

Reply = Callable[[bytes | None], None]
"""Takes the whole response with ID and question of the query, or None to send nothing. Called exactly once."""


class Resolver(Protocol):
    """Resolves queries that no zone of the cluster answers."""

    def resolve(self, query: Query, client: DnsClient, reply: Reply, now: float, /) -> None:
        """Call `reply` once, before this returns or later in the same event loop.

        The response may be longer than the client takes; the caller truncates it. `now` is the time of the event loop in
        monotonic seconds. Never raises, whatever the packet contains.
        """
