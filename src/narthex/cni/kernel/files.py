"""Small files with atomic writes, and locks.

Uses `posix`, the C part of `os`: importing `os` takes a twentieth of a request, `pathlib` more than all of it.

A process can be killed at any time, so files are written under a temporary name and renamed. They are not synced: what a
machine crash loses describes namespaces that are gone as well, and an empty file has no owner.
"""

from __future__ import annotations

import errno
import fcntl
import posix

from narthex.linux.failpoints import FILE_REMOVED, FILE_UNFINISHED, FILE_WRITTEN, failpoint

_DIRECTORY_MODE, _FILE_MODE = 0o755, 0o600
_KIND, _DIRECTORY = 0o170000, 0o040000
_MOST = 1 << 20


def make_directory(path: str) -> None:
    """Create a directory with its parents. Raises OSError."""
    try:
        posix.mkdir(path, _DIRECTORY_MODE)
    except FileExistsError:
        return
    except FileNotFoundError:
        above = path.rstrip("/").rpartition("/")[0]
        if not above:
            raise
        make_directory(above)
        make_directory(path)


def is_directory(path: str) -> bool:
    """Return True if the path is an accessible directory."""
    try:
        return posix.stat(path).st_mode & _KIND == _DIRECTORY
    except OSError:
        return False


def read(path: str) -> bytes | None:
    """Return the content of a file; None if it does not exist. Raises OSError."""
    try:
        descriptor = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
            return None
        raise
    try:
        return posix.read(descriptor, _MOST)
    except IsADirectoryError:
        return None
    finally:
        posix.close(descriptor)


def write(directory: str, name: str, data: bytes, unfinished: str = "") -> None:
    """Write a file atomically. Raises OSError.

    `unfinished` is its temporary name, by default `.NAME`; no other writer may use it at the same time.
    """
    unfinished = f"{directory}/{unfinished or '.' + name}"
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC | posix.O_NOFOLLOW
    try:
        descriptor = posix.open(unfinished, flags, _FILE_MODE)
    except FileNotFoundError:
        make_directory(directory)
        descriptor = posix.open(unfinished, flags, _FILE_MODE)
    try:
        # On a disk that is almost full, the kernel writes what fits first.
        while data:
            data = data[posix.write(descriptor, data) :]
    except OSError:
        posix.unlink(unfinished)
        raise
    finally:
        posix.close(descriptor)
    failpoint(FILE_UNFINISHED)
    posix.rename(unfinished, f"{directory}/{name}")
    failpoint(FILE_WRITTEN)


def remove(path: str) -> bool:
    """Remove a file; return True if it existed. Raises OSError."""
    try:
        posix.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
    failpoint(FILE_REMOVED)
    return True


def unfinished(directory: str) -> list[str]:
    """Return the names of files that are being written, or whose writer was killed. Raises OSError."""
    try:
        return [name[1:] for name in posix.listdir(directory) if name[0] == "."]
    except (FileNotFoundError, NotADirectoryError):
        return []


def names(directory: str) -> list[str]:
    """Return the file names of a directory, without temporary files; empty if it does not exist. Raises OSError."""
    try:
        return [name for name in posix.listdir(directory) if name[0] != "."]
    except (FileNotFoundError, NotADirectoryError):
        return []


class Lock:
    """Context manager that holds a file lock (flock), which ends with the process. Raises OSError."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = posix.open(self._path, posix.O_RDWR | posix.O_CREAT | posix.O_CLOEXEC, _FILE_MODE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            posix.close(self._descriptor)
            raise

    def __exit__(self, *_: object) -> None:
        posix.close(self._descriptor)
