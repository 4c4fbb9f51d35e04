"""The event recorder of the kubelets, which writes Events in the background."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from narthex.lab.api.errors import StatusError
from narthex.lab.program.shared_registry import SharedRegistry

_BATCH = 20
"""Events written while the lock is held."""
_PAUSE_SECONDS = 0.1


class EventRecorder:
    """Accepts Events from any thread. `run` belongs to one thread."""

    def __init__(self, registry: SharedRegistry) -> None:
        self._registry = registry
        self._pending: deque[tuple[Mapping[str, Any], str, str, bool, float]] = deque()
        self._wake = threading.Event()
        self._names: dict[tuple[str, str, str], str] = {}

    def __call__(self, about: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """Record an Event about an object. A repeated Event increases the count of the first."""
        self._pending.append((about, reason, message, warning, time.time()))
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

    def _write(
        self, registry: Any, about: Mapping[str, Any], reason: str, message: str, warning: bool, moment: float
    ) -> None:
        meta = about["metadata"]
        namespace = meta.get("namespace") or "default"
        identity = (str(meta.get("uid")), reason, message)
        # Names sort by time, which orders Events of the same second in lists.
        name = self._names.setdefault(identity, f"{meta['name'][:230]}.{time.time_ns():x}")
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
        held = registry.get("Event", namespace, name)
        try:
            if held is not None:
                registry.update("Event", {**held, "count": int(held.get("count") or 1) + 1, "lastTimestamp": now})
                return
            registry.create("Event", _event(about, namespace, name, reason, message, warning, now))
        except StatusError:
            # The namespace is terminating, or the Event has just expired.
            return


def _event(
    about: Mapping[str, Any], namespace: str, name: str, reason: str, message: str, warning: bool, now: str
) -> dict[str, Any]:
    meta = about["metadata"]
    node = (about.get("spec") or {}).get("nodeName") or meta["name"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": {
            "kind": about.get("kind") or "Pod",
            "apiVersion": about.get("apiVersion") or "v1",
            "namespace": meta.get("namespace", ""),
            "name": meta["name"],
            "uid": meta.get("uid", ""),
            "resourceVersion": meta.get("resourceVersion", ""),
        },
        "reason": reason,
        "message": message[:1024],
        "type": "Warning" if warning else "Normal",
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": "kubelet", "host": node},
        "reportingComponent": "kubelet",
        "reportingInstance": node,
    }
