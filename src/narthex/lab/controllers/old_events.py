"""Events are forgotten after an hour, as kube-apiserver does it (`--event-ttl`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from narthex.lab.controllers.objects import moment
from narthex.lab.controllers.present import Present, Seen
from narthex.lab.controllers.settings import Settings
from narthex.lab.controllers.view import Again, Answer, Delete, Key

_OLDEST = Key("", "oldest")


class OldEvents:
    """It has one key only: the event that goes next."""

    name = "old-events"
    kinds = frozenset({"Event"})

    def __init__(self, settings: Settings) -> None:
        self._keep = timedelta(seconds=settings.event_seconds)
        self._ages: deque[tuple[datetime, Key]] = deque()
        """In the order in which they came."""

    def concerned(self, seen: Seen, present: Present) -> Iterable[Key]:
        """The oldest one, when there was none."""
        del present
        born = moment(seen.after["metadata"].get("creationTimestamp")) if seen.after is not None else None
        if seen.before is None and born is not None:
            self._ages.append((born, seen.key))
            if len(self._ages) == 1:
                return [_OLDEST]
        return []

    def look(self, key: Key, present: Present, now: datetime) -> Iterator[Answer]:
        """Delete what is too old."""
        del key
        while self._ages and self._ages[0][0] + self._keep <= now:
            _, old = self._ages.popleft()
            if present.get("Event", old) is not None:
                yield Delete("Event", *old)
        if self._ages:
            yield Again(self._ages[0][0] + self._keep)
