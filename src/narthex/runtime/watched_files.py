"""How programs notice that a file has changed: they compare its stamp now and then.

Unlike inotify this also notices a file behind symbolic links that are exchanged, as the kubelet does with a ConfigMap. What a
program does with a changed or broken file is its own concern.
"""

from __future__ import annotations

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
