"""A connection as the kernel's connection tracking remembers it."""

from __future__ import annotations

from typing import NamedTuple

from narthex.model.net import Protocol


class Flow(NamedTuple):
    """One tracked connection of TCP, UDP or SCTP."""

    protocol: Protocol
    source: str
    source_port: int
    destination: str
    """Where the first packet was sent to, before anybody rewrote it."""
    port: int
    reply_source: str
    """Where answers are expected from: the endpoint, when the destination was rewritten."""
    reply_port: int

    @property
    def translated(self) -> bool:
        """Whether the destination was rewritten."""
        return (self.reply_source, self.reply_port) != (self.destination, self.port)
