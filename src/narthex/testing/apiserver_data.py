"""What an API server for tests holds: objects, their versions, and as much of the past as has not been compacted.

Like the real one: one counter of versions for all kinds; a change of an object's labels moves it in or out of a selector
as ADDED or DELETED; what is too old is gone. Not safe for threads; whoever serves it locks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from narthex.testing.apiserver_selectors import Selector

Key = tuple[str, str]
"""Namespace and name."""

KINDS = {
    "Service": ("v1", "services"),
    "EndpointSlice": ("discovery.k8s.io/v1", "endpointslices"),
    "Node": ("v1", "nodes"),
    "ServiceCIDR": ("networking.k8s.io/v1", "servicecidrs"),
    "Pod": ("v1", "pods"),
    "Namespace": ("v1", "namespaces"),
    "ConfigMap": ("v1", "configmaps"),
    "Event": ("events.k8s.io/v1", "events"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "IPAddressPool": ("metallb.io/v1beta1", "ipaddresspools"),
    "L2Advertisement": ("metallb.io/v1beta1", "l2advertisements"),
}
"""apiVersion and plural."""


class Stored(msgspec.Struct, frozen=True):
    """One state of one object."""

    version: int
    raw: Mapping[str, Any]
    """Without apiVersion and kind, as in lists."""
    data: bytes
    """The same as JSON."""


class Change(msgspec.Struct, frozen=True):
    """What happened to one object."""

    version: int
    kind: str
    key: Key
    before: Stored | None
    after: Stored | None


class Data:
    """All objects, and the changes since the last compaction."""

    def __init__(self, version: int = 1000) -> None:
        self.version = version
        self.oldest = version
        """Watches from before this version are refused."""
        self._objects: dict[str, dict[Key, Stored]] = {kind: {} for kind in KINDS}
        self._changes: list[Change] = []
        self._pages: dict[int, dict[str, list[tuple[Key, Stored]]]] = {}

    def put(self, kind: str, raw: Mapping[str, Any]) -> int:
        """Make or change an object; returns its version."""
        meta = dict(raw.get("metadata") or {})
        key = (str(meta.get("namespace") or ""), str(meta.get("name") or ""))
        before = self._objects[kind].get(key)
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        body = {name: value for name, value in raw.items() if name not in ("apiVersion", "kind")} | {"metadata": meta}
        stored = Stored(self.version, body, msgspec.json.encode(body))
        self._objects[kind][key] = stored
        self._changes.append(Change(self.version, kind, key, before, stored))
        return self.version

    def delete(self, kind: str, namespace: str, name: str) -> bool:
        """Take an object away; False when it is not there."""
        before = self._objects[kind].pop((namespace, name), None)
        if before is None:
            return False
        self.version += 1
        self._changes.append(Change(self.version, kind, (namespace, name), before, None))
        return True

    def get(self, kind: str, key: Key) -> Stored | None:
        """One object."""
        return self._objects[kind].get(key)

    def compact(self, upto: int | None = None) -> None:
        """Forget the past, and with it the continuation of lists that are being read."""
        self.oldest = self.version if upto is None else upto
        self._changes = [change for change in self._changes if change.version > self.oldest]
        self._pages.clear()

    def keys(self, kind: str) -> list[Key]:
        """Names of the objects of a kind, sorted."""
        return sorted(self._objects[kind])

    def now(self, kind: str, selector: Selector) -> list[tuple[Key, Stored]]:
        """The objects that a selector selects, by name."""
        return [(key, held) for key, held in sorted(self._objects[kind].items()) if selector.selects(held.raw)]

    def since(self, version: int, kind: str, selector: Selector) -> Iterator[tuple[str, int, Stored]]:
        """Type, version and object of the events after a version, as a watch with the selector sees them."""
        low, high = 0, len(self._changes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._changes[middle].version <= version else (low, middle)
        for change in self._changes[low:]:
            if change.kind != kind:
                continue
            was = change.before is not None and selector.selects(change.before.raw)
            now = change.after is not None and selector.selects(change.after.raw)
            if now and change.after is not None:
                yield ("MODIFIED" if was else "ADDED"), change.version, change.after
            elif was and change.before is not None:
                yield "DELETED", change.version, _at(change.before, change.version)

    def keep_page(self, version: int, kind: str, rest: list[tuple[Key, Stored]]) -> None:
        """Remember what the following pages of a list will hold."""
        self._pages.setdefault(version, {})[kind] = rest

    def kept_page(self, version: int, kind: str) -> list[tuple[Key, Stored]] | None:
        """What `keep_page` got, None when it has been compacted."""
        return self._pages.get(version, {}).get(kind)

    def backup(self) -> Data:
        """A copy, to come back to later."""
        other = Data(self.version)
        other.oldest = self.oldest
        other._objects = {kind: dict(held) for kind, held in self._objects.items()}
        other._changes = list(self._changes)
        return other


def _at(stored: Stored, version: int) -> Stored:
    """The last state of a deleted object carries the version of the deletion."""
    raw = {**stored.raw, "metadata": {**stored.raw["metadata"], "resourceVersion": str(version)}}
    return Stored(version, raw, msgspec.json.encode(raw))
