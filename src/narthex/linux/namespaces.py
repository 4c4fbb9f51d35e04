"""Network namespaces, named as `ip netns` names them: a file in /run/netns.

Entering is a matter of one thread: `entered` moves the calling thread and brings it back. Sockets and child processes
made inside stay in the namespace for as long as they live.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narthex.linux.setns import NEW_NETWORK, EnteredNamespace, open_namespace

RUN_DIR = Path("/run/netns")

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SHARED = 0x100000
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def path_of(name: str) -> Path:
    """The file that holds a namespace. Raises ValueError for a name that could leave the directory."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a network namespace name: use letters, digits, '.', '_' and '-'")
    return RUN_DIR / name


def exists(name: str) -> bool:
    """Whether the namespace is there."""
    return path_of(name).exists()


def names() -> list[str]:
    """All named namespaces, sorted."""
    return sorted(entry.name for entry in RUN_DIR.iterdir()) if RUN_DIR.is_dir() else []


def create(name: str) -> None:
    """Make a namespace with loopback up. Raises FileExistsError when the name is taken, PermissionError without
    CAP_SYS_ADMIN."""
    path = path_of(name)
    _share_run_dir()
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o444))
    failure: list[BaseException] = []

    def make() -> None:
        # A thread of its own: unshare moves it for good, and it ends here.
        try:
            _check(_libc.unshare(NEW_NETWORK), "unshare")
            source = f"/proc/self/task/{threading.get_native_id()}/ns/net".encode()
            _check(_libc.mount(source, os.fsencode(path), None, _MS_BIND, None), f"mount {path}")
            _loopback_up()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=make, name=f"netns-{name}")
    thread.start()
    thread.join()
    if failure:
        _libc.umount2(os.fsencode(path), _MNT_DETACH)
        path.unlink(missing_ok=True)
        raise failure[0]


def delete(name: str) -> None:
    """Remove the name; the kernel frees the namespace with its last user. Nothing happens when it is not there."""
    path = path_of(name)
    if path.exists():
        _libc.umount2(os.fsencode(path), _MNT_DETACH)
        path.unlink(missing_ok=True)


@contextmanager
def entered(name: str | None) -> Iterator[None]:
    """Run the calling thread inside the namespace; None stays where it is. Raises FileNotFoundError."""
    if name is None:
        yield
        return
    descriptor = open_namespace(str(path_of(name)))
    try:
        with EnteredNamespace(descriptor):
            yield
    finally:
        os.close(descriptor)


def _share_run_dir() -> None:
    """Make /run/netns a shared mount of its own, as `ip netns add` does, so that other tools see the names."""
    RUN_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    run_dir = os.fsencode(RUN_DIR)
    if _libc.mount(b"", run_dir, b"none", _MS_SHARED | _MS_REC, None) != 0:
        _check(_libc.mount(run_dir, run_dir, b"none", _MS_BIND | _MS_REC, None), f"mount {RUN_DIR}")
        _check(_libc.mount(b"", run_dir, b"none", _MS_SHARED | _MS_REC, None), f"share {RUN_DIR}")


def _loopback_up() -> None:
    """Set `lo` up with SIOCSIFFLAGS; a whole netlink library is too heavy for one flag."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
