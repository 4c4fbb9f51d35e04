"""Questions that were answered before, byte for byte, with their answers: the way that nearly all of them go.

The key is the whole packet behind its id, so whatever differs (case, options, flags) is another question, and nothing
need be read. The table is thrown away whenever a zone changes, and when it is full; a question that is not in it costs
a few microseconds more, no more than that.
"""

from __future__ import annotations

import msgspec

from narthex.dns.message.wire import NXDOMAIN
from narthex.dns.zone.compiled import Compiled, Turn

MOST_BYTES = 6_000_000
"""Of one table, as far as others can fill it."""
_ENTRY_BYTES = 320
"""What an entry costs besides its bytes."""
_SEEN = 4096
"""Slots that remember which unknown name was asked for last."""

Counter = list[int]
"""One number that counts, shared by all entries that are counted alike."""


class Kept(msgspec.Struct, gc=False):
    """What a known question gets. It is in no cycle, so the collector, which would hold up all questions to look through
    thousands of these, need not know of it."""

    tail: bytes
    """The response behind its id."""
    counter: Counter
    turn: Turn | None
    """Where each answer has an order of its own."""
    zone: str = ""
    """The server block's, where questions are written down."""


class Table:
    """One listener's. `get` of `held` is the look-up."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.held: dict[bytes, Kept] = {}
        self._room = self._most = most_bytes
        self._seen = [0] * _SEEN

    def keep(self, key: bytes, made: Compiled, counter: Counter, zone: str = "") -> None:
        """Answer this question without thinking from now on."""
        self._room -= len(key) + len(made.tail) * (3 if made.turn else 1) + _ENTRY_BYTES
        if self._room < 0:
            self.clear()
        else:
            self.held[key] = Kept(made.tail, counter, made.turn, zone)

    def keep_unknown(self, key: bytes, tail: bytes, counter: Counter) -> None:
        """The same for a name that does not exist, but only from the second time: there is no end of them."""
        mark = hash(key)
        slot = mark % _SEEN
        if self._seen[slot] == mark:
            self.keep(key, Compiled(tail, NXDOMAIN), counter)
        else:
            self._seen[slot] = mark

    def clear(self) -> None:
        """Forget all answers."""
        self.held.clear()
        self._room = self._most
