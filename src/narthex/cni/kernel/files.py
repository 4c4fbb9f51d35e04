"""Small files that are there whole or not at all, and locks. `posix` is the part of `os` that is in C: the other takes a
twentieth of a request to load, and `pathlib` longer than all of it.

A process can be killed at any instruction: files are made under another name and then renamed. They are not synced to
the disk: what a crash of the machine loses describes namespaces that it ends as well, and a file that comes back empty
is nobody's.
"""

from __future__ import annotations

import errno
import fcntl
import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_DIRECTORY_MODE, _FILE_MODE = 0o755, 0o600
_KIND, _DIRECTORY = 0o170000, 0o040000
_MOST = 1 << 20


def make_directory(path: str) -> None:
    """Make a directory and those above it. Raises OSError."""
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
    """Whether a directory can be seen there."""
    try:
        return posix.stat(path).st_mode & _KIND == _DIRECTORY
    except OSError:
        return False


def read(path: str) -> bytes | None:
    """What a file holds; None when it is not there. Raises OSError."""
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
    """Put a file into a directory, in the place of another of that name. Raises OSError.

    `unfinished` is its name until then, `.NAME` if none is given; nobody else may write by that name meanwhile.
    """
    unfinished = f"{directory}/{unfinished or '.' + name}"
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC | posix.O_NOFOLLOW
    try:
        descriptor = posix.open(unfinished, flags, _FILE_MODE)
    except FileNotFoundError:
        make_directory(directory)
        descriptor = posix.open(unfinished, flags, _FILE_MODE)
    try:
        posix.write(descriptor, data)
    finally:
        posix.close(descriptor)
    posix.rename(unfinished, f"{directory}/{name}")


def remove(path: str) -> bool:
    """Remove a file; whether it was there. Raises OSError."""
    try:
        posix.unlink(path)
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
        return [name for name in posix.listdir(directory) if name[0] != "."]
    except (FileNotFoundError, NotADirectoryError):
        return []


class Lock:
    """`with Lock(path):` waits for the lock of a file (flock), which ends with its holder. Raises OSError."""

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

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        posix.close(self._descriptor)
