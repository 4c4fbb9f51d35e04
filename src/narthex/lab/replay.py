"""Replay of a history: writes of users and nodes are repeated, and the controllers decide again.

Controllers depend only on the objects and on the times passed in, so they must decide identically; the first difference is
an error. Names, addresses, UIDs, versions, and times are those of the history.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Unpack

import msgspec

from narthex.lab.api.registry import Admit, DeleteOptions, Registry
from narthex.lab.api.store import ObjectStore, Raw
from narthex.lab.controllers.controller_manager import ControllerManager, lab_controllers, run_until_stable
from narthex.lab.faults import InjectedFault
from narthex.lab.history import (
    ControllersRan,
    FaultEnded,
    FaultStarted,
    HistoryEntry,
    HistoryStart,
    InitialObject,
    InvalidHistory,
    ObjectChanged,
)


class ReplayMismatch(ValueError):
    """A controller decides differently than in the history; the message says where."""


class Replay:
    """A cluster that follows a history entry by entry."""

    def __init__(self, entries: Iterable[HistoryEntry], admit: Admit, manager: ControllerManager | None = None) -> None:
        """Load the initial objects. `admit` is the API's admission for writes of controllers. Raises InvalidHistory."""
        self._entries = iter(entries)
        begin = next(self._entries, None)
        if not isinstance(begin, HistoryStart):
            raise InvalidHistory("the file is empty")
        self.begin = begin
        self._unassigned: list[ObjectChanged] = []
        """Changes whose author is not known yet."""
        store = ObjectStore()
        first = None
        held = []
        for entry in self._entries:
            if not isinstance(entry, InitialObject):
                first = entry
                break
            held.append((entry.kind, entry.object))
        store.load(begin.version, iter(held))
        if first is not None:
            self._entries = itertools.chain([first], self._entries)
        self.registry = _ReplayRegistry(store, admit)
        self._manager = manager or lab_controllers()
        self.faults: dict[int, InjectedFault] = {}
        """Active at this point of the history, by number."""
        self.turns = 0
        self.decided = 0
        """Changes by controllers, repeated identically."""
        self.written = 0
        """Changes by users and nodes."""

    def step(self) -> datetime | None:
        """Continue to the next external change, run of the controllers, or fault; return its time, None at the end.

        Raises ReplayMismatch or InvalidHistory.
        """
        for entry in self._entries:
            if isinstance(entry, ObjectChanged):
                # The next entry of another type identifies the author of this change.
                self._unassigned.append(entry)
            elif isinstance(entry, ControllersRan):
                self._run_controllers(entry)
                return entry.turn
            elif isinstance(entry, FaultStarted):
                self._write_external()
                self.faults[entry.fault.number] = entry.fault
                return entry.at
            elif isinstance(entry, FaultEnded):
                self._write_external()
                self.faults.pop(entry.ended, None)
                return entry.at
            else:
                raise InvalidHistory("initial objects must precede all other entries")
        last = self._unassigned[-1].at if self._unassigned else None
        self._write_external()
        return last

    def _write_external(self, up_to: int | None = None) -> None:
        """Repeat the writes of users and nodes, up to a version."""
        while self._unassigned and (up_to is None or self._unassigned[0].change <= up_to):
            self.registry.write(self._unassigned.pop(0))
            self.written += 1

    def _run_controllers(self, entry: ControllersRan) -> None:
        self._write_external(entry.after)
        expected = {each.change: each for each in self._unassigned if each.change <= entry.upto}
        self._unassigned = [each for each in self._unassigned if each.change > entry.upto]
        before = self.registry.version
        if before != entry.after:
            raise InvalidHistory(f"changes between version {before} and {entry.after} are missing")
        self.registry.expect(expected, entry.turn)
        run_until_stable(self._manager, self.registry, entry.turn)
        self.registry.check_complete()
        self.turns += 1
        self.decided += len(expected)

    def objects(self) -> list[Raw]:
        """Return all current objects, by kind, namespace, and name."""
        return objects(self.registry.store)


def objects(store: ObjectStore) -> list[Raw]:
    """Return all objects, by kind, namespace, and name; equal for equal clusters."""
    return [
        {"apiVersion": "", "kind": kind, **stored.raw}
        for kind in sorted(store.kinds())
        for _, stored in store.entries(kind)
    ]


