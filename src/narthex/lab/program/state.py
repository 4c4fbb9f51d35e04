"""A lab's files, written by its process and read by all commands.

    /run/narthex/lab/NAME/state.json             the state, replaced atomically
                         /kubeconfig              for the API on loopback
                         /nodes.kubeconfig        for the API on the lab's network
                         /api/                    the API server's certificate, key, and token
                         /api/plane/              files of an external control plane: see ControlPlanePaths
                         /pods/UID/               files and logs of a pod (`volumes.py`)
                         /images/NAME/            files of images that are made of the machine's programs
                         /account/NAMESPACE/      service account files of pods
                         /net-conf.json           configuration of the overlay, if there is one
                         /Corefile                configuration of the nodes' DNS
                         /announcer.key           key of the nodes' announcers, if there is a pool
                         /control.sock            commands to the lab's process
                         /log/                    one file for each process
                         /input/                  the default directory for manifests
                         /NODE/                   a node's own files: see NodePaths
    /var/lib/narthex/lab/NAME/NODE/               the node's CNI plugins: /run may be mounted noexec
    /var/lib/narthex/lab/NAME/kept/objects.db     the API's objects of a lab with --keep; `lab down` leaves it
                             /kept/applied.json   applied manifests
                             /kept/input/         the default directory for manifests

The holder of the lock on the directory owns the lab. The kernel releases the lock with its last holder, so a lab without
a lock has crashed.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from narthex.lab.faults import InjectedFault
from narthex.lab.topology import NETWORK, NONE, LabNode, check_name
from narthex.linux.processes import ProcessIdentity
from narthex.model import Problem
from narthex.runtime.files import replace_file

LABS = Path("/run/narthex/lab")
PROGRAMS = Path("/var/lib/narthex/lab")
KEPT = "kept"


class LabError(RuntimeError):
    """An operation on a lab that fails; the message says what to do."""


class ObjectGone(LabError):
    """A write to an object that does not exist, or no longer."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node's process, `narthex node`."""

    node: str
    process: ProcessIdentity


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pod."""

    namespace: str
    name: str
    node: str = ""
    """Empty if the pod is not scheduled."""
    network_namespace: str = ""
    addresses: tuple[str, ...] = ()
    ready: bool = False
    completed: bool = False
    """All its containers have succeeded and are not restarted."""
    terminating: bool = False
    uid: str = ""
    """Also the name of the directory with its files."""
    hostname: str = ""
    """Empty if it shares the node's."""
    containers: dict[str, int] = {}
    """Names and PIDs of running containers; 0 for the echo server."""
    problem: str = ""


class ServiceAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address on which a Service is reachable."""

    kind: str
    address: str
    port: int
    protocol: str
    port_name: str = ""


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A Service."""

    namespace: str
    name: str
    type: str
    frontends: tuple[ServiceAddress, ...] = ()
    endpoints: int = 0
    """Number of ready endpoints; dual-stack endpoints count once."""
    pods: tuple[str, ...] = ()
    """Names of the pods of ready endpoints."""


class ScaleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment whose replicas differ from its manifest."""

    namespace: str
    name: str
    replicas: int


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a lab, as in its state file."""

    name: str
    mode: str
    overlay: str = NONE
    """How pods of other nodes are reached: one of OVERLAYS."""
    socket_load_balancing: bool = False
    """Nodes send sockets to endpoints when they connect."""
    control_plane: str = ""
    """Directory of the programs of an external control plane; empty: the lab's own."""
    kube_proxy: str = ""
    """The kube-proxy that nodes run instead of their own proxy; empty: their own."""
    source: str
    """Directory of the user's manifests."""
    since: str
    controller: ProcessIdentity
    forks: ProcessIdentity | None = None
    """The fork server of nodes and containers."""
    server: str = ""
    """URL of the API on loopback."""
    running: bool = False
    """False during the start."""
    nodes: tuple[LabNode, ...]
    outside: str
    """Network namespace of the client outside the cluster."""
    processes: tuple[NodeRecord, ...] = ()
    balancing: bool = False
    """Nodes answer for load balancer addresses: a pool existed at the start."""
    kept: bool = False
    """The API's objects outlive the lab."""
    killed: tuple[str, ...] = ()
    """Nodes ended by `lab kill`."""
    not_ready: tuple[str, ...] = ()
    """Nodes whose condition Ready is not True."""
    pods: tuple[PodRecord, ...] = ()
    services: tuple[ServiceRecord, ...] = ()
    scales: tuple[ScaleRecord, ...] = ()
    problems: tuple[Problem, ...] = ()
    faults: tuple[InjectedFault, ...] = ()
    """Active injected faults."""

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig for the API on loopback."""
        return StateDirectory(self.name).kubeconfig


_STATES = msgspec.json.Decoder(LabState)


class NodePaths:
    """Paths of a node's own files, since the nodes of a lab share the machine's file system."""

    def __init__(self, path: Path, programs: Path) -> None:
        self.path = path
        self.programs = programs
        """The CNI plugins."""
        self.configuration = path / "config.json"
        """Configuration of `narthex node`."""
        self.kube_proxy = path / "kube-proxy.json"
        """Configuration of the kube-proxy of `lab up --kube-proxy`."""
        self.network = path / "net.d" / f"10-{NETWORK}.conflist"
        """The CNI configuration."""
        self.attached = path / "attached"
        """Attachments recorded by the runtime."""
        self.records = path / "cni"
        """State of the plugins."""
        self.reservations = path / "networks"
        self.delegated = path / "flannel"
        self.socket = path / "cni.sock"
        self.subnet_file = path / "subnet.env"

    def write_configuration(self, data: bytes) -> None:
        """Replace the configuration of `narthex node` atomically."""
        replace_file(self.configuration, data)


class ControlPlanePaths:
    """Paths of the files that only an external control plane needs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.etcd = path / "etcd"
        """Data of etcd."""
        self.generated = path / "generated"
        """What the API server generates."""
        self.tokens = path / "tokens.csv"
        self.accounts_key = path / "accounts.key"
        """Signs the tokens of service accounts."""
        self.kubelet_client = path / "kubelet-client.crt"
        """The certificate by which kubelets know the API server."""
        self.kubelet_client_key = path / "kubelet-client.key"


