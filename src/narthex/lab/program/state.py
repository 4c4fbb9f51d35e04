"""A lab's directory below /run: what the lab process writes and everybody else reads.

    /run/narthex/lab/NAME/state.json             the whole state, replaced at once
                         /kubeconfig              of its API, for people: by loopback
                         /nodes.kubeconfig        the same, for the nodes: by the network between them
                         /api/                    the API server's certificate and key, the token
                         /pods/UID/               files and logs of a pod (`pod_files.py`)
                         /account/NAMESPACE/      what pods need to call the API
                         /net-conf.json           the overlay's configuration, where there is one
                         /Corefile                what the nodes' DNS answers
                         /announcer.key           the key of the nodes' announcers, where there is a pool
                         /control.sock            requests to the lab process
                         /log/                    one file for each process
                         /input/                  manifests, when none were given
                         /NODE/                   what a node has of its own: see NodePlaces
    /var/lib/narthex/lab/NAME/NODE/               the node's CNI plugins: programs do not run from /run everywhere
    /var/lib/narthex/lab/NAME/kept/objects.db     what the API held, of a lab that is kept; `lab down` leaves it
                             /kept/applied.json   which manifests had been applied
                             /kept/input/         manifests, when none were given

Whoever holds the lock on the directory owns the lab. The kernel lets the lock go with its last holder, so a lab
without one has crashed.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from narthex.lab.faults import InjectedFault
from narthex.lab.pod_network import NETWORK, NONE
from narthex.lab.topology import LabNode, check_name
from narthex.linux.processes import ProcessIdentity
from narthex.model.problem import Problem

LABS = Path("/run/narthex/lab")
PROGRAMS = Path("/var/lib/narthex/lab")
KEPT = "kept"


class LabError(RuntimeError):
    """What a lab command cannot do; the message says what to do about it."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The process of one node: `narthex node`."""

    node: str
    process: ProcessIdentity


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
    uid: str = ""
    """Of the Pod; its files are in a directory of this name."""
    hostname: str = ""
    """Empty: it has its node's."""
    containers: dict[str, int] = {}
    """Those that run, by name: the process number of the container's program, 0 for the echo server."""
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
    overlay: str = NONE
    """How pods of other nodes are reached: one of OVERLAYS."""
    source: str
    """Directory of the user's manifests."""
    since: str
    controller: ProcessIdentity
    forks: ProcessIdentity | None = None
    """The process that forks the nodes' and the containers'."""
    server: str = ""
    """URL of the API, on this machine's loopback."""
    running: bool = False
    """False until everything is up for the first time."""
    nodes: tuple[LabNode, ...]
    outside: str
    """Network namespace of the client beyond the cluster."""
    processes: tuple[NodeRecord, ...] = ()
    balancing: bool = False
    """Nodes answer for load balancers' addresses: there was a pool when the lab came up."""
    kept: bool = False
    """What its API holds outlives it."""
    killed: tuple[str, ...] = ()
    """Nodes that `lab kill` has ended."""
    pods: tuple[PodRecord, ...] = ()
    services: tuple[ServiceRecord, ...] = ()
    scales: tuple[ScaleRecord, ...] = ()
    problems: tuple[Problem, ...] = ()
    faults: tuple[InjectedFault, ...] = ()
    """What goes wrong on request."""


class NodePaths:
    """Paths of what a node has of its own, since the nodes of a lab share a file system."""

    def __init__(self, path: Path, programs: Path) -> None:
        self.path = path
        self.programs = programs
        """The CNI plugins."""
        self.configuration = path / "config.json"
        """Of `narthex node`."""
        self.network = path / "net.d" / f"10-{NETWORK}.conflist"
        """The CNI configuration."""
        self.attached = path / "attached"
        """What the runtime has written down of each pod."""
        self.records = path / "cni"
        """What the plugins have."""
        self.reservations = path / "networks"
        self.delegated = path / "flannel"
        self.socket = path / "cni.sock"
        self.subnet_file = path / "subnet.env"


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
        self.kubeconfig = self.path / "kubeconfig"
        """Of the lab's API, for people and their programs."""
        self.node_kubeconfig = self.path / "nodes.kubeconfig"
        self.certificate = self.path / "api" / "ca.crt"
        self.key = self.path / "api" / "tls.key"
        self.token = self.path / "api" / "token"
        self.pods = self.path / "pods"
        self.control = self.path / "control.sock"
        self.net_conf = self.path / "net-conf.json"
        """Of the nodes' overlay."""
        self.corefile = self.path / "Corefile"
        """Of the nodes' DNS."""
        self.announcer_key = self.path / "announcer.key"
        """What the nodes' announcers sign with."""
        self.logs = self.path / "log"
        self.input = self.path / "input"
        self.programs = PROGRAMS / name
        self.kept = self.programs / KEPT
        """Of a lab that is kept; else it is not there."""
        self.objects = self.kept / "objects.db"
        self.applied = self.kept / "applied.json"
        self._state = self.path / "state.json"

    def node(self, name: str) -> NodePaths:
        """What one node has of its own."""
        return NodePaths(self.path / name, self.programs / name)

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

    def _replace(self, path: Path, content: bytes) -> None:
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
    return _folders(LABS)


def remaining() -> list[str]:
    """Names of all labs that have files. What is below /run goes when the machine is started anew, programs do not."""
    programs = (name for name in _folders(PROGRAMS) if any(each.name != KEPT for each in (PROGRAMS / name).iterdir()))
    return sorted({*_folders(LABS), *programs})


def kept() -> list[str]:
    """Names of all labs of which something is kept."""
    return [name for name in _folders(PROGRAMS) if (PROGRAMS / name / KEPT).is_dir()]


def _folders(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir() if entry.is_dir()) if place.is_dir() else []
