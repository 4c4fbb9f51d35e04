"""Network namespaces by name, as `ip netns` has them: a file in /run/netns.

`in_namespace` moves only the calling thread. Sockets and child processes created inside stay in the namespace.
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


def namespace_path(name: str) -> Path:
    """Return the file of a namespace. Raises ValueError for a name that could leave the directory."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a network namespace name: use letters, digits, '.', '_' and '-'")
    return RUN_DIR / name


def namespace_exists(name: str) -> bool:
    """Return True if the namespace exists."""
    return namespace_path(name).exists()


def namespace_names() -> list[str]:
    """Return the names of all namespaces, sorted."""
    return sorted(entry.name for entry in RUN_DIR.iterdir()) if RUN_DIR.is_dir() else []


def create_namespace(name: str) -> None:
    """Create a namespace with loopback up.

    Raises FileExistsError if the name is taken, and PermissionError without CAP_SYS_ADMIN.
    """
    path = namespace_path(name)
    _share_run_dir()
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o444))
    failure: list[BaseException] = []

    def make() -> None:
        """Create the namespace in this thread, bind it to `path`, and set its loopback interface up."""
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


def delete_namespace(name: str) -> None:
    """Remove a name if it exists; the kernel frees the namespace with its last user."""
    path = namespace_path(name)
    if path.exists():
        _libc.umount2(os.fsencode(path), _MNT_DETACH)
        path.unlink(missing_ok=True)


@contextmanager
def in_namespace(name: str | None) -> Iterator[None]:
    """Run the block inside the namespace; None changes nothing. Raises FileNotFoundError."""
    if name is None:
        yield
        return
    descriptor = open_namespace(str(namespace_path(name)))
    try:
        with EnteredNamespace(descriptor):
            yield
    finally:
        os.close(descriptor)


def _share_run_dir() -> None:
    """Make /run/netns a shared mount, as `ip netns add` does, so that other tools see the names."""
    RUN_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    run_dir = os.fsencode(RUN_DIR)
    if _libc.mount(b"", run_dir, b"none", _MS_SHARED | _MS_REC, None) != 0:
        _check(_libc.mount(run_dir, run_dir, b"none", _MS_BIND | _MS_REC, None), f"mount {RUN_DIR}")
        _check(_libc.mount(b"", run_dir, b"none", _MS_SHARED | _MS_REC, None), f"share {RUN_DIR}")


def _loopback_up() -> None:
    """Set `lo` up with SIOCSIFFLAGS."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
