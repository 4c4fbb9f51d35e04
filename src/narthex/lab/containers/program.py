"""Descriptions of programs to run in containers, which processes send to each other."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class BindMount(msgspec.Struct, frozen=True):
    """A file or directory of the machine that a container sees at a path."""

    source: str
    at: str
    read_only: bool = False


class ProgramSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A program and its environment. It sees the machine's files, except for what is named here."""

    argv: tuple[str, ...]
    executable: str
    """Absolute path."""
    environment: Mapping[str, str] = {}
    directory: str = "/"
    """Working directory."""
    network_namespace: str
    """Name of its network namespace. Its mount, UTS, PID, and IPC namespaces are created for it."""
    hostname: str = ""
    """Empty: the machine's host name, and its UTS and IPC namespaces, as with `hostNetwork`."""
    shows: tuple[BindMount, ...] = ()
    """Bind mounts. Below /tmp, /run, and /dev/shm, which are empty and private, mount points are created; elsewhere they must exist.
    """
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
    """Process ID of the other program."""
    argv: tuple[str, ...]
    environment: Mapping[str, str] = {}
    directory: str = "/"
    user: int | None = None
    group: int | None = None
    tty: bool = False
