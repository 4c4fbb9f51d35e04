"""Writes a lab's history into a file while it happens. Whoever calls holds the lock of the objects."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from narthex.lab.api.store import Store
from narthex.lab.faults import Fault
from narthex.lab.history import Broke, Entry, Mended, Turned, begun, changed, line


class Recorder:
    """One history."""

    def __init__(self, path: Path, lab: str, store: Store, now: datetime) -> None:
        """Begins the file, which must not be there yet. Raises OSError."""
        # Objects may hold what is nobody else's business.
        path.touch(mode=0o600, exist_ok=False)
        self.path = path
        self._file = path.open("ab")
        self._store = store
        self._version = store.version
        for entry in begun(lab, store, now):
            self._write(entry)
        self._file.flush()

    def turned(self, moment: datetime, after: int, now: datetime) -> None:
        """The controllers had their turn with the objects of version `after`, and were told `moment`."""
        self.catch_up(now)
        self._write(Turned(turn=moment, after=after, upto=self._version))
        self._file.flush()

    def broke(self, fault: Fault, now: datetime) -> None:
        """A fault began."""
        self.catch_up(now)
        self._write(Broke(fault=fault, at=now))
        self._file.flush()

    def mended(self, number: int, now: datetime) -> None:
        """A fault ended."""
        self.catch_up(now)
        self._write(Mended(ended=number, at=now))
        self._file.flush()

    def catch_up(self, now: datetime) -> None:
        """Write what has changed since the last time."""
        for change in self._store.changes(self._version):
            self._write(changed(change, now))
        self._version = self._store.version

    def close(self, now: datetime) -> None:
        """End the file."""
        self.catch_up(now)
        self._file.close()

    def _write(self, entry: Entry) -> None:
        self._file.write(line(entry))
