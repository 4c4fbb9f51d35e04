"""The API's objects for several threads: one lock, change notifications, and a Snapshot in the model's types."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import Registry
from narthex.model import Delete, Event, NamespacedName, Snapshot, Store, Synced, Upsert
from narthex.model.decode.objects import KINDS, decode

_RULES = {
    "Service": ("spec", "ingress"),
    "EndpointSlice": ("endpoints", "ports", "addressType"),
    "ServiceCIDR": ("spec",),
}
"""Fields that proxies compile into rules, by kind."""
_HEADLESS = "service.kubernetes.io/headless"


class SharedRegistry:
    """A Registry with its lock and listeners."""

    def __init__(self, registry: Registry) -> None:
        self.lock = threading.RLock()
        self._registry = registry
        self._holds = threading.local()
        """How often each thread holds the lock."""
        self._listeners: list[Callable[[], None]] = []
        self._checked_version = registry.version
        self._checked_at = time.time()
        self.rules_changed_at = 0.0
        """Lower bound of the time of the last change that affects rules, in seconds since 1970; 0.0: never."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change. It must be fast and safe in any thread, also while the lock is held."""
        self._listeners.append(listener)

    @contextmanager
    def held(self) -> Iterator[Registry]:
        """Hold the lock and yield the registry; notify listeners afterwards if it has changed."""
        with self.lock:
            self._holds.number = getattr(self._holds, "number", 0) + 1
            before = self._registry.version
            try:
                yield self._registry
            finally:
                self._holds.number -= 1
                changed = self._registry.version != before
                if changed:
                    self._check_rules()
        if changed:
            self._notify_listeners()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock for a time, however often this thread holds it, while it waits for another server."""
        number = getattr(self._holds, "number", 0)
        for _ in range(number):
            self.lock.release()
        try:
            yield
        finally:
            for _ in range(number):
                self.lock.acquire()

    def notify(self) -> None:
        """Notify listeners of a change made by a caller that held the lock without `held`."""
        with self.lock:
            self._check_rules()
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    def _check_rules(self) -> None:
        """Update `rules_changed_at` if a change since the last check affects rules."""
        now = time.time()
        try:
            affected = any(map(_affects_rules, self._registry.changes_since(self._checked_version)))
        except StatusError:
            affected = True
        if affected:
            self.rules_changed_at = self._checked_at
        self._checked_version, self._checked_at = self._registry.version, now


def _affects_rules(change: Any) -> bool:
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


_CUSTOM_KINDS = {"IPAddressPool.metallb.io": "IPAddressPool", "L2Advertisement.metallb.io": "L2Advertisement"}
"""Custom kinds, as the registry names them."""
_REGISTERED = {**{kind: kind for kind in KINDS if kind not in _CUSTOM_KINDS.values()}, **_CUSTOM_KINDS}


class RegistrySnapshot:
    """A Snapshot that follows the registry. Used by one thread at a time."""

    def __init__(self) -> None:
        self._store = Store()
        self._version = -1

    def sync(self, registry: Registry) -> Snapshot:
        """Apply the changes since the last call and return the Snapshot. The caller holds the registry's lock.

        Objects that cannot be decoded are left out.
        """
        try:
            if self._version < 0:
                raise StatusError(410, "Expired", "nothing is known yet")
            events = [
                event
                for change in registry.changes_since(self._version)
                if change.kind in _REGISTERED
                for event in _event(_REGISTERED[change.kind], change.key, change.after)
            ]
        except StatusError:
            self._store = Store()
            events = [
                event
                for kind, ours in _REGISTERED.items()
                for raw in registry.list(kind)
                for event in _event(ours, _key(raw), raw)
            ]
            events.append(Synced())
        for event in events:
            self._store.apply(event)
        self._version = registry.version
        return self._store.snapshot


def registered_objects(registry: Registry) -> list[dict[str, Any]]:
    """Return all objects that a Snapshot is made of. The caller holds the registry's lock."""
    return [raw for kind in _REGISTERED for raw in registry.list(kind)]


def snapshot_of(objects: Iterable[dict[str, Any]]) -> Snapshot:
    """Return the Snapshot of objects; those that cannot be decoded are left out."""
    store = Store()
    for raw in objects:
        for event in _event("", ("", ""), raw):
            store.apply(event)
    store.apply(Synced())
    return store.snapshot


def _event(kind: str, key: tuple[str, str], raw: dict[str, Any] | None) -> list[Event]:
    if raw is None:
        return [Delete(kind, NamespacedName(*key))]
    made = decode(raw).object
    return [] if made is None else [Upsert(made)]


def _key(raw: dict[str, Any]) -> tuple[str, str]:
    return raw["metadata"].get("namespace") or "", raw["metadata"]["name"]