class _ReplayRegistry(Registry):
    """A registry that uses the UIDs and times of a history and compares writes with it."""

    def __init__(self, store: ObjectStore, admit: Admit) -> None:
        self._moment = datetime.min
        self._bytes = b""
        self._expected: dict[int, ObjectChanged] = {}
        super().__init__(lambda: self._moment, self._random_bytes, admit=admit, store=store)

    def _random_bytes(self, count: int) -> bytes:
        return (self._bytes or bytes(16))[:count].ljust(count, b"\0")

    def write(self, change: ObjectChanged) -> None:
        """Repeat a change of a user or node."""
        if change.object is None:
            self.store.delete(change.kind, change.namespace, change.name)
        else:
            self.store.put(change.kind, change.object)
        self._changed_kinds(change.kind)
        if self.version != change.change:
            raise InvalidHistory(f"version {change.change} follows {self.version - 1}: changes are missing")

    def expect(self, expected: Mapping[int, ObjectChanged], now: datetime) -> None:
        """Expect exactly these changes from now on."""
        self._expected, self._moment = dict(expected), now

    def check_complete(self) -> None:
        """Raise ReplayMismatch if an expected change is missing."""
        if self._expected:
            first = self._expected[min(self._expected)]
            raise ReplayMismatch(
                f"version {first.change}: {_describe(first)} was written in the history but not in the replay"
            )

    def create(self, kind: str, obj: Mapping[str, Any], *, dry_run: bool = False) -> Raw:
        """Create an object with the UID of the history."""
        expected = self._expected.get(self.version + 1)
        meta = (expected.object or {}).get("metadata", {}) if expected is not None else {}
        self._bytes = bytes.fromhex(str(meta.get("uid", "")).replace("-", ""))
        self._set_time(meta.get("creationTimestamp"))
        before = self.version
        made = super().create(kind, obj, dry_run=dry_run)
        self._check_changes(before)
        return made

    def update(self, kind: str, obj: Mapping[str, Any], *, subresource: str = "", dry_run: bool = False) -> Raw:
        """Update an object as in the history."""
        before = self.version
        made = super().update(kind, obj, subresource=subresource, dry_run=dry_run)
        self._check_changes(before)
        return made

    def delete(self, kind: str, namespace: str, name: str, **options: Unpack[DeleteOptions]) -> Raw | None:
        """Delete an object with the deletion time of the history."""
        expected = self._expected.get(self.version + 1)
        meta = (expected.object or {}).get("metadata", {}) if expected is not None else {}
        self._set_time(meta.get("deletionTimestamp"), int(meta.get("deletionGracePeriodSeconds") or 0))
        before = self.version
        left = super().delete(kind, namespace, name, **options)
        self._check_changes(before)
        return left

    def _set_time(self, stamp: object, seconds: int = 0) -> None:
        if isinstance(stamp, str):
            self._moment = datetime.fromisoformat(stamp) - timedelta(seconds=seconds)

    def _check_changes(self, before: int) -> None:
        for change in self.store.changes(before):
            expected = self._expected.pop(change.version, None)
            name = "/".join(part for part in change.key if part)
            if expected is None or (expected.kind, (expected.namespace, expected.name)) != (change.kind, change.key):
                then = (
                    f"{_describe(expected)} was written in the history"
                    if expected is not None
                    else "nothing was written in the history"
                )
                raise ReplayMismatch(f"version {change.version}: {change.kind} {name} is written in the replay, {then}")
            if expected.object != change.after:
                where = _difference(expected.object, change.after)
                raise ReplayMismatch(f"version {change.version}: {change.kind} {name} differs at {where}")


def _describe(change: ObjectChanged) -> str:
    name = f"{change.namespace}/{change.name}" if change.namespace else change.name
    return f"{change.kind} {name}" + (" (deleted)" if change.object is None else "")


def _difference(one: Any, other: Any, path: str = "") -> str:
    """Describe the first difference between two objects."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                return _difference(one.get(name), other.get(name), f"{path}.{name}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (mine, yours) in enumerate(zip(one, other, strict=True)):
            if mine != yours:
                return _difference(mine, yours, f"{path}[{index}]")
    values = [msgspec.json.encode(each).decode()[:80] for each in (one, other)]
    return f"{path or 'existence'}: {values[0]} in the history, {values[1]} in the replay"
