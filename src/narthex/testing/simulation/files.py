"""A simulated user and editor of manifests: files in a real directory, written in all the ways that programs have.

The directory is real, so that the real source reads it; when it is read, and when it is written, is virtual time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from narthex.kube.manifests import DEBOUNCE_MS, LONGEST_SETTLE_SECONDS, LOOK_AGAIN_SECONDS, ManifestSource
from narthex.lab.encode import encode
from narthex.model import AnyObject, Event
from narthex.testing.simulation.time import VirtualLoop

LONGEST_PAUSE = 1.4
"""Of a writer in the middle of a file: less than the time after which the proxy believes in what it reads."""
_COMPLETE_SECONDS = 1.5
"""A file stays complete for so long before it is written again, so that the source sees it once."""
LONGEST_DANGLING = 30.0
DELETION_SECONDS = 10.0
"""A deletion takes effect within this time after the file was written."""

_MEMORY = Path("/dev/shm")
"""Faster than a disk."""

Identity = tuple[str, str, str]


class SimulatedFiles:
    """The manifests of a cluster. Each file has one writer at a time, which ends with what is desired."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        """Create an empty directory."""
        self.loop = loop
        self.random = random
        self.deaf = False
        """The kernel reports no changes of files (no inotify watch is left): they are looked for from time to time."""
        self._directory = tempfile.TemporaryDirectory(prefix="narthex-sim-", dir=_MEMORY if _MEMORY.is_dir() else None)
        self.path = Path(self._directory.name)
        self._grouped = random.random() < 0.4
        """Several Services share a file."""
        self._desired: dict[str, dict[Identity, AnyObject]] = {}
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._targets = 0
        self.written_at = 0.0
        """The last change of any file."""
        self.versions: dict[str, int] = {}
        """How often each file was changed."""
        self.settled: Callable[[str], None] = lambda _: None
        """Called with the name of a file that has all that is desired."""
        self._seen = asyncio.Event()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Remove the directory."""
        for task in self._writing.values():
            task.cancel()
        self._directory.cleanup()

    # ---- what the world asks for -----------------------------------------------------------------------------------

    def put(self, obj: AnyObject) -> None:
        """Create or replace an object."""
        self._desired.setdefault(self._name(obj), {})[_identity(obj)] = obj
        self._write(self._name(obj))

    def delete(self, obj: AnyObject) -> None:
        """Delete an object."""
        self._desired.get(self._name(obj), {}).pop(_identity(obj), None)
        self._write(self._name(obj))

    def rewrite(self) -> None:
        """Write a file anew, as an editor does that saves what has not changed."""
        if self._desired:
            self._write(self.random.choice(sorted(self._desired)))

    def objects(self) -> Iterator[AnyObject]:
        """Yield the present objects."""
        for objects in self._desired.values():
            yield from objects.values()

    def _name(self, obj: AnyObject) -> str:
        if type(obj).__name__ == "Node":
            return "node.json"
        return self.name_of(getattr(obj, "service_name", "") or obj.name)

    def name_of(self, service: str) -> str:
        """Return the file of a Service."""
        return f"group{int(service[-1]) % 3}.json" if self._grouped else f"{service}.json"

    @property
    def busy(self) -> bool:
        """True while a file is being written, or a link has no target."""
        return any(not task.done() for task in self._writing.values())

    # ---- the writers -----------------------------------------------------------------------------------------------

    def _write(self, name: str) -> None:
        task = self._writing.get(name)
        if self.loop.time() == 0.0:
            self._put(name, self._text(name))
        elif task is None or task.done():
            self._writing[name] = self.loop.create_task(self._rewrite(name))

    async def _rewrite(self, name: str) -> None:
        # What is changed at the same time is written together.
        await asyncio.sleep(0)
        while True:
            objects = dict(self._desired[name])
            await self._bring(name, self._text(name))
            if objects == self._desired[name]:
                self.settled(name)
            await asyncio.sleep(_COMPLETE_SECONDS)
            if objects == self._desired[name]:
                break

    def _text(self, name: str) -> bytes:
        items = [encode(obj) for obj in self._desired[name].values()]
        return b"".join(msgspec.json.encode(item) + b"\n---\n" for item in items)

    async def _bring(self, name: str, text: bytes) -> None:
        """Write a file in one of the ways that programs have."""
        path, draw = self.path / name, self.random
        pause = draw.choice((0.0, 0.05, 0.5, LONGEST_PAUSE))
        if not text:
            # A file that is merely empty deletes nothing.
            path.unlink(missing_ok=True)
            self._touched(name)
            return
        match draw.choice(("at once", "in place", "in place", "by name", "by link")):
            case "at once":
                pass
            case "in place":
                cut = draw.choice((0, draw.randrange(len(text) + 1), text.rfind(b"---\n", 0, -4) + 4))
                self._put(name, text[:cut])
                await asyncio.sleep(pause)
            case "by name":
                path.unlink(missing_ok=True)
                self._touched(name)
                await asyncio.sleep(pause)
            case "by link":
                await self._link(path, text, pause)
                return
        self._put(name, text)

    def _put(self, name: str, text: bytes) -> None:
        path = self.path / name
        if path.is_symlink() and not path.exists():
            path.unlink()
        path.write_bytes(text)
        self._touched(name)

    async def _link(self, path: Path, text: bytes, pause: float) -> None:
        """Make the file a link whose target appears late, as configuration that is mounted over a network."""
        self._targets += 1
        hidden = self.path / ".targets"
        hidden.mkdir(exist_ok=True)
        target = hidden / f"{self._targets}{path.suffix}"
        fresh = hidden / "link"
        fresh.symlink_to(target)
        fresh.replace(path)
        self._touched(path.name)
        await asyncio.sleep(self.random.choice((pause, LONGEST_DANGLING * self.random.random())))
        target.write_bytes(text)
        self._touched(path.name)

    def _touched(self, name: str) -> None:
        self.versions[name] = self.versions.get(name, 0) + 1
        self.written_at = self.loop.time()
        self._changed.set()
        if not self.deaf:
            self._seen.set()

    # ---- the source ------------------------------------------------------------------------------------------------

    def source(self, node_name: str, random: Random) -> FileSource:
        """Return the source of a process that starts."""
        del node_name, random
        return FileSource(self)

    async def next_look(self, settling: bool) -> None:
        """Wait as the source does: for a notification, or until it looks anyway. Looks that must find nothing are left out."""
        now = self.loop.time()
        if settling or now < self.written_at + LONGEST_SETTLE_SECONDS:
            try:
                async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                    await self._seen.wait()
            except TimeoutError:
                return
        else:
            await self._changed.wait()
            if self.deaf:
                await asyncio.sleep(LOOK_AGAIN_SECONDS * self.random.random())
        await asyncio.sleep(DEBOUNCE_MS / 1000)
        self._seen.clear()
        self._changed.clear()


class FileSource:
    """The manifests as one process follows them."""

    def __init__(self, files: SimulatedFiles) -> None:
        """Prepare to follow the files."""
        self._files = files
        self._source = ManifestSource(files.path, now=files.loop.time)

    @property
    def problems(self) -> Sequence[Any]:
        """Return the present problems."""
        return self._source.problems

    async def batches(self) -> AsyncIterator[Sequence[Event]]:
        """Yield events."""
        problems = self._source.problems
        while True:
            events = self._source.scan()
            if events or self._source.problems != problems:
                problems = self._source.problems
                yield events
            await self._files.next_look(self._source.settling)


def _identity(obj: AnyObject) -> Identity:
    return type(obj).__name__, obj.namespace, obj.name
