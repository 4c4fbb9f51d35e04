"""Small files that are there whole or not at all, and locks. `os` alone: `pathlib` takes longer than a request.

A process can be killed at any instruction: files are made under another name and then renamed. They are not synced to
the disk: what a crash of the machine loses describes namespaces that it ends as well, and a file that comes back empty
is nobody's.
"""

from __future__ import annotations

import errno
import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_DIRECTORY_MODE, _FILE_MODE = 0o755, 0o600
_MOST = 1 << 20


def make_directory(path: str) -> None:
    """Make a directory and those above it. Raises OSError."""
    os.makedirs(path, _DIRECTORY_MODE, exist_ok=True)  # noqa: PTH103


def read(path: str) -> bytes | None:
    """What a file holds; None when it is not there. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
            return None
        raise
    try:
        return os.read(descriptor, _MOST)
    except IsADirectoryError:
        return None
    finally:
        os.close(descriptor)


def write(directory: str, name: str, data: bytes, unfinished: str = "") -> None:
    """Put a file into a directory, in the place of another of that name. Raises OSError.

    `unfinished` is its name until then, `.NAME` if none is given; nobody else may write by that name meanwhile.
    """
    unfinished = f"{directory}/{unfinished or '.' + name}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(unfinished, flags, _FILE_MODE)
    except FileNotFoundError:
        make_directory(directory)
        descriptor = os.open(unfinished, flags, _FILE_MODE)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
    os.rename(unfinished, f"{directory}/{name}")  # noqa: PTH104


def remove(path: str) -> bool:
    """Remove a file; whether it was there. Raises OSError."""
    try:
        os.unlink(path)  # noqa: PTH108
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
    return True


def names(directory: str) -> list[str]:
    """What is in a directory, without what was never finished; nothing when it is not there. Raises OSError."""
    try:
        return [name for name in os.listdir(directory) if name[0] != "."]  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return []


class Lock:
    """`with Lock(path):` waits for the lock of a file (flock), which ends with its holder. Raises OSError."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)
