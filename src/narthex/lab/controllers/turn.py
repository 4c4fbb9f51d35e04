"""One turn of all controllers: what changed wakes who is concerned, and each says what it wants written.

    control = all_controllers()                    # cluster.py
    while writes := control.turn(registry, now):   # settle() there does this
        ...

Each controller looks at single objects (its keys). A change in the view, a moment that has come and a write that was
refused make a key due; nothing else is looked at. Nothing that comes out of a turn depends on anything but the view's
history and the times given, so a recorded history replays alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Protocol

import msgspec

from narthex.lab.controllers.present import Present, Seen
from narthex.lab.controllers.view import Again, Answer, Key, View, Work, Write, named
from narthex.model.backoff import Backoff

_BACKOFF = Backoff(0.25, 30.0)
_MADE_OTHERWISE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading an object of another shape than Kubernetes' ends in."""


class Controller(Protocol):
    """One kind of care. Its state between turns may be counters and observed times only."""

    name: str
    kinds: frozenset[str]
    """The kinds of objects whose changes concern it; empty: all."""

    def concerned(self, seen: Seen, present: Present) -> Iterable[Key]:
        """The keys that a change makes due."""

    def look(self, key: Key, present: Present, now: datetime) -> Iterable[Answer]:
        """What is to be done for a key, whose object may be gone."""


class Control:
    """The controllers of one cluster."""

    def __init__(self, controllers: Sequence[Controller]) -> None:
        self._controllers = tuple(controllers)
        self._present = Present()
        self._by_kind: dict[str, tuple[Controller, ...]] = {}
        self._due: dict[str, set[Key]] = {each.name: set() for each in self._controllers}
        self._later: dict[Work, datetime] = {}
        self._refusals: dict[Work, int] = {}
        self.problems: dict[Work, str] = {}
        """What a controller could not make out or was not allowed to write, in a sentence, for as long as that is so."""

    def turn(self, view: View, now: datetime) -> Sequence[Write]:
        """What all controllers want written now. Empty: the cluster is as it must be until `next_due`."""
        for seen in self._present.follow(view):
            for controller in self._interested(seen.kind):
                self._wake(controller, seen, now)
        for work in [work for work, at in self._later.items() if at <= now]:
            del self._later[work]
            self._due[work.controller].add(work.key)
        writes: list[Write] = []
        for controller in self._controllers:
            keys = sorted(self._due[controller.name])
            self._due[controller.name].clear()
            for key in keys:
                writes += self._look(controller, key, now)
        return writes

    def _interested(self, kind: str) -> tuple[Controller, ...]:
        found = self._by_kind.get(kind)
        if found is None:
            found = tuple(each for each in self._controllers if not each.kinds or kind in each.kinds)
            self._by_kind[kind] = found
        return found

    def _wake(self, controller: Controller, seen: Seen, now: datetime) -> None:
        try:
            self._due[controller.name].update(controller.concerned(seen, self._present))
        except _MADE_OTHERWISE:
            # The look will say what is wrong with it.
            self._wait(Work(controller.name, seen.key), now)

    def _look(self, controller: Controller, key: Key, now: datetime) -> list[Write]:
        work = Work(controller.name, key)
        # What is looked at says anew when it wants to be looked at again.
        self._later.pop(work, None)
        writes: list[Write] = []
        try:
            for answer in controller.look(key, self._present, now):
                if isinstance(answer, Again):
                    self._wait(work, answer.at)
                else:
                    writes.append(msgspec.structs.replace(answer, by=work))
        except _MADE_OTHERWISE as error:
            # One object that nobody understands must not stop the others.
            self.problems[work] = f"{controller.name} cannot make out {key}: {type(error).__name__}: {error}"
            self._wait(work, now + timedelta(seconds=_BACKOFF.longest))
            return []
        self.problems.pop(work, None)
        return writes

    def outdated(self, write: Write) -> None:
        """Tell that a write of the last turn met another version of its object (409 Conflict): it is decided again at once."""
        if write.by is not None:
            self._due[write.by.controller].add(write.by.key)

    def refused(self, write: Write, why: str, now: datetime) -> None:
        """Tell that a write of the last turn was not done: it is decided again after a pause that doubles each time."""
        if write.by is None:
            return
        self.problems[write.by] = f"{write.by.controller} could not write {named(write)}: {why}"
        count = self._refusals[write.by] = self._refusals.get(write.by, 0) + 1
        self._wait(write.by, now + timedelta(seconds=_BACKOFF.delay(count)))

    def done(self, write: Write) -> None:
        """Tell that a write was done, so that the next refusal of its kind counts as the first."""
        if write.by is not None:
            self._refusals.pop(write.by, None)

    def next_due(self, view: View, now: datetime) -> float | None:
        """Seconds until a turn is due although nothing happens; 0: now; None: never."""
        if view.version != self._present.version or any(self._due.values()):
            return 0.0
        return max(0.0, (min(self._later.values()) - now).total_seconds()) if self._later else None

    def _wait(self, work: Work, at: datetime) -> None:
        self._later[work] = min(at, self._later.get(work, at))
