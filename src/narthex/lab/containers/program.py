"""The program of a container: what to run, and the last steps of the process that becomes it.

The functions are for processes with one thread, after a fork: namespaces, mounts, exec. They raise OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from narthex.lab.containers.cgroups import join_cgroup_of
from narthex.lab.containers.root import BindMount, change_root
from narthex.linux.capabilities import NUMBERS, bounding_set, limit_capabilities
from narthex.linux.namespaces import namespace_path
from narthex.linux.setns import NEW_NETWORK, open_namespace, setns

_NEW_MOUNTS, NEW_HOSTNAME, NEW_IPC, NEW_PROCESSES = 0x00020000, 0x04000000, 0x08000000, 0x20000000

DEFAULT_CAPABILITIES = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)
"""What a container has in Kubernetes without `securityContext` (containerd's `defaultUnixCaps`)."""

_libc = ctypes.CDLL(None, use_errno=True)


class ProgramSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A program and its environment. It sees the machine's files (`root.py`), except for what is named here."""

    argv: tuple[str, ...]
    executable: str = ""
    """Absolute path. Empty: `argv` names it in the container's root."""
    environment: Mapping[str, str] = {}
    directory: str = "/"
    """Working directory."""
    network_namespace: str
    """Name of its network namespace. Its mount, UTS, PID, and IPC namespaces are created for it."""
    process_namespace: int = 0
    """ID of a process whose PID namespace it shares, see `keep_pause`. 0: its own."""
    cgroup: str = ""
    """Directory of its control group. Empty: that of its keeper."""
    hostname: str = ""
    """Empty: the machine's host name."""
    layer: str = ""
    """Directory whose files lie over the machine's."""
    shows: tuple[BindMount, ...] = ()
    capabilities: tuple[str, ...] = DEFAULT_CAPABILITIES
    """Names of the only capabilities that it can have."""
    user: int | None = None
    """User ID. None: root."""
    group: int | None = None
    log: str = ""
    """Log file. Empty: the program gets three standard files instead."""
    tty: bool = False
    """True if the standard files are a terminal, which becomes its controlling terminal."""


class ExecSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A program to run in the namespaces of another one."""

    target_pid: int
    argv: tuple[str, ...]
    environment: Mapping[str, str] = {}
    directory: str = "/"
    user: int | None = None
    group: int | None = None
    tty: bool = False


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(what: int) -> None:
    """Move to new namespaces. A new PID namespace applies to later forks."""
    _check(_libc.unshare(what), "unshare")


def join_network(name: str) -> None:
    """Move to a named network namespace."""
    handle = open_namespace(str(namespace_path(name)))
    try:
        setns(handle)
    finally:
        os.close(handle)


def join_processes(process: int) -> None:
    """Let later forks be in the PID namespace of another process."""
    handle = os.open(f"/proc/{process}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    setns(handle, NEW_PROCESSES)
    os.close(handle)


def join_process(process: int) -> None:
    """Move to all namespaces of another process and to its control group in a lab, with its capabilities. Its PID namespace applies to the next fork."""
    capabilities = bounding_set(process)
    join_cgroup_of(process)
    kinds = (
        ("ipc", NEW_IPC),
        ("uts", NEW_HOSTNAME),
        ("net", NEW_NETWORK),
        ("pid", NEW_PROCESSES),
        ("mnt", _NEW_MOUNTS),
    )
    handles = [(os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC), kind) for name, kind in kinds]
    for handle, kind in handles:
        setns(handle, kind)
        os.close(handle)
    limit_capabilities(capabilities)


def become(program: ProgramSpec, files: Sequence[int]) -> NoReturn:
    """Become the program, with these three standard files.

    The process is in its network and PID namespaces already. Raises OSError that names the failed step.
    """
    enter_namespaces(program)
    executable = program.executable or find_program(program.argv[0], program.environment, program.directory)
    become_exec(program, executable, files)


def enter_namespaces(program: ProgramSpec) -> None:
    """Set the host name, mounts, and capabilities of a program. Raises OSError that names the failed step."""
    unshare(_NEW_MOUNTS | NEW_HOSTNAME | NEW_IPC)
    if program.hostname:
        socket.sethostname(program.hostname)
    change_root(program.shows, program.executable, program.layer)
    limit_capabilities(NUMBERS[name] for name in program.capabilities)


def become_exec(spec: ProgramSpec | ExecSpec, executable: str, files: Sequence[int] = ()) -> NoReturn:
    """Become a program in the namespaces of this process. Without `files`, keep files and session."""
    # The copies have numbers that do not collide with those that the files are to get.
    copies = [fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 3) for handle in files]
    for number, handle in enumerate(copies):
        os.dup2(handle, number)
    if files:
        os.setsid()
    if spec.tty:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(spec.directory)
    if spec.user is not None or spec.group is not None:
        os.setgroups([])
        os.setgid(spec.group or 0)
        os.setuid(spec.user or 0)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execve(executable, list(spec.argv), dict(spec.environment))


def find_program(command: str, environment: Mapping[str, str], directory: str = "/") -> str:
    """Return the absolute path of a program as a shell finds it by PATH. Raises FileNotFoundError, PermissionError."""
    if "/" in command:
        candidates = [Path(directory, command)]
    else:
        path = environment.get("PATH") or os.defpath
        candidates = [Path(folder, command) for folder in path.split(os.pathsep) if folder]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    if any(candidate.exists() for candidate in candidates):
        raise PermissionError(errno.EACCES, f"{command}: cannot be executed")
    raise FileNotFoundError(errno.ENOENT, f"{command}: no such program")
