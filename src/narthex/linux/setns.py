"""Entering namespaces by an open file. No other module calls setns(2).

It imports next to nothing, since the CNI plugins load it for each pod. `linux/namespaces.py` adds names, as `ip
netns` has them.
"""

from __future__ import annotations

import fcntl
import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""
_NS_GET_NSTYPE = 0xB703
_RTLD_NOW = 2
_OWN = "/proc/thread-self/ns/net"


def open_namespace(path: str) -> int:
    """Open a namespace without blocking on whatever else may be at the path. Raises OSError."""
    return posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK)


def is_network_namespace(descriptor: int) -> bool:
    """Return True if an open file is a network namespace."""
    try:
        return fcntl.ioctl(descriptor, _NS_GET_NSTYPE) == NEW_NETWORK
    except OSError:
        return False


def namespace_identity(descriptor: int) -> tuple[int, int]:
    """Return device and inode, which no other namespace has while this one lives."""
    found = posix.fstat(descriptor)
    return found.st_dev, found.st_ino


def own_namespace_identity() -> tuple[int, int]:
    """Return the identity of the calling thread's namespace."""
    found = posix.stat(_OWN)
    return found.st_dev, found.st_ino


def setns(descriptor: int, kind: int = NEW_NETWORK) -> None:
    """Move the calling thread into a namespace of this kind (CLONE_NEW*), for good. Raises OSError."""
    call = getattr(posix, "setns", None)
    if call is not None:
        # Since Python 3.12.
        call(descriptor, kind)
        return
    # The C part of ctypes suffices: all of ctypes takes as long to load as half of the CNI plugin's modules.
    import _ctypes

    library = _ctypes.dlopen(None, _RTLD_NOW)  # type: ignore[arg-type]
    if _ctypes.call_function(_ctypes.dlsym(library, "setns"), (descriptor, kind)) != 0:
        import ctypes

        # Only this call reports the reason.
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, kind) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the namespace: {posix.strerror(number)}")


class EnteredNamespace:
    """Context manager that moves the calling thread into a network namespace and back. Raises OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._own = -1

    def __enter__(self) -> None:
        self._own = open_namespace(_OWN)
        try:
            setns(self._descriptor)
        except BaseException:
            posix.close(self._own)
            raise

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            setns(self._own)
        finally:
            posix.close(self._own)
