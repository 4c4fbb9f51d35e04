"""What an announcer remembers of each address: what it did for it, who asked, who else answers."""

from __future__ import annotations

import msgspec


class Foreign(msgspec.Struct, kw_only=True):
    """Somebody else who answers for an address of ours."""

    mac: str
    link: str
    node: str
    """Whose link has this hardware address; empty when it is none of the announcers'."""
    first: float
    last: float
    times: int = 1


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The last question for an address."""

    at: float
    sender: str
    mac: str
    link: str


class Account(msgspec.Struct, kw_only=True):
    """What was done for one address by this run. Times are of the loop's clock."""

    requests: int = 0
    answers: int = 0
    gratuitous: int = 0
    announced_at: float | None = None
    defended_at: float = -1e9
    asked: Asked | None = None
    foreign: dict[str, Foreign] = {}
    foreign_seen: int = 0
    duplicates: int = 0
