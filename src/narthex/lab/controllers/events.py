"""What controllers tell people about an object: Events (core/v1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from narthex.lab.controllers.cluster_state import Present, Seen
from narthex.lab.controllers.interfaces import (
    Again,
    Answer,
    Create,
    Delete,
    Key,
    Object,
)
from narthex.lab.controllers.objects import key_of, letters, moment, stamp, uid_of
from narthex.lab.controllers.settings import Settings


def event(about: Object, reason: str, message: str, now: datetime, *, source: str, warning: bool = False) -> Create:
    """An Event about an object as it is now."""
    key = key_of(about)
    # Events about what has no namespace are in this one.
    namespace = key.namespace or "default"
    moment = stamp(now)
    version = about["metadata"].get("resourceVersion") or ""
    # Upstream's ends are nanoseconds in hexadecimal digits; ours follow from what is said.
    name = f"{key.name[:230]}.{letters(f'{uid_of(about)} {version} {reason} {message} {now.isoformat()}', 16)}"
    return Create(
        "Event",
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                **({"namespace": key.namespace} if key.namespace else {}),
                "name": key.name,
                "uid": uid_of(about),
                "resourceVersion": version,
            },
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if warning else "Normal",
            "count": 1,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "source": {"component": source},
            "reportingComponent": source,
            "reportingInstance": "",
        },
    )


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
