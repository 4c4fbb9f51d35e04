"""What joins the zones of the cluster with everything that answers the other names.

A worker process has one loop. It looks a question up in its compiled zones first; what no zone answers, and what a
zone lets through (`fallthrough`, the outside end of an ExternalName), goes to the server block's `Resolver`, which
answers in the same loop, now or later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

Transport = Literal["udp", "tcp"]
Reply = Callable[[bytes | None], None]
"""Takes the whole response message, id and question those of the query; None: nothing is sent. Called exactly once."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question, read and checked. `wire.py` makes it."""

    packet: bytes
    """The whole message as it came."""
    id: int
    name: bytes
    """The question's name in wire form (lengths and labels, with the root's zero), in lower case."""
    qname: bytes
    """The same as the client wrote it; answers repeat its case."""
    qtype: int
    qclass: int
    flags: int
    """The header's second 16 bits."""
    edns_size: int | None
    """The UDP size that the client advertises; None without an OPT record."""
    edns_version: int
    """0 without an OPT record."""
    question_end: int
    """Offset behind the question in `packet`: `packet[12:question_end]` is the question section."""

    @property
    def recursion_desired(self) -> bool:
        """The RD bit."""
        return bool(self.flags & 0x0100)


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks."""

    address: str
    """IPv4 or IPv6 address, without port or zone index; IPv4 never in its IPv6-mapped form."""
    transport: Transport = "udp"


class Resolver(Protocol):
    """Answers what the zones do not: hosts, cache, forward, k8s_external, autopath, in a server block's order."""

    def ask(self, query: Query, client: Client, reply: Reply, now: float) -> None:
        """Answer `query` by calling `reply` once, before this returns or later in the same loop.

        A response longer than the client takes (`limit`) is the server's to truncate. `now` is the loop's clock
        (monotonic seconds). Never raises for what is in the packet.
        """


class Loop(Protocol):
    """What a resolver may use of the worker's loop (`dns/server/loop.py`). One thread; callbacks never block."""

    def now(self) -> float:
        """Monotonic seconds, read when the loop last woke up."""

    def register(
        self, fd: int, readable: Callable[[], None] | None, writable: Callable[[], None] | None = None
    ) -> None:
        """Call back while `fd` is readable or writable; registering again replaces; two Nones take it out."""

    def unregister(self, fd: int) -> None:
        """Take `fd` out; unknown ones are let be. To be called before the descriptor is closed."""

    def at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call once at `when` (same clock) or soon after."""


class Timer(Protocol):
    """One appointment of the loop."""

    def cancel(self) -> None:
        """It does not happen; fine when it has already happened."""


UDP_MOST = 4096
"""The longest response over UDP, whatever a client advertises: what a forged question can draw is bounded by it."""


def limit(query: Query, transport: Transport) -> int:
    """The longest response in bytes that the client is sent (row S3)."""
    if transport == "tcp":
        return 65_535
    return 512 if query.edns_size is None else min(max(512, query.edns_size), UDP_MOST)
