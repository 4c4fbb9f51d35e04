"""Files that programs watch and replace: what shows that one has changed, and atomic replacement.

Unlike inotify a stamp also notices a file behind symbolic links that are exchanged, as the kubelet does with a ConfigMap. What
a program does with a changed or broken file is its own concern.
"""

from __future__ import annotations

import os
from pathlib import Path

FileStamp = tuple[int, int, int]
"""Inode, time of the last modification in nanoseconds, size in bytes."""


def file_stamp(path: str | Path) -> FileStamp | None:
    """Return what differs once the file at `path` has changed, or None if there is no such file."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def replace_file(path: Path, data: bytes, mode: int | None = None, *, durable: bool = False) -> None:
    """Replace a file in one step. Raises OSError.

    `mode` None leaves the permissions to the umask; `durable` waits until the disk has the content.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
