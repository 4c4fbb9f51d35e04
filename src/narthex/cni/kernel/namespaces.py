"""Network namespaces of pods, by an open file: what a runtime hands over is a path, and the path may go away."""

from __future__ import annotations

import errno
import fcntl
import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_CLONE_NEWNET = 0x40000000
_NS_GET_NSTYPE = 0xB703
_RTLD_NOW = 2
_OWN = "/proc/thread-self/ns/net"
_BOOT = "/proc/sys/kernel/random/boot_id"


def opened(path: str) -> int:
    """Open a namespace. What else is at the path does not keep us waiting. Raises OSError."""
    return posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK)


def is_network(descriptor: int) -> bool:
    """Whether an open file is a network namespace."""
    try:
        return fcntl.ioctl(descriptor, _NS_GET_NSTYPE) == _CLONE_NEWNET
    except OSError:
        return False


def identity(descriptor: int) -> tuple[int, int]:
    """What tells a namespace from every other, as long as it lives."""
    found = posix.fstat(descriptor)
    return found.st_dev, found.st_ino


def own_identity() -> tuple[int, int]:
    """The identity of the calling thread's namespace."""
    found = posix.stat(_OWN)
    return found.st_dev, found.st_ino


def boot() -> str:
    """The name of this run of the kernel: no namespace outlives it."""
    with open(_BOOT) as file:  # noqa: PTH123
        return file.read().strip()


class Inside:
    """`with Inside(descriptor):` moves the calling thread into a namespace and brings it back. Raises OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._own = -1

    def __enter__(self) -> None:
        self._own = opened(_OWN)
        try:
            _enter(self._descriptor)
        except BaseException:
            posix.close(self._own)
            raise

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            _enter(self._own)
        finally:
            posix.close(self._own)


def _enter(descriptor: int) -> None:
    setns = getattr(posix, "setns", None)
    if setns is not None:
        # Since Python 3.12.
        setns(descriptor, _CLONE_NEWNET)
        return
    # The part of ctypes that is in C does it: all of ctypes takes as long to load as half of our modules.
    import _ctypes

    library = _ctypes.dlopen(None, _RTLD_NOW)  # type: ignore[arg-type]
    if _ctypes.call_function(_ctypes.dlsym(library, "setns"), (descriptor, _CLONE_NEWNET)) != 0:
        raise OSError(errno.EPERM, "cannot enter the network namespace: it takes CAP_SYS_ADMIN")
