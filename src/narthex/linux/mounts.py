"""Files that only one process sees: a mount namespace of its own, with another file in place of one."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000

_libc = ctypes.CDLL(None, use_errno=True)


def show(source: Path, at: Path) -> None:
    """From now on this process, and those it starts, see `source` at `at`, which must be a file; nobody else does. For
    programs of one thread, just before they become another. Raises OSError."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare mounts")
    # What is mounted here stays here; what others mount still comes.
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "keep mounts apart")
    _check(_libc.mount(os.fsencode(source), os.fsencode(at), None, _MS_BIND, None), f"mount {source} at {at}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
