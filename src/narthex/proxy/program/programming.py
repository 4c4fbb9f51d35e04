"""How long the cluster waits for this node: from the change of a pod to rules in the kernel (rows 2.13, 20.5)."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime

from narthex.model.net import IPFamily
from narthex.model.objects import EndpointSlice
from narthex.model.trigger_time import TRIGGER_TIME, trigger_time

_MOST_WAITING = 10_000
"""Times kept for one family while its syncs fail; the newest count."""


class ProgrammingLatency:
    """Times of changes that are not in the kernel yet. Belongs to the loop."""

    def __init__(self, start: float) -> None:
        """`start`: when this process began, in seconds since the epoch. What changed before is not its delay."""
        self._start = start
        self._start_text = datetime.fromtimestamp(int(start), UTC).strftime("%Y-%m-%dT%H:%M:%S")
        self._waiting: dict[IPFamily, deque[float]] = {}

    def saw(self, before: EndpointSlice | None, after: EndpointSlice) -> None:
        """A slice was added or changed. The same time twice is the same change."""
        text = after.annotation(TRIGGER_TIME)
        # Nearly all slices of the first list; their times need not be worked out.
        if text is None or (text[-1:] == "Z" and text[:19] < self._start_text):
            return
        changed = trigger_time(after)
        if after.family is None or changed is None or changed <= self._start:
            return
        if before is None or before.annotation(TRIGGER_TIME) != text:
            self._waiting.setdefault(after.family, deque(maxlen=_MOST_WAITING)).append(changed)

    def written(self, family: IPFamily, now: float) -> list[float]:
        """The kernel holds all changes; the seconds that each waited."""
        waiting = self._waiting.pop(family, ())
        return [max(0.0, now - changed) for changed in waiting]
