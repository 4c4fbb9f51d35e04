"""Processes by number and start time, since the number alone may be reused."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from narthex.linux.namespaces import namespace_path
from narthex.linux.setns import namespace_identity, open_namespace

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process since the boot of this machine."""

    pid: int
    started: int
    """Clock ticks from boot to its start."""


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the process with this number; None if there is none or it is a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything, parentheses too.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else ProcessIdentity(pid, int(fields[19]))


def is_alive(process: ProcessIdentity) -> bool:
    """Return True if this process still runs."""
    return identify_process(process.pid) == process


def kill_processes(processes: Collection[ProcessIdentity], patience: float = 5.0) -> None:
    """Kill these processes and wait for their end. Raises TimeoutError if one stays."""
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            # The handle is bound to the process that had the ID when it was opened, so compare afterwards.
            if is_alive(process):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)
    deadline = time.monotonic() + patience
    while left := [process.pid for process in processes if is_alive(process)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} do not end")
        time.sleep(0.002)


def processes_inside(namespaces: Collection[str]) -> list[ProcessIdentity]:
    """Return all processes, except the calling one, in one of these named network namespaces."""
    identities = {_identity(namespace_path(name)) for name in namespaces} - {None}
    found = []
    for entry in _PROC.iterdir() if identities else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            process = identify_process(int(entry.name)) if _identity(entry / "ns/net") in identities else None
            if process:
                found.append(process)
    return found


def processes_in_cgroup(cgroup: Path) -> list[int]:
    """Return the numbers of all processes in a cgroup (version 2) and below; 0 for one that this PID namespace hides."""
    found: list[int] = []
    for folder, _, _ in os.walk(cgroup):
        try:
            found += map(int, Path(folder, "cgroup.procs").read_bytes().split())
        except OSError:
            # The cgroup is gone, or holds single threads, whose process is listed above it.
            continue
    return found


def network_namespaces(processes: Iterable[int]) -> Iterator[int]:
    """Yield an open file for each network namespace of these processes, once each; it closes with the next one.

    Processes that have ended are left out.
    """
    seen = set()
    for process in processes:
        path = _PROC / str(process) / "ns/net"
        # Most processes share a namespace with another one, so that nothing has to be opened.
        if _identity(path) in seen:
            continue
        try:
            descriptor = open_namespace(str(path))
        except OSError:
            continue
        try:
            identity = namespace_identity(descriptor)
            if identity not in seen:
                seen.add(identity)
                yield descriptor
        finally:
            os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def die_with_parent(lives: Callable[[], bool]) -> None:
    """Let the kernel kill this process when the thread that forked it ends. Raises OSError.

    `lives` returns False if that has happened already; in a PID namespace of its own, a process cannot see its parent.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl PDEATHSIG")
    if not lives():
        os._exit(1)
