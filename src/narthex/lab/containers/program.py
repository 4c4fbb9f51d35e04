"""What is to run in a container, as data that is sent from process to process."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class BindMount(msgspec.Struct, frozen=True):
    """A file or directory of the machine, shown to the container at a path."""

    source: str
    at: str
    read_only: bool = False


class ProgramSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A program, and what it sees of the machine: everything, but for what is named here."""

    argv: tuple[str, ...]
    executable: str
    """Absolute path."""
    environment: Mapping[str, str] = {}
    directory: str = "/"
    """Where it starts."""
    network_namespace: str
    """By name. The others (mounts, host name, processes, IPC) are made for it."""
    hostname: str = ""
    """Empty: the machine's, and its namespaces of host names and of IPC, as with `hostNetwork`."""
    shows: tuple[BindMount, ...] = ()
    """What it sees at other places than the machine does. Below /tmp, /run and /dev/shm, which are empty and its own, the
    places are made; elsewhere they must be there."""
    user: int | None = None
    """Number of the user; None: the machine's root."""
    group: int | None = None
    log: str = ""
    """The file for what it writes; empty: it was given files for that."""
    tty: bool = False
    """The files that it was given are a terminal, which is to be its own."""


class ExecSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A program that is to run beside another one, in the namespaces of that one."""

    beside: int
    """Process number of the other one."""
    argv: tuple[str, ...]
    environment: Mapping[str, str] = {}
    directory: str = "/"
    user: int | None = None
    group: int | None = None
    tty: bool = False
