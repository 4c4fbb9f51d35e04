"""Network namespaces of pods, by an open file: what a runtime hands over is a path, and the path may go away."""

from __future__ import annotations

import errno
import fcntl
import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from narthex.cni.plan import SysctlSetting

_CLONE_NEWNET = 0x40000000
_NS_GET_NSTYPE = 0xB703
_RTLD_NOW = 2
_OWN = "/proc/thread-self/ns/net"
_BOOT = "/proc/sys/kernel/random/boot_id"


def open_namespace(path: str) -> int:
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


class EnteredNamespace:
    """`with Inside(descriptor):` moves the calling thread into a namespace and brings it back. Raises OSError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._own = -1

    def __enter__(self) -> None:
        self._own = open_namespace(_OWN)
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


TYPE_CHECKING = False


def apply_settings(settings: Iterable[SysctlSetting]) -> None:
    """Write settings. One that is not required may be missing or refused: without IPv6 there is none to make.

    Raises OSError with the setting's path.
    """
    for setting in settings:
        path = f"/proc/sys/{setting.path}"
        try:
            descriptor = posix.open(path, posix.O_RDWR | posix.O_CLOEXEC)
            try:
                # What is so already may not be writable, and costs others of the namespace nothing.
                if posix.read(descriptor, 64).strip().decode() != setting.value:
                    posix.pwrite(descriptor, setting.value.encode(), 0)
            finally:
                posix.close(descriptor)
        except OSError as error:
            if setting.required:
                raise OSError(error.errno, f"cannot set {setting.path} to {setting.value}: {error.strerror}") from None
