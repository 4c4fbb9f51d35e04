"""The event recorder of the kubelets, which writes Events in the background."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from datetime import UTC, datetime

from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import Registry, stamp
from narthex.lab.controllers.events import event_object
from narthex.lab.controllers.objects import Object, key_of, uid_of
from narthex.lab.program.shared_registry import SharedRegistry

_BATCH = 20
"""Events written while the lock is held."""
_PAUSE_SECONDS = 0.1


class EventRecorder:
    """Accepts Events from any thread. `run` belongs to one thread."""

    def __init__(self, registry: SharedRegistry) -> None:
        self._registry = registry
        self._pending: deque[tuple[Object, str, str, bool, float]] = deque()
        self._wake = threading.Event()
        self._names: dict[tuple[str, str, str], str] = {}

    def __call__(self, pod: Object, reason: str, message: str, *, warning: bool = False) -> None:
        """Record an Event about a pod. A repeated Event increases the count of the first."""
        self._pending.append((pod, reason, message, warning, time.time()))
        self._wake.set()

    def run(self) -> None:
        """Write Events until the process ends."""
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._pending:
                with self._registry.held() as registry:
                    for _ in range(min(_BATCH, len(self._pending))):
                        self._write(registry, *self._pending.popleft())
                time.sleep(_PAUSE_SECONDS)

    def _write(self, registry: Registry, pod: Object, reason: str, message: str, warning: bool, moment: float) -> None:
        # Names sort by time, which orders Events of the same second in lists.
        new_name = f"{pod['metadata']['name'][:230]}.{time.time_ns():x}"
        name = self._names.setdefault((uid_of(pod), reason, message), new_name)
        now = stamp(datetime.fromtimestamp(moment, UTC))
        # A write fails if the namespace is terminating or the Event has just expired.
        with contextlib.suppress(StatusError):
            held = registry.get("Event", key_of(pod).namespace, name) if name != new_name else None
            if held is not None:
                registry.update("Event", {**held, "count": int(held.get("count") or 1) + 1, "lastTimestamp": now})
            else:
                node = pod["spec"]["nodeName"]
                event = event_object(pod, name, reason, message, now, source="kubelet", instance=node, warning=warning)
                registry.create("Event", event)
