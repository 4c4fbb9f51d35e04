"""Persistence of the registry: a SQLite file that a thread writes, so that no request waits for the disk.

    database = ObjectDatabase(path)
    database.load(registry.store)       # what was saved; versions continue from there
    database.follow(registry, lock)     # from now on; call `database.wake()` after changes
    database.close()                    # writes the rest

Each batch is one transaction with its version, so that after a crash the file holds a consistent past state. After a load,
versions continue behind a margin, so that none is issued twice, not even those that a crash lost.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from narthex.lab.api.registry import Registry
from narthex.lab.api.store import ObjectStore, Raw
from narthex.runtime.logs import LOGGER

_SCHEMA = 1
_MARGIN = 10_000
"""Versions that may have been issued since the last transaction."""
_PAUSE = 0.2
"""Seconds for which changes are collected."""
_RETRY = 5.0
"""Seconds after which a batch that could not be written is tried again."""


_Objects = dict[tuple[str, str, str], Raw | None]
"""Objects by kind, namespace, and name; None: deleted."""


class UnreadableDatabase(Exception):
    """A file that is no such database, or damaged. The message says which file and what to do."""


class ObjectDatabase:
    """A database file. Any thread may open and close it; it writes in a thread of its own."""

    def __init__(self, path: Path) -> None:
        """Open or create a file. Raises UnreadableDatabase, OSError."""
        self._path = path
        try:
            path.touch(0o600)
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._file.executescript(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
                "CREATE TABLE IF NOT EXISTS objects"
                " (kind TEXT, namespace TEXT, name TEXT, data BLOB, PRIMARY KEY (kind, namespace, name)) WITHOUT ROWID;"
                "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;"
            )
            held = dict(self._file.execute("SELECT name, value FROM facts"))
        except sqlite3.DatabaseError as error:
            raise self._unreadable(str(error)) from error
        if held.setdefault("schema", _SCHEMA) != _SCHEMA:
            raise self._unreadable(f"it was written by another version of Narthex (schema {held['schema']})")
        self._version = int(held.get("version", 0))
        self._news = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None
        self.trouble = ""
        """Why nothing can be written at present, empty when it can."""

    def load(self, store: ObjectStore) -> int:
        """Load the saved objects into an empty store and return their number. Raises UnreadableDatabase."""
        entries = list(self._entries())
        if entries or self._version:
            store.load(self._version + _MARGIN, iter(entries))
        return len(entries)

    def follow(self, registry: Registry, lock: threading.RLock) -> None:
        """Save all objects, then every change."""
        with lock:
            version, held = registry.version, _all_objects(registry.store)
        self._write(version, held, whole=True)
        self._thread = threading.Thread(target=self._run, args=(registry, lock), name="keeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Save changes that have been made."""
        self._news.set()

    def close(self) -> None:
        """Save the remaining changes and close the file."""
        self._over = True
        self._news.set()
        if self._thread is not None:
            self._thread.join()
        self._file.close()

    def _run(self, registry: Registry, lock: threading.RLock) -> None:
        while True:
            self._news.wait(_RETRY if self.trouble else None)
            if not self._over:
                # Changes come in bursts.
                time.sleep(_PAUSE)
            self._news.clear()
            # `close` sets this before it wakes the thread, so it is not missed.
            over = self._over
            before = self.trouble
            try:
                self._catch_up(registry, lock)
                self.trouble = ""
            except sqlite3.Error as error:
                # Such as a full disk. The next batch includes what this one could not write.
                self.trouble = f"{self._path}: {error}"
            if self.trouble and self.trouble != before:
                LOGGER.warning("objects cannot be saved and are tried again: %s", self.trouble)
            elif before and not self.trouble:
                LOGGER.warning("objects are saved again: %s", self._path)
            if over:
                return

    def _catch_up(self, registry: Registry, lock: threading.RLock) -> None:
        with lock:
            version, store = registry.version, registry.store
            whole = self._version < store.oldest
            if whole:
                found = _all_objects(store)
            else:
                found = {(each.kind, *each.key): each.after for each in store.changes(self._version)}
        if version != self._version:
            self._write(version, found, whole=whole)

    def _write(self, version: int, objects: _Objects, *, whole: bool) -> None:
        gone = [key for key, raw in objects.items() if raw is None]
        there = [(*key, msgspec.json.encode(raw)) for key, raw in objects.items() if raw is not None]
        self._file.execute("BEGIN IMMEDIATE")
        try:
            if whole:
                self._file.execute("DELETE FROM objects")
            self._file.executemany("DELETE FROM objects WHERE kind = ? AND namespace = ? AND name = ?", gone)
            self._file.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", there)
            facts = [("schema", _SCHEMA), ("version", version)]
            self._file.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts)
            self._file.execute("COMMIT")
        except BaseException:
            # SQLite has ended the transaction itself if the disk is full, for example.
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise
        self._version = version

    def _entries(self) -> Iterator[tuple[str, Raw]]:
        try:
            for kind, name, data in self._file.execute("SELECT kind, name, data FROM objects"):
                raw = msgspec.json.decode(data)
                meta = raw.get("metadata") if isinstance(raw, dict) else None
                if not str((meta or {}).get("resourceVersion", "")).isdigit():
                    raise self._unreadable(f"what is kept of {kind} {name} is no object")
                yield kind, raw
        except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
            raise self._unreadable(str(error)) from error

    def _unreadable(self, why: str) -> UnreadableDatabase:
        return UnreadableDatabase(
            f"{self._path} cannot be read as a lab's saved objects: {why}. Remove it to start with an empty cluster"
        )


def _all_objects(store: ObjectStore) -> _Objects:
    return {(kind, *key): held.raw for kind in store.kinds() for key, held in store.entries(kind)}
