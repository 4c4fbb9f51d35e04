"""What controllers tell people about an object: Events (core/v1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.interfaces import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
)
from narthex.lab.controllers.objects import format_time, hash_suffix, key_of, parse_time, uid_of
from narthex.lab.controllers.settings import Settings


def event_about(
    about: Object, reason: str, message: str, now: datetime, *, source: str, warning: bool = False
) -> CreateObject:
    """An Event about an object as it is now."""
    key = key_of(about)
    # Events about what has no namespace are in this one.
    namespace = key.namespace or "default"
    timestamp = format_time(now)
    version = about["metadata"].get("resourceVersion") or ""
    # Upstream's ends are nanoseconds in hexadecimal digits; ours follow from what is said.
    name = f"{key.name[:230]}.{hash_suffix(f'{uid_of(about)} {version} {reason} {message} {now.isoformat()}', 16)}"
    return CreateObject(
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
            "firstTimestamp": timestamp,
            "lastTimestamp": timestamp,
            "source": {"component": source},
            "reportingComponent": source,
            "reportingInstance": "",
        },
    )


_OLDEST = ObjectKey("", "oldest")


class EventTtlController:
    """It has one key only: the event that goes next."""

    name = "old-events"
    kinds = frozenset({"Event"})

    def __init__(self, settings: Settings) -> None:
        self._keep = timedelta(seconds=settings.event_seconds)
        self._ages: deque[tuple[datetime, ObjectKey]] = deque()
        """In the order in which they came."""

    def concerned(self, seen: ObjectChange, present: ClusterState) -> Iterable[ObjectKey]:
        """The oldest one, when there was none."""
        del present
        born = parse_time(seen.after["metadata"].get("creationTimestamp")) if seen.after is not None else None
        if seen.before is None and born is not None:
            self._ages.append((born, seen.key))
            if len(self._ages) == 1:
                return [_OLDEST]
        return []

    def look(self, key: ObjectKey, present: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Delete what is too old."""
        del key
        while self._ages and self._ages[0][0] + self._keep <= now:
            _, old = self._ages.popleft()
            if present.get("Event", old) is not None:
                yield DeleteObject("Event", *old)
        if self._ages:
            yield RequeueAt(self._ages[0][0] + self._keep)
