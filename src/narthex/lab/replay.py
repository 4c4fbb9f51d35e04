"""Replay of a history: writes of users and nodes are repeated, and the controllers decide again.

Controllers depend only on the objects and on the times passed in, so they must decide identically; the first difference is
an error. Names, addresses, UIDs, versions, and times are those of the history.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec

from narthex.lab.api.registry import Admit, Registry
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

    def __init__(
        self, entries: Iterable[HistoryEntry], admit: Admit, controllers: ControllerManager | None = None
    ) -> None:
        """Load the initial objects. `admit` is the API's admission for writes of controllers. Raises InvalidHistory."""
        self._entries = iter(entries)
        begin = next(self._entries, None)
        if not isinstance(begin, HistoryStart):
            raise InvalidHistory("the file is empty")
        self.begin = begin
        self._ahead: list[ObjectChanged] = []
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
        self.registry = _Again(store, admit)
        self._control = controllers or lab_controllers()
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
                # The next entry of another type tells whether the controllers made this change.
                self._ahead.append(entry)
            elif isinstance(entry, ControllersRan):
                self._turn(entry)
                return entry.turn
            elif isinstance(entry, FaultStarted):
                self._others()
                self.faults[entry.fault.number] = entry.fault
                return entry.at
            elif isinstance(entry, FaultEnded):
                self._others()
                self.faults.pop(entry.ended, None)
                return entry.at
            else:
                raise InvalidHistory("initial objects must precede all other entries")
        last = self._ahead[-1].at if self._ahead else None
        self._others()
        return last

    def _others(self, upto: int | None = None) -> None:
        """Write what people and nodes had written, up to a version."""
        while self._ahead and (upto is None or self._ahead[0].change <= upto):
            self.registry.write(self._ahead.pop(0))
            self.written += 1

    def _turn(self, entry: ControllersRan) -> None:
        self._others(entry.after)
        told = {each.change: each for each in self._ahead if each.change <= entry.upto}
        self._ahead = [each for each in self._ahead if each.change > entry.upto]
        before = self.registry.version
        if before != entry.after:
            raise InvalidHistory(f"changes between version {before} and {entry.after} are missing")
        self.registry.expect(told, entry.turn)
        run_until_stable(self._control, self.registry, entry.turn)
        self.registry.met()
        self.turns += 1
        self.decided += len(told)

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


class _Again(Registry):
    """A registry that gives out the uids and times of a history, and holds what is written against it."""

    def __init__(self, store: ObjectStore, admit: Admit) -> None:
        self._moment = datetime.min
        self._bytes = b""
        self._told: dict[int, ObjectChanged] = {}
        super().__init__(lambda: self._moment, self._drawn, admit=admit, store=store)

    def _drawn(self, count: int) -> bytes:
        return (self._bytes or bytes(16))[:count].ljust(count, b"\0")

    def write(self, change: ObjectChanged) -> None:
        """Make a change as it was."""
        if change.object is None:
            self.store.delete(change.kind, change.namespace, change.name)
        else:
            self.store.put(change.kind, change.object)
        self._changed_kinds(change.kind)
        if self.version != change.change:
            raise InvalidHistory(f"version {change.change} follows {self.version - 1}: changes are missing")

    def expect(self, told: Mapping[int, ObjectChanged], now: datetime) -> None:
        """From now on these changes must be made, and no others."""
        self._told, self._moment = dict(told), now

    def met(self) -> None:
        """Raise Differs when a change was not made."""
        if self._told:
            first = self._told[min(self._told)]
            raise ReplayMismatch(
                f"version {first.change}: {_what(first)} was written in the history but not in the replay"
            )

    def create(self, kind: str, obj: Mapping[str, Any], *, dry_run: bool = False) -> Raw:
        """As in the history, with the same uid."""
        told = self._told.get(self.version + 1)
        meta = (told.object or {}).get("metadata", {}) if told is not None else {}
        self._bytes = bytes.fromhex(str(meta.get("uid", "")).replace("-", ""))
        self._take(meta.get("creationTimestamp"))
        before = self.version
        made = super().create(kind, obj, dry_run=dry_run)
        self._compare(before)
        return made

    def update(self, kind: str, obj: Mapping[str, Any], *, subresource: str = "", dry_run: bool = False) -> Raw:
        """As in the history."""
        before = self.version
        made = super().update(kind, obj, subresource=subresource, dry_run=dry_run)
        self._compare(before)
        return made

    def delete(
        self,
        kind: str,
        namespace: str,
        name: str,
        *,
        grace: int | None = None,
        preconditions: Mapping[str, Any] | None = None,
        propagation: str | None = None,
        dry_run: bool = False,
    ) -> Raw | None:
        """As in the history, with the same time of deletion."""
        told = self._told.get(self.version + 1)
        meta = (told.object or {}).get("metadata", {}) if told is not None else {}
        self._take(meta.get("deletionTimestamp"), int(meta.get("deletionGracePeriodSeconds") or 0))
        before = self.version
        left = super().delete(
            kind, namespace, name, grace=grace, preconditions=preconditions, propagation=propagation, dry_run=dry_run
        )
        self._compare(before)
        return left

    def _take(self, stamp: object, seconds: int = 0) -> None:
        if isinstance(stamp, str):
            self._moment = datetime.fromisoformat(stamp) - timedelta(seconds=seconds)

    def _compare(self, before: int) -> None:
        for change in self.store.changes(before):
            told = self._told.pop(change.version, None)
            name = "/".join(part for part in change.key if part)
            if told is None or (told.kind, (told.namespace, told.name)) != (change.kind, change.key):
                then = (
                    f"{_what(told)} was written in the history"
                    if told is not None
                    else "nothing was written in the history"
                )
                raise ReplayMismatch(f"version {change.version}: {change.kind} {name} is written in the replay, {then}")
            if told.object != change.after:
                where = _difference(told.object, change.after)
                raise ReplayMismatch(f"version {change.version}: {change.kind} {name} differs at {where}")


def _what(change: ObjectChanged) -> str:
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
    said = [msgspec.json.encode(each).decode()[:80] for each in (one, other)]
    return f"{path or 'existence'}: {said[0]} in the history, {said[1]} in the replay"