class StateDirectory:
    """Paths of a lab's files, and atomic access to its state."""

    def __init__(self, name: str) -> None:
        """Raise LabError if `name` is not a valid name."""
        try:
            check_name(name)
        except ValueError as error:
            raise LabError(str(error)) from None
        self.name = name
        self.path = LABS / name
        self.kubeconfig = self.path / "kubeconfig"
        """For the lab's API on loopback."""
        self.node_kubeconfig = self.path / "nodes.kubeconfig"
        self.certificate = self.path / "api" / "ca.crt"
        self.key = self.path / "api" / "tls.key"
        self.token = self.path / "api" / "token"
        self.control_plane = ControlPlanePaths(self.path / "api" / "plane")
        self.pods = self.path / "pods"
        self.images = self.path / "images"
        self.control = self.path / "control.sock"
        self.net_conf = self.path / "net-conf.json"
        """Configuration of the nodes' overlay."""
        self.corefile = self.path / "Corefile-b"
        """Configuration of the nodes' DNS. Each `write_corefile` changes it."""
        self.announcer_key = self.path / "announcer.key"
        """Key of the nodes' announcers."""
        self.logs = self.path / "log"
        self.programs = PROGRAMS / name
        self.kept = self.programs / KEPT
        """Exists only for a lab with `--keep`."""
        self.objects = self.kept / "objects.db"
        self.applied = self.kept / "applied.json"
        self._state = self.path / "state.json"

    @property
    def input(self) -> Path:
        """The default directory for manifests, which lies with the kept objects if there are any."""
        return (self.kept if self.kept.is_dir() else self.path) / "input"

    def node(self, name: str) -> NodePaths:
        """Return the paths of a node."""
        return NodePaths(self.path / name, self.programs / name)

    def read(self) -> LabState | None:
        """Return the last written state, None if there is none."""
        try:
            return _STATES.decode(self._state.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            raise LabError(f"{self.path} is not readable: run as root") from None

    def write(self, state: LabState) -> None:
        """Replace the state atomically."""
        replace_file(self._state, msgspec.json.format(msgspec.json.encode(state)))

    def write_corefile(self, text: str) -> None:
        """Write a Corefile for the nodes to another path than the one before, so that their configuration changes."""
        self.corefile = self.path / ("Corefile-a" if self.corefile.name == "Corefile-b" else "Corefile-b")
        replace_file(self.corefile, text.encode())

    def lock(self) -> int | None:
        """Lock the lab; return a file descriptor to keep open, None if another process owns it. Raises FileNotFoundError."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The directory may have been removed or recreated between opening and locking it.
            if not os.path.samestat(os.fstat(handle), self.path.stat()):
                raise FileNotFoundError(self.path)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            raise
        return handle


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)


def existing() -> list[str]:
    """Return the names of all labs with a directory below /run."""
    return _folders(LABS)


def remaining() -> list[str]:
    """Return the names of all labs with files. /run is empty after a reboot, the CNI plugins' directory is not."""
    programs = (name for name in _folders(PROGRAMS) if any(each.name != KEPT for each in (PROGRAMS / name).iterdir()))
    return sorted({*_folders(LABS), *programs})


def kept() -> list[str]:
    """Return the names of all labs with kept objects."""
    return [name for name in _folders(PROGRAMS) if (PROGRAMS / name / KEPT).is_dir()]


def _folders(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir() if entry.is_dir()) if place.is_dir() else []
