"""Events of controllers (core/v1), and their expiry."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from narthex.lab.api.registry import stamp
from narthex.lab.controllers.cluster_state import ClusterState, ObjectChange
from narthex.lab.controllers.objects import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectKey,
    ReconcileResult,
    RequeueAt,
    hash_suffix,
    key_of,
    parse_time,
    uid_of,
)


def event_about(
    obj: Object, reason: str, message: str, now: datetime, *, source: str, warning: bool = False
) -> CreateObject:
    """Return the creation of an Event about an object."""
    key = key_of(obj)
    version = obj["metadata"].get("resourceVersion") or ""
    # Upstream appends the time in nanoseconds; a hash makes replays reproducible.
    name = f"{key.name[:230]}.{hash_suffix(f'{uid_of(obj)} {version} {reason} {message} {now.isoformat()}', 16)}"
    return CreateObject("Event", event_object(obj, name, reason, message, stamp(now), source=source, warning=warning))


def event_object(
    obj: Object,
    name: str,
    reason: str,
    message: str,
    now: str,
    *,
    source: str,
    instance: str = "",
    warning: bool = False,
) -> Object:
    """Return an Event about an object. `instance` is the node on which `source` runs."""
    key = key_of(obj)
    return {
        # Events about cluster-scoped objects are in namespace default.
        "metadata": {"name": name, "namespace": key.namespace or "default"},
        "involvedObject": {
            "apiVersion": obj["apiVersion"],
            "kind": obj["kind"],
            **({"namespace": key.namespace} if key.namespace else {}),
            "name": key.name,
            "uid": uid_of(obj),
            "resourceVersion": obj["metadata"].get("resourceVersion") or "",
        },
        "reason": reason,
        "message": message[:1024],
        "type": "Warning" if warning else "Normal",
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": source, **({"host": instance} if instance else {})},
        "reportingComponent": source,
        "reportingInstance": instance,
    }


_TTL = timedelta(hours=1)
_OLDEST_EVENT = ObjectKey("", "oldest")


class EventTtlController:
    """Deletes Events after their time to live, as kube-apiserver does (`--event-ttl`). It has one key: the oldest Event."""

    name = "old-events"
    kinds = frozenset({"Event"})

    def __init__(self) -> None:
        self._by_age: deque[tuple[datetime, ObjectKey]] = deque()
        """In order of creation."""

    def affected_keys(self, change: ObjectChange, _state: ClusterState) -> Iterable[ObjectKey]:
        """Return the single key when the first Event is created."""
        created = parse_time(change.after["metadata"].get("creationTimestamp")) if change.after is not None else None
        if change.before is None and created is not None:
            self._by_age.append((created, change.key))
            if len(self._by_age) == 1:
                return [_OLDEST_EVENT]
        return []

    def reconcile(self, _key: ObjectKey, state: ClusterState, now: datetime) -> Iterator[ReconcileResult]:
        """Delete expired Events."""
        while self._by_age and self._by_age[0][0] + _TTL <= now:
            _, old = self._by_age.popleft()
            if state.get("Event", old) is not None:
                yield DeleteObject("Event", old)
        if self._by_age:
            yield RequeueAt(self._by_age[0][0] + _TTL)
