"""The relay's table as a file, for those who look at a node from another process, as `narthex trace --lab` does.

/run/narthex/relay/NAMESPACE-FAMILY.json     which process serves what; true only while that process lives
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from immutables import Map

from narthex.backends.userspace_rules import Listener, Listeners
from narthex.host import netns
from narthex.host.processes import Process, alive, identify
from narthex.model.net import IPFamily

DIRECTORY = Path("/run/narthex/relay")


class Shown(msgspec.Struct, frozen=True):
    """One relay and its table."""

    process: Process
    listeners: tuple[Listener, ...]


def show(family: IPFamily, namespace: str | None, pid: int, listeners: Iterable[Listener]) -> None:
    """Write the table down, replacing what was there. Raises OSError."""
    process = identify(pid)
    if process is None:
        return
    path = _path(family, namespace)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(Shown(process, tuple(listeners))))
    fresh.replace(path)


def shown(family: IPFamily, namespace: str | None) -> Listeners:
    """What the relay there serves; nothing when there is none."""
    try:
        found = msgspec.json.decode(_path(family, namespace).read_bytes(), type=Shown)
    except (FileNotFoundError, msgspec.DecodeError):
        return Map()
    return Map({one.key: one for one in found.listeners}) if alive(found.process) else Map()


def hide(family: IPFamily, namespace: str | None) -> None:
    """The relay there has gone. Nothing happens when there was none."""
    _path(family, namespace).unlink(missing_ok=True)


def _path(family: IPFamily, namespace: str | None) -> Path:
    """Names of namespaces may be given away again, their inodes while they are there are not."""
    with netns.entered(namespace):
        inode = Path("/proc/thread-self/ns/net").stat().st_ino
    return DIRECTORY / f"{inode}-{family.value}.json"
