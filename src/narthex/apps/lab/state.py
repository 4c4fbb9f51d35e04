"""A lab's directory below /run: what the lab process writes and everybody else reads.

    /run/narthex/lab/NAME/state.json             the whole state, replaced at once
                         /manifests/cluster.json  what the proxies read
                         /proxy.json              the proxies' configuration
                         /control.sock            requests to the lab process
                         /log/                    one file for each process
                         /input/                  manifests, when none were given

Whoever holds the lock on the directory owns the lab. The kernel lets the lock go with its last holder, so a lab
without one has crashed.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from narthex.host.processes import Process
from narthex.lab.topology import LabNode, check_name
from narthex.model.problem import Problem

LABS = Path("/run/narthex/lab")


class LabError(RuntimeError):
    """What a lab command cannot do; the message says what to do about it."""


class ProxyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy of one node."""

    node: str
    process: Process


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One pod."""

    namespace: str
    name: str
    node: str = ""
    """Empty while no node takes it."""
    network_namespace: str = ""
    addresses: tuple[str, ...] = ()
    ready: bool = False
    terminating: bool = False
    problem: str = ""


class FrontendRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One address that a Service answers on."""

    kind: str
    address: str
    port: int
    protocol: str
    port_name: str = ""


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One Service."""

    namespace: str
    name: str
    type: str
    frontends: tuple[FrontendRecord, ...] = ()
    endpoints: int = 0
    """How many are ready; one that has addresses of both families counts once."""
    pods: tuple[str, ...] = ()
    """Names of the pods behind it."""


class ScaleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One `lab scale` in force."""

    namespace: str
    name: str
    replicas: int


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """All about one lab."""

    name: str
    mode: str
    source: str
    """Directory of the user's manifests."""
    since: str
    controller: Process
    running: bool = False
    """False until everything is up for the first time."""
    nodes: tuple[LabNode, ...]
    outside: str
    """Network namespace of the client beyond the cluster."""
    proxies: tuple[ProxyRecord, ...] = ()
    pods: tuple[PodRecord, ...] = ()
    services: tuple[ServiceRecord, ...] = ()
    scales: tuple[ScaleRecord, ...] = ()
    problems: tuple[Problem, ...] = ()


class StateDirectory:
    """Paths, and atomic reading and writing."""

    def __init__(self, name: str) -> None:
        """Raises LabError for a name that no lab can have."""
        try:
            check_name(name)
        except ValueError as error:
            raise LabError(str(error)) from None
        self.name = name
        self.path = LABS / name
        self.manifests = self.path / "manifests"
        self.proxy_config = self.path / "proxy.json"
        self.control = self.path / "control.sock"
        self.logs = self.path / "log"
        self.input = self.path / "input"
        self._state = self.path / "state.json"

    def read(self) -> LabState | None:
        """The state as last written; None when there is none."""
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=LabState)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            raise LabError(f"{self.path} may not be read: run as root") from None

    def write(self, state: LabState) -> None:
        """Replace the state."""
        self._replace(self._state, msgspec.json.format(msgspec.json.encode(state)))

    def write_manifests(self, content: bytes) -> None:
        """Replace what the proxies read, all of it at one moment."""
        self._replace(self.manifests / "cluster.json", content)

    def _replace(self, path: Path, content: bytes) -> None:
        # Beside the watched directory and not in it, so that no reader meets a half-written file.
        draft = self.path / f".{path.name}"
        draft.write_bytes(content)
        draft.rename(path)

    def lock(self) -> int | None:
        """Own the lab: a file descriptor to keep open, None when somebody else owns it. Raises FileNotFoundError."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The directory may have been removed, even made anew, between opening and locking it.
            if not os.path.samestat(os.fstat(handle), self.path.stat()):
                raise FileNotFoundError(self.path)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        return handle


def existing() -> list[str]:
    """Names of all labs that have a directory."""
    return sorted(entry.name for entry in LABS.iterdir() if entry.is_dir()) if LABS.is_dir() else []
