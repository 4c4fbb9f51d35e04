"""Writes a lab's history into a file while it happens. Whoever calls holds the lock of the objects."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from narthex.lab.api.store import ObjectStore
from narthex.lab.controllers.service.admission import admission
from narthex.lab.faults import InjectedFault
from narthex.lab.history import (
    ControllersRan,
    FaultEnded,
    FaultStarted,
    HistoryEntry,
    InvalidHistory,
    change_entry,
    encode_line,
    initial_entries,
    read,
)
from narthex.lab.program.state import LabError
from narthex.lab.replay import Replay, ReplayMismatch


class HistoryRecorder:
    """One history."""

    def __init__(self, path: Path, lab: str, store: ObjectStore, now: datetime) -> None:
        """Begins the file, which must not be there yet. Raises OSError."""
        # Objects may hold what is nobody else's business.
        path.touch(mode=0o600, exist_ok=False)
        self.path = path
        self._file = path.open("ab")
        self._store = store
        self._version = store.version
        for entry in initial_entries(lab, store, now):
            self._write(entry)
        self._file.flush()

    def record_controllers(self, moment: datetime, after: int, now: datetime) -> None:
        """The controllers had their turn with the objects of version `after`, and were told `moment`."""
        self.record_changes(now)
        self._write(ControllersRan(turn=moment, after=after, upto=self._version))
        self._file.flush()

    def record_fault(self, fault: InjectedFault, now: datetime) -> None:
        """A fault began."""
        self.record_changes(now)
        self._write(FaultStarted(fault=fault, at=now))
        self._file.flush()

    def record_fault_end(self, number: int, now: datetime) -> None:
        """A fault ended."""
        self.record_changes(now)
        self._write(FaultEnded(ended=number, at=now))
        self._file.flush()

    def record_changes(self, now: datetime) -> None:
        """Write what has changed since the last time."""
        for change in self._store.changes(self._version):
            self._write(change_entry(change, now))
        self._version = self._store.version

    def close(self, now: datetime) -> None:
        """End the file."""
        self.record_changes(now)
        self._file.close()

    def _write(self, entry: HistoryEntry) -> None:
        self._file.write(encode_line(entry))


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """A history that was gone through."""

    lab: str
    begin: datetime
    end: datetime
    written: int
    """Changes that people and nodes had made."""
    decided: int
    """Changes that the controllers decided again, each as then."""
    turns: int
    objects: list[dict[str, Any]]
    """At the end, by kind, namespace and name."""


def replay(
    path: Path, speed: float | None = None, on_step: Callable[[datetime, Replay], object] | None = None
) -> ReplaySummary:
    """Go through the history in a file. `speed`: 2 takes half the time that it took then; None waits for nothing. `seen` is
    told after each step. Raises LabError when it is no history, and when the controllers decide otherwise."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}") from None
    try:
        with file:
            replay_ = Replay(read(file), admission())
            last = begin = replay_.begin.at
            started = time.monotonic()
            while (moment := replay_.step()) is not None:
                last = max(last, moment)
                if speed is not None:
                    time.sleep(max(0.0, (last - begin).total_seconds() / speed - (time.monotonic() - started)))
                if on_step is not None:
                    on_step(last, replay_)
    except InvalidHistory as error:
        raise LabError(f"{path} is no history of a lab: {error}") from None
    except ReplayMismatch as error:
        raise LabError(f"{path}: the controllers of this version decide otherwise: {error}") from None
    return ReplaySummary(
        lab=replay_.begin.lab,
        begin=begin,
        end=last,
        written=replay_.written,
        decided=replay_.decided,
        turns=replay_.turns,
        objects=replay_.objects(),
    )
