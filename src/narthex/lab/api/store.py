"""The object store: objects, versions, and the changes since the last compaction.

Like etcd behind kube-apiserver, it has one version counter for all kinds and decides nothing about what may be written.
Not thread-safe; callers lock.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

Key = tuple[str, str]
"""Namespace (empty for cluster-scoped objects) and name."""
Raw = dict[str, Any]
Selects = Callable[[Mapping[str, Any]], bool]

MOST_CHANGES = 50_000
"""Changes that are kept at least; twice as many at most."""


class StoredObject:
    """An immutable state of an object."""

    __slots__ = ("_data", "raw", "version")

    def __init__(self, version: int, raw: Raw) -> None:
        """Wrap an object of a version."""
        self.version = version
        self.raw = raw
        """As it was written, with its resourceVersion; apiVersion and kind may be absent."""
        self._data: bytes | None = None

    @property
    def data(self) -> bytes:
        """The object as JSON without apiVersion and kind, as in lists."""
        if self._data is None:
            body = {name: value for name, value in self.raw.items() if name not in ("apiVersion", "kind")}
            self._data = msgspec.json.encode(body)
        return self._data


class StoreChange(msgspec.Struct, frozen=True):
    """A change of one object."""

    version: int
    kind: str
    key: Key
    was: StoredObject | None
    now: StoredObject | None

    @property
    def before(self) -> Raw | None:
        """The object before the change, None if it did not exist."""
        return None if self.was is None else self.was.raw

    @property
    def after(self) -> Raw | None:
        """The object after the change, None if it was deleted."""
        return None if self.now is None else self.now.raw


class ObjectStore:
    """Objects by kind, and the changes since the last compaction."""

    def __init__(self, version: int = 1000) -> None:
        """Create an empty store that continues after a version."""
        self.version = version
        self.oldest = version
        """Watches from before this version are refused."""
        self._objects: dict[str, dict[Key, StoredObject]] = {}
        self._order: dict[str, list[Key]] = {}
        self._changes: list[StoreChange] = []
        self._by_kind: dict[str, list[StoreChange]] = {}
        self._pages: dict[int, dict[str, list[tuple[Key, StoredObject]]]] = {}

    def put(self, kind: str, raw: Mapping[str, Any], *, copied: bool = False) -> Raw:
        """Create or replace an object and return it as stored. The caller must not modify values inside `raw` afterwards.

        A `copied` object keeps its resourceVersion, which another server has assigned.
        """
        meta = dict(raw.get("metadata") or {})
        key = (str(meta.get("namespace") or ""), str(meta.get("name") or ""))
        held = self._objects.setdefault(kind, {})
        before = held.get(key)
        self.version += 1
        if not copied:
            meta["resourceVersion"] = str(self.version)
        stored = StoredObject(self.version, {**raw, "metadata": meta})
        held[key] = stored
        if before is None:
            bisect.insort(self._order.setdefault(kind, []), key)
        self._remember(StoreChange(self.version, kind, key, before, stored))
        return stored.raw

    def delete(self, kind: str, namespace: str, name: str) -> bool:
        """Delete an object. Return False if it does not exist."""
        key = (namespace, name)
        before = self._objects.get(kind, {}).pop(key, None)
        if before is None:
            return False
        order = self._order[kind]
        del order[bisect.bisect_left(order, key)]
        self.version += 1
        self._remember(StoreChange(self.version, kind, key, before, None))
        return True

    def load(self, version: int, entries: Iterator[tuple[str, Raw]]) -> None:
        """Load saved objects by kind at a version, without their history."""
        for kind, raw in entries:
            meta = raw["metadata"]
            key = (meta.get("namespace", ""), meta["name"])
            self._objects.setdefault(kind, {})[key] = StoredObject(int(meta["resourceVersion"]), raw)
        self._order = {kind: sorted(held) for kind, held in self._objects.items()}
        self.version = max(version, self.version)
        self.compact()

    def get(self, kind: str, key: Key) -> StoredObject | None:
        """Return an object, None if it does not exist."""
        held = self._objects.get(kind)
        return None if held is None else held.get(key)

    def kinds(self) -> list[str]:
        """Return the kinds of which objects exist."""
        return [kind for kind, held in self._objects.items() if held]

    def entries(self, kind: str, namespace: str = "") -> list[tuple[Key, StoredObject]]:
        """Return a kind's objects, of one namespace if it is given, sorted by key."""
        held, order = self._objects.get(kind, {}), self._order.get(kind, [])
        if namespace:
            first = bisect.bisect_left(order, (namespace, ""))
            order = order[first : bisect.bisect_left(order, (namespace + "\0", ""), first)]
        return [(key, held[key]) for key in order]

    def now(self, kind: str, selects: Selects, namespace: str = "") -> list[tuple[Key, StoredObject]]:
        """Return a kind's selected objects, sorted by key."""
        return [(key, held) for key, held in self.entries(kind, namespace) if selects(held.raw)]

    def changes(self, version: int, kind: str = "") -> list[StoreChange]:
        """Return the changes after a version, of one kind if it is given."""
        past = self._by_kind.get(kind, []) if kind else self._changes
        return past[bisect.bisect_right(past, version, key=lambda change: change.version) :]

    def since(self, version: int, kind: str, selects: Selects) -> Iterator[tuple[str, StoredObject]]:
        """Yield type and object of the watch events after a version.

        An object whose labels change enters or leaves a selector as ADDED or DELETED.
        """
        for change in self.changes(version, kind):
            was = change.was is not None and selects(change.was.raw)
            now = change.now is not None and selects(change.now.raw)
            if now and change.now is not None:
                yield ("MODIFIED" if was else "ADDED"), change.now
            elif was and change.was is not None:
                # A deleted object carries the version of its deletion.
                meta = {**change.was.raw["metadata"], "resourceVersion": str(change.version)}
                yield "DELETED", StoredObject(change.version, {**change.was.raw, "metadata": meta})

    def compact(self, upto: int | None = None) -> None:
        """Discard the changes up to a version (default: all), and the remaining pages of lists."""
        self.oldest = self.version if upto is None else upto
        self._changes = self.changes(self.oldest)
        self._by_kind = {kind: self.changes(self.oldest, kind) for kind in self._by_kind}
        self._pages.clear()

    def keep_page(self, version: int, kind: str, rest: list[tuple[Key, StoredObject]]) -> None:
        """Save the remaining entries of a list that is read in pages."""
        self._pages.setdefault(version, {})[kind] = rest

    def kept_page(self, version: int, kind: str) -> list[tuple[Key, StoredObject]] | None:
        """Return what `keep_page` saved, None after a compaction."""
        return self._pages.get(version, {}).get(kind)

    def backup(self) -> ObjectStore:
        """Return a copy."""
        other = ObjectStore(self.version)
        other.oldest = self.oldest
        other._objects = {kind: dict(held) for kind, held in self._objects.items()}
        other._order = {kind: list(order) for kind, order in self._order.items()}
        other._changes = list(self._changes)
        other._by_kind = {kind: list(changes) for kind, changes in self._by_kind.items()}
        return other

    def _remember(self, change: StoreChange) -> None:
        self._changes.append(change)
        self._by_kind.setdefault(change.kind, []).append(change)
        if len(self._changes) > 2 * MOST_CHANGES:
            self.compact(self._changes[-MOST_CHANGES].version)
