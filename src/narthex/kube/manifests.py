"""Manifests on disk as a source: a file, or a directory with all `.yaml`, `.yml`, and `.json` files below it.

Level-triggered: `scan` reads the present state and returns the difference to the previous scan; watching only says
when to scan. Read errors delete nothing: a broken file keeps its last valid objects, a broken object its last valid
state, and both are in `problems` until they are repaired. So does a symbolic link whose target is missing.

Deleting a file, or an object in it, deletes the objects once the file has not changed for `SETTLE_SECONDS`: it may be
half written, or its editor may be about to replace it.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from narthex.model import AnyObject, Delete, Event, Problem, ProblemList, Synced, Upsert
from narthex.model.decode.objects import MAX_BYTES, DecodeFunction, Identity, Loaded, decode, load

SUFFIXES = (".yaml", ".yml", ".json")

DEBOUNCE_MS = 40
"""Changes within this time are scanned together."""
LOOK_AGAIN_SECONDS = 1.0
"""Scan period: inotify does not report a replaced directory, nor changes behind a symbolic link that leads outside."""
SETTLE_SECONDS = 2.0
"""A file that lost objects is read again until it has not changed for this long; only then the loss takes effect."""
LONGEST_SETTLE_SECONDS = 7.0
"""The loss takes effect after this time even if the file keeps changing, since a deletion must take effect within 10 s."""
_RACY_NS = 100_000_000
"""A file that is written twice within one tick of the file system's clock looks unchanged, so recent files are read
again.
"""

Signature = tuple[int, int, int, int]


class _File(msgspec.Struct):
    signature: Signature | None
    """Modification time and change time in ns, size, and inode; None forces another read."""
    digest: bytes
    objects: dict[Identity, AnyObject]
    """The last valid state of each object, in the order of the file."""
    repeated: list[AnyObject]
    """Objects that the file contains twice."""
    problems: tuple[Problem, ...]
    lost: dict[Identity, AnyObject] = {}
    """Objects that the file lost, and that stay in force until it settles."""
    lost_since: dict[Identity, float] = {}
    """When each of them was first missing, in seconds of a monotonic clock."""
    changed_at: float = 0.0
    """When the present content, or the absence of the file, was first seen."""
    gone: bool = False

    @property
    def settles_at(self) -> float:
        """Return when a loss takes effect if the file does not change again."""
        return min(self.changed_at + SETTLE_SECONDS, min(self.lost_since.values()) + LONGEST_SETTLE_SECONDS)


class ManifestSource:
    """Reads manifests below a path. Not thread-safe: one thread scans or watches."""

    def __init__(
        self, path: str | os.PathLike[str], decoding: DecodeFunction = decode, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare a source.

        `decoding` makes the objects, which have a `key`, an `origin`, and a kind (`identity_of`). `now` is a monotonic
        clock, in seconds.
        """
        self.path = Path(path)
        self._now = now
        self._decoding = decoding
        self._files: dict[str, _File] = {}
        self._reported: dict[Identity, AnyObject] = {}
        self._synced = False
        self.problems: tuple[Problem, ...] = ()
        """The present problems, by file name and line; at most `MAX_PROBLEMS`, and how many more there are."""
        self._next_look = 0.0

    @property
    def settling(self) -> bool:
        """Return True if objects are missing, but still in force: scan again soon."""
        return any(file.lost for file in self._files.values())

    def scan(self) -> list[Event]:
        """Return the changes since the last scan; the first scan that finds the path ends with Synced.

        An object that only moved to another line or file is unchanged.
        """
        started = self._now()
        found, unreadable = self._find()
        for name in [name for name in self._files if name not in found]:
            if not any(not place or name.startswith(f"{place}/") for place in unreadable):
                self._vanish(name)
        problems = list(unreadable.values())
        for name, path in found.items():
            self._refresh(name, path)
        self._drop_settled()
        objects, duplicates = self._settle()
        problems.extend(problem for name in sorted(self._files) for problem in self._files[name].problems)
        self.problems = ProblemList(origin=str(self.path)).extend(problems).extend(duplicates.problems).problems
        events = self._difference(objects)
        if not self._synced and "" not in unreadable:
            self._synced = True
            events.append(Synced())
        # Scans without a notification may take at most 2 % of the time.
        now = self._now()
        settles = (file.settles_at for file in self._files.values() if file.lost)
        self._next_look = min(now + 50 * (now - started), *settles, math.inf)
        return events

    def changes(self, stop: threading.Event) -> Iterator[list[Event]]:
        """Block until something changes and yield the events, until `stop` is set.

        Also yields, possibly an empty list, when only `problems` changed.
        """
        while not stop.is_set():
            for _ in self._wake_ups(stop):
                before = self.problems
                events = self.scan()
                if events or self.problems != before:
                    yield events

    def _wake_ups(self, stop: threading.Event) -> Iterator[None]:
        """Yield when to scan, until another path must be watched or watching is impossible."""
        import watchfiles

        try:
            whole_tree = self.path.is_dir()
            watched = self.path if whole_tree else self.path.parent
            before = _identity(watched)
            for seen in watchfiles.watch(
                watched,
                watch_filter=None,
                debounce=DEBOUNCE_MS,
                step=10,
                stop_event=stop,
                rust_timeout=int(LOOK_AGAIN_SECONDS * 1000),
                yield_on_timeout=True,
                recursive=whole_tree,
            ):
                if seen or self._now() >= self._next_look:
                    yield None
                if self.path.is_dir() != whole_tree or _identity(watched) != before:
                    return
        except (OSError, RuntimeError):
            # No such directory, or no inotify watch left on this machine: look from time to time instead.
            stop.wait(LOOK_AGAIN_SECONDS / 2)
            yield None

    def _find(self) -> tuple[dict[str, Path], dict[str, Problem]]:
        """Return the files by name, sorted, and the unreadable directories ("" is the path itself)."""
        found: dict[str, Path] = {}
        unreadable: dict[str, Problem] = {}
        try:
            mode = self.path.stat().st_mode
        except OSError as error:
            return found, {"": _unreadable(str(self.path), error)}
        if not stat.S_ISDIR(mode):
            return {self.path.name: self.path}, unreadable
        pending = [("", self.path)]
        while pending:
            prefix, directory = pending.pop()
            try:
                entries = list(os.scandir(directory))
            except OSError as error:
                unreadable[prefix.rstrip("/")] = _unreadable(str(directory), error)
                continue
            for entry in entries:
                if entry.name.startswith((".", "#", "~")):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append((f"{prefix}{entry.name}/", Path(entry.path)))
                elif entry.name.endswith(SUFFIXES) and _is_file(entry, known=prefix + entry.name in self._files):
                    found[prefix + entry.name] = Path(entry.path)
        return dict(sorted(found.items())), unreadable

    def _refresh(self, name: str, path: Path) -> None:
        """Read a file again if it looks changed."""
        known = self._files.get(name)
        try:
            found = path.stat()
            signature = found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
            if known is not None and known.signature == signature and not known.lost:
                return
            data = _read(path)
        except OSError as error:
            # Deleted since it was found counts as deleted; all else is trouble with a file that is there.
            if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
                self._vanish(name)
            else:
                self._keep(name, known, None, b"", Loaded(problems=(_unreadable(str(path), error),), whole=False))
            return
        settled = signature if time.time_ns() - signature[0] > _RACY_NS else None
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if known is not None and known.digest == digest:
            known.signature = settled
            return
        self._keep(name, known, settled, digest, load(data, str(path), self._decoding))

    def _keep(self, name: str, known: _File | None, signature: Signature | None, digest: bytes, loaded: Loaded) -> None:
        """Store the content of a file, with the last valid state of broken objects."""
        objects: dict[Identity, AnyObject] = {}
        lost: dict[Identity, AnyObject] = {}
        repeated = []
        for item in loaded.objects:
            identity = _identity_of(item)
            if identity in objects:
                repeated.append(item)
            else:
                objects[identity] = item
        for identity, item in (known.objects | known.lost if known is not None else {}).items():
            if identity not in objects:
                kept = identity in loaded.refused or not loaded.whole
                (objects if kept else lost)[identity] = item
        now = self._now()
        before = known.lost_since if known is not None else {}
        lost_since = {identity: before.get(identity, now) for identity in lost}
        self._files[name] = _File(signature, digest, objects, repeated, loaded.problems, lost, lost_since, now)

    def _vanish(self, name: str) -> None:
        """Note that a file is not there."""
        known = self._files.get(name)
        if known is None or known.gone:
            return
        self._keep(name, known, None, b"", Loaded())
        self._files[name].gone = True

    def _drop_settled(self) -> None:
        """Let losses take effect in files that have not changed for a while."""
        now = self._now()
        for name, file in list(self._files.items()):
            settled = now >= file.changed_at + SETTLE_SECONDS
            for identity in list(file.lost):
                # Each for itself: a file may be half written while it is about to lose something else.
                if settled or now >= file.lost_since[identity] + LONGEST_SETTLE_SECONDS:
                    del file.lost[identity], file.lost_since[identity]
            if file.gone and not file.lost:
                del self._files[name]

    def _settle(self) -> tuple[dict[Identity, AnyObject], ProblemList]:
        """Select one object for each identity: the first by file name and line."""
        objects: dict[Identity, AnyObject] = {}
        problems = ProblemList()
        for name in sorted(self._files):
            file = self._files[name]
            for item in [*file.objects.values(), *file.repeated]:
                identity = _identity_of(item)
                first = objects.setdefault(identity, item)
                if first is not item:
                    problems.append(_duplicate(first, item))
        for name in sorted(self._files):
            # An object that moved to another file is not lost.
            for identity, item in self._files[name].lost.items():
                objects.setdefault(identity, item)
        return objects, problems

    def _difference(self, objects: dict[Identity, AnyObject]) -> list[Event]:
        gone = [identity for identity in self._reported if identity not in objects]
        events: list[Event] = [Delete(kind, key) for kind, key in gone]
        for identity in gone:
            del self._reported[identity]
        for identity, item in objects.items():
            reported = self._reported.get(identity)
            if reported is item:
                continue
            self._reported[identity] = item
            if reported is None or reported != msgspec.structs.replace(item, origin=reported.origin):
                events.append(Upsert(item))
        return events


def _identity_of(item: AnyObject) -> Identity:
    """Return kind and name. Objects that represent several kinds define their own."""
    return getattr(item, "kind", "") or type(item).__name__, item.key


def _duplicate(first: AnyObject, second: AnyObject) -> Problem:
    return Problem(
        origin=second.origin,
        object=f"{_identity_of(second)[0]} {second.key}",
        message=f"is defined twice: {first.origin} counts (first by file name and line), this one is ignored",
    )


def _unreadable(place: str, error: OSError) -> Problem:
    kept = "what was read from it before stays in force"
    return Problem(origin=place, message=f"cannot be read: {error.strerror or error}; {kept}")


def _is_file(entry: os.DirEntry[str], known: bool) -> bool:
    """Return True for a file. What cannot be asked, such as a link without a target, is one if it was one before."""
    try:
        if entry.is_file():
            return True
        entry.stat()
    except OSError:
        return known
    return False


def _identity(path: Path) -> Any:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _read(path: Path) -> bytes:
    """Return the content, cut one byte above the limit, so that `load` reports the excess without reading it all."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)
