"""The cluster's objects, the one lock around them, and those who want to know when they have changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narthex.lab.api.errors import ApiFault
from narthex.lab.api.registry import Registry

_RULES = {
    "Service": ("spec", "ingress"),
    "EndpointSlice": ("endpoints", "ports", "addressType"),
    "ServiceCIDR": ("spec",),
}
"""What of which objects the nodes make rules of."""
_HEADLESS = "service.kubernetes.io/headless"


class Ledger:
    """A Registry for several threads."""

    def __init__(self, registry: Registry) -> None:
        self.lock = threading.RLock()
        self._registry = registry
        self._listeners: list[Callable[[], None]] = []
        self._looked_at = registry.version
        self._told_at = time.time()
        self.rules_at = 0.0
        """No later than when something last changed that the nodes make rules of, in seconds since 1970; 0.0: never."""

    def listen(self, ring: Callable[[], None]) -> None:
        """Call this whenever something has changed. It must be quick, and safe in any thread; it may be called while the
        lock is held."""
        self._listeners.append(ring)

    @contextmanager
    def held(self) -> Iterator[Registry]:
        """The registry, for as long as the lock is held; who listens is told afterwards, if something has changed."""
        with self.lock:
            before = self._registry.version
            try:
                yield self._registry
            finally:
                changed = self._registry.version != before
                if changed:
                    self._look()
        if changed:
            self._ring()

    def tell(self) -> None:
        """Something has changed, by somebody who has held the lock without `held`."""
        with self.lock:
            self._look()
        self._ring()

    def _ring(self) -> None:
        for ring in self._listeners:
            ring()

    def _look(self) -> None:
        """See whether the nodes are to be concerned. What has changed has done so since the last look."""
        now = time.time()
        try:
            concerned = any(map(_makes_rules, self._registry.changes_since(self._looked_at)))
        except ApiFault:
            concerned = True
        if concerned:
            self.rules_at = self._told_at
        self._looked_at, self._told_at = self._registry.version, now


def _makes_rules(change: Any) -> bool:
    fields = _RULES.get(change.kind)
    if fields is None:
        return False
    before, after = change.before or {}, change.after or {}
    either = after or before
    if change.kind == "EndpointSlice" and _HEADLESS in (either["metadata"].get("labels") or {}):
        return False
    return any(_part(before, field) != _part(after, field) for field in fields)


def _part(obj: dict[str, Any], field: str) -> Any:
    if field == "ingress":
        return ((obj.get("status") or {}).get("loadBalancer") or {}).get("ingress") or None
    return obj.get(field)
