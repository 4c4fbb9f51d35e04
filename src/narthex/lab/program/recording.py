"""Recording of a lab's history into a file, and its replay."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

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
    """Writes one history. Callers hold the registry's lock."""

    def __init__(self, path: Path, lab: str, store: ObjectStore, now: datetime) -> None:
        """Create the file, which must not exist, and write the initial objects. Raises OSError."""
        # Objects may contain confidential data.
        path.touch(mode=0o600, exist_ok=False)
        self.path = path
        self._file = path.open("ab")
        self._store = store
        self._version = store.version
        for entry in initial_entries(lab, store, now):
            self._write(entry)
        self._file.flush()

    def record_controllers(self, moment: datetime, after: int, now: datetime) -> None:
        """Record a run of the controllers at time `moment` with the objects of version `after`."""
        self.record_changes(now)
        self._write(ControllersRan(turn=moment, after=after, upto=self._version))
        self._file.flush()

    def record_fault(self, fault: InjectedFault, now: datetime) -> None:
        """Record the start of a fault."""
        self.record_changes(now)
        self._write(FaultStarted(fault=fault, at=now))
        self._file.flush()

    def record_fault_end(self, number: int, now: datetime) -> None:
        """Record the end of a fault."""
        self.record_changes(now)
        self._write(FaultEnded(ended=number, at=now))
        self._file.flush()

    def record_changes(self, now: datetime) -> None:
        """Record the changes of objects since the last call."""
        for change in self._store.changes(self._version):
            self._write(change_entry(change, now))
        self._version = self._store.version

    def close(self, now: datetime) -> None:
        """Record pending changes and close the file."""
        self.record_changes(now)
        self._file.close()

    def _write(self, entry: HistoryEntry) -> None:
        self._file.write(encode_line(entry))


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lab-replay"):
    """The result of a complete replay, as `narthex lab replay -o json` prints it."""

    version: Literal[1] = 1
    lab: str
    begin: datetime
    end: datetime
    written: int
    """Changes by users and nodes."""
    decided: int
    """Changes by controllers, all repeated identically."""
    turns: int
    objects: list[dict[str, Any]]
    """Final objects, by kind, namespace, and name."""


def replay(
    path: Path, speed: float | None = None, on_step: Callable[[datetime, Replay], object] | None = None
) -> ReplaySummary:
    """Replay the history in a file. Raises LabError if it is malformed or a controller decides differently.

    Args:
        path: The recorded file.
        speed: Factor of the original pace; None does not wait.
        on_step: Called after each step with its time and the replay.
    """
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
        raise LabError(f"{path} is not a history of a lab: {error}") from None
    except ReplayMismatch as error:
        raise LabError(f"{path}: the controllers of this version decide differently: {error}") from None
    return ReplaySummary(
        lab=replay_.begin.lab,
        begin=begin,
        end=last,
        written=replay_.written,
        decided=replay_.decided,
        turns=replay_.turns,
        objects=replay_.objects(),
    )
