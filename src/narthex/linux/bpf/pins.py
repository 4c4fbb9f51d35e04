"""BPF file systems, in which objects are pinned: they then live without a process."""

from __future__ import annotations

import ctypes
import fcntl
import os
from pathlib import Path

DEFAULT_MOUNT = Path("/sys/fs/bpf")
"""Where systemd and other programs mount it."""
_BPF_FS_MAGIC = 0xCAFE4A11

_libc = ctypes.CDLL(None, use_errno=True)


def is_bpf_file_system(path: Path) -> bool:
    """Return True if a directory is inside a BPF file system."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    # f_type is the first field, a long.
    return int(ctypes.c_long.from_buffer(buffer).value) & 0xFFFFFFFF == _BPF_FS_MAGIC


def mount_bpf_file_system(path: Path) -> None:
    """Create a directory inside a BPF file system, and mount one if there is none. Raises OSError.

    Where a file system is mounted above the directory already, it is used: a container sees the pins of the machine there,
    and they outlive it.
    """
    there = next(each for each in (path, *path.parents) if each.exists())
    if not is_bpf_file_system(there):
        # No directory can be created in sysfs, which has the usual one.
        place = DEFAULT_MOUNT if path.is_relative_to(DEFAULT_MOUNT) else path
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _mount(place)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _mount(place: Path) -> None:
    """Mount a BPF file system, unless another process does at the same time: its pins would be hidden. Raises OSError."""
    directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if is_bpf_file_system(place):
            return
        if _libc.mount(b"bpf", os.fsencode(place), b"bpf", None, b"mode=0700") != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot mount a BPF file system at {place}: {os.strerror(number)}")
    finally:
        os.close(directory)


def unmount(path: Path) -> None:
    """Unmount a BPF file system; what was pinned only there ends."""
    _libc.umount2(os.fsencode(path), 2)


def file_system_problem(path: Path) -> str:
    """Mount a BPF file system if necessary. Return why objects cannot be pinned below a path; empty if they can."""
    try:
        mount_bpf_file_system(path)
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def pinned_names(directory: Path) -> frozenset[str]:
    """Return the names of the objects that are pinned in a directory; none if it does not exist."""
    try:
        return frozenset(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        return frozenset()
