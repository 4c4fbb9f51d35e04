"""Detection that no proxy routes traffic to a terminating pod any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from narthex.lab.controllers.endpointslice.controller import HEADLESS
from narthex.lab.controllers.objects import ObjectKey, labels_of
from narthex.lab.program.shared_registry import SharedRegistry

_SETTLED_SECONDS = 0.3
"""Time after a change of slices in which nodes may not have seen it yet."""
_FRESH_SECONDS = 0.05


class EndpointDrain:
    """Queries the nodes' proxies for many pods together. Safe from any thread."""

    def __init__(self, registry: SharedRegistry, synced: Callable[[float], bool]) -> None:
        """`synced(moment)` returns True if all proxies have seen and written all changes up to that time."""
        self._registry = registry
        self._synced = synced
        self._lock = threading.Lock()
        self._removals: dict[ObjectKey, tuple[float, float]] = {}
        """By pod: time of the deletion request, and time since which no slice lists it as ready."""
        self._responses: dict[float, tuple[float, bool]] = {}

    def __call__(self, key: ObjectKey, since: float) -> bool:
        """Return True once no proxy routes traffic to a pod that was deleted at `since` (seconds since 1970)."""
        now = time.time()
        listed, ready = self._slices(key)
        if not listed:
            return True
        with self._lock:
            requested, removed_at = self._removals.get(key, (0.0, 0.0))
            if ready or requested != since:
                self._removals[key] = (since, now)
                return False
            if now - removed_at < _SETTLED_SECONDS:
                return False
            if not self._proxies_synced(since, now):
                return False
            del self._removals[key]
        return True

    def _proxies_synced(self, since: float, now: float) -> bool:
        asked_at, response = self._responses.get(since, (0.0, False))
        if now - asked_at > _FRESH_SECONDS and not response:
            response = self._synced(since)
            self._responses = {moment: each for moment, each in self._responses.items() if now - each[0] < 60.0}
            self._responses[since] = (now, response)
        return response

    def _slices(self, key: ObjectKey) -> tuple[bool, bool]:
        """Return True for each: slices with addresses list the pod, and as a ready endpoint."""
        listed = ready = False
        with self._registry.held() as registry:
            for each in registry.list("EndpointSlice", key.namespace):
                if HEADLESS in labels_of(each):
                    continue
                for endpoint in each.get("endpoints") or ():
                    if (endpoint.get("targetRef") or {}).get("name") == key.name:
                        listed = True
                        ready = ready or (endpoint.get("conditions") or {}).get("ready") is not False
        return listed, ready
