"""A cluster: nodes in namespaces of this machine, each with a kubelet and a container runtime, and a control plane."""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster import control_groups, files, images
from tests.cluster.families import API_ADDRESSES, DNS_ADDRESSES, IPV4, IPV6, SERVER_ADDRESSES, Families
from tests.cluster.programs import ClusterPrograms

from narthex.lab import topology
from narthex.lab.program.api_server import NAMES, kubeconfig
from narthex.lab.program.control_plane import API_SERVER, CONTROLLER_MANAGER, ControlPlane
from narthex.lab.program.network import make_network
from narthex.lab.program.state import LABS, LabError, StateDirectory, write_secret
from narthex.lab.server import certificate
from narthex.lab.topology import LabNode
from narthex.linux.namespaces import delete_namespace, namespace_names
from narthex.linux.processes import kill_processes, processes_inside
from narthex.linux.run import StartedProgram, run, start_program

_HERE = Path(__file__).parent
DISK = Path("/var/tmp")
"""Images and containers are too large for /run or a /tmp in memory, and must not be on an overlay."""
_KILL_SECONDS = 20.0
_KUBELET_LOG = "root/etc/node/kubelet.log"


class ClusterControlPlane(ControlPlane):
    """The lab's, which also knows the kubelets by their own accounts, and gives nodes their pods' ranges."""

    node_tokens: dict[str, str]
    families: Families

    def make_certificate(self) -> None:
        """Create certificates, keys, and tokens, those of the kubelets as well."""
        super().make_certificate()
        addresses = [address for node in self._nodes for address in node.addresses]
        made = certificate.make([*NAMES, *API_ADDRESSES, *SERVER_ADDRESSES, *addresses])
        self._directory.certificate.write_text(made.certificate)
        write_secret(self._directory.key, made.key)
        self.node_tokens = {node.name: os.urandom(24).hex() for node in self._nodes}
        tokens = self._directory.control_plane.tokens
        lines = [f'{token},system:node:{node},{node},"system:nodes"\n' for node, token in self.node_tokens.items()]
        write_secret(tokens, tokens.read_text() + "".join(lines))

    def abandon(self) -> None:
        """Start no program again: they are ended, and the directory of their logs is removed."""
        with self._lock:
            self._running.clear()

    def _arguments(self, name: str) -> Iterable[str]:
        usual = tuple(super()._arguments(name))
        if name == API_SERVER and self.families.name == IPV6:
            # The last one counts.
            ranges = f"--service-cluster-ip-range={topology.SERVICE_CIDRS[1]}"
            return (*usual, "--bind-address=::", f"--advertise-address={API_ADDRESSES[1]}", ranges)
        if name == CONTROLLER_MANAGER:
            ranges = ",".join(self.families.of(topology.CLUSTER_CIDRS))
            return (*usual, "--allocate-node-cidrs=true", f"--cluster-cidr={ranges}")
        return usual


class Cluster:
    """One cluster; `running` starts and removes it."""

    def __init__(
        self,
        name: str,
        programs: ClusterPrograms,
        nodes: int,
        say: Callable[[str], None],
        families: Families,
        *,
        other_host_names: bool,
    ) -> None:
        """`other_host_names`: machines have host names that aren't the nodes' names, so that all need `--hostname-override`."""
        self.name = name
        self.families = families
        self._other_host_names = other_host_names
        self.programs = programs
        self.say = say
        self.directory = StateDirectory(name)
        self.disk = DISK / f"narthex-{name}"
        self.nodes = topology.nodes(name, nodes)
        self.kubeconfig = self.directory.kubeconfig
        self._plane = ClusterControlPlane(self.directory, programs.control_plane, self.nodes, lambda: None, say)
        self._plane.families = families
        self._processes: dict[str, StartedProgram[bytes]] = {}

    def start(self) -> None:
        """Start the control plane and the nodes, which are not ready without a network of pods."""
        self.disk.mkdir()
        self.directory.logs.mkdir(parents=True)
        make_network(self.name, self.nodes, topology.VXLAN)
        fabric = topology.fabric_namespace(self.name)
        for command in self.families.access(self.nodes):
            run(["ip", *command.split()], namespace=fabric)
        for node in self.nodes:
            for command in self.families.without_others():
                run(["ip", *command.split()], namespace=node.namespace)
        self._plane.make_certificate()
        self._plane.start()
        threading.Thread(target=self._plane.run, daemon=True).start()
        for node in self.nodes:
            self._register(node)
        for node in self.nodes:
            self.start_node(node)
        for node in self.nodes:
            # It is the last that a node starts.
            await_true((self.disk / node.name / _KUBELET_LOG).exists, f"the kubelet of {node.name}")

    def _register(self, node: LabNode) -> None:
        # The range is known beforehand, since the API server's route to the node's pods has it.
        index = self.nodes.index(node)
        labels = {"kubernetes.io/hostname": node.name, "topology.kubernetes.io/zone": f"zone-{index % 3}"}
        ranges = self.families.of(node.pod_cidrs)
        spec = {"podCIDR": ranges[0], "podCIDRs": ranges}
        self.apply(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name, "labels": labels}, "spec": spec}
        )

    def start_node(self, node: LabNode) -> None:
        """Start a node, new or killed."""
        place = self.disk / node.name
        own = place / "root" / "etc" / "node"
        for each in (own, place / "programs"):
            each.mkdir(parents=True, exist_ok=True)
        listed = {"kubelet": str(self.programs.kubelet)}
        if self.programs.containerd is not None:
            listed |= {each.name: str(each) for each in self.programs.containerd.iterdir() if os.access(each, os.X_OK)}
        for name, path in listed.items():
            link = place / "programs" / name
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        (place / _KUBELET_LOG).unlink(missing_ok=True)
        paths = self.directory
        server = f"https://{self.families.api_server}"
        token = self._plane.node_tokens[node.name]
        write_secret(own / "kubeconfig", kubeconfig(self.name, server, paths.certificate, token))
        (own / "kubelet.json").write_text(json.dumps(files.kubelet_configuration(DNS_ADDRESSES[self.families.first])))
        (own / "containerd.toml").write_text(files.CONTAINERD)
        (own / "resolv.conf").write_text("nameserver 192.0.2.53\n")
        shutil.copy(paths.certificate, own / "tls.crt")
        shutil.copy(paths.key, own / "tls.key")
        shutil.copy(paths.control_plane.kubelet_client, own / "kubelet-client.crt")
        groups = control_groups.create(self.name, node.name)
        (place / "controllers").write_text(" ".join(control_groups.controllers()))
        enter = "".join(f"echo 0 > {each}/cgroup.procs; " for each in groups)
        isolated = "unshare --mount --pid --uts --ipc --cgroup --fork --kill-child --propagation private"
        addresses = ",".join(self.families.of(node.addresses))
        host = f"host-of-{node.name}" if self._other_host_names else node.name
        words = f"{_HERE}/node.sh {place} {node.name} {addresses} {host}"
        script = f"{enter}exec setpriv --pdeathsig KILL {isolated} sh {words}"
        output = os.open(self.directory.logs / f"{node.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._processes[node.name] = start_program(["sh", "-c", script], namespace=node.namespace, output=output)
        finally:
            os.close(output)

    def kill_node(self, node: LabNode) -> None:
        """Kill all processes of a node at once."""
        process = self._processes.pop(node.name)
        process.kill()
        process.wait()
        await_true(lambda: not processes_inside([node.namespace]), f"the end of {node.name}", _KILL_SECONDS)

    def inside(self, node: LabNode, *argv: str, timeout: float = 120.0) -> str:
        """Run a program in all namespaces of a node, and return its output. Raises CommandError."""
        (first,) = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self._processes[node.name].pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        return run(["nsenter", "-a", "-t", first, "-r", "-w", *argv], timeout=timeout)

    def check_cgroup(self, node: LabNode) -> None:
        """Raise LabError unless the root of the node's hierarchy of version 2 is the node's own control group."""
        top = control_groups.hierarchy()
        own = top / control_groups.own_path(self.name, node.name)
        seen = self.inside(node, "stat", "-c", "%i", str(top)).strip()
        if not own.exists() or seen != str(own.stat().st_ino):
            raise LabError(f"{node.name} sees control groups of the machine at {top}, not only its own")

    def load_image(self, archive: Path) -> None:
        """Import an archive of images into all nodes."""
        for node in self.nodes:
            place = self.disk / node.name / "root" / "etc" / "node" / "image.tar"
            os.link(archive, place)
            try:
                self.inside(node, "ctr", "-n", "k8s.io", "images", "import", "/etc/node/image.tar", timeout=300)
            finally:
                place.unlink()

    def write_basic_images(self) -> list[Path]:
        """Write the images of pods' first processes and of busybox."""
        architecture = images.ARCHITECTURES[platform.machine()]
        pause, busybox = self.disk / "pause.tar", self.disk / "busybox.tar"
        waits = images.layer({"pause": images.pause_program(architecture)})
        images.write_image(pause, [files.PAUSE_IMAGE], [waits], architecture, Entrypoint=["/pause"])
        program = Path(str(shutil.which("busybox"))).read_bytes()
        tools = images.layer({f"bin/{name}": program for name in ("busybox", "sh")})
        images.write_image(busybox, ["narthex.example/busybox:1"], [tools], architecture, Cmd=["/bin/sh"])
        return [pause, busybox]

    @property
    def environment(self) -> dict[str, str]:
        """Variables for kubectl."""
        own = {"KUBECONFIG": str(self.kubeconfig), "HOME": str(self.disk)}
        # On a busy machine, WebSockets of kubectl 1.32 may lose what a command writes first ("Unknown stream id 1, discarding message").
        return {**os.environ, **own, "KUBECTL_REMOTE_COMMAND_WEBSOCKETS": "false"}

    def kubectl(self, *words: str, stdin: str | None = None, timeout: float = 300.0) -> str:
        """Return kubectl's output. Raises CommandError."""
        done = subprocess.run(
            ["kubectl", *words],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise LabError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *words: str) -> Any:
        """Return objects as data."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def apply(self, *objects: Any) -> None:
        """Apply objects. The API server is ready before it describes its kinds, by which kubectl would check them."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "--force-conflicts", "--validate=false", "-f", "-", stdin=listed)

    def remove(self) -> None:
        """Remove everything, also what another process has left that was killed. Raises OSError if something stays."""
        self._plane.abandon()
        for process in self._processes.values():
            process.kill()
            process.wait()
        owned = [name for name in namespace_names() if topology.owns(self.name, name)]
        kill_processes(processes_inside(owned))
        for name in owned:
            delete_namespace(name)
        control_groups.remove(self.name)
        for folder in (self.directory.path, self.directory.programs, self.disk):
            if folder.exists():
                run(["rm", "-rf", "--one-file-system", str(folder)])

    def left(self) -> list[Any]:
        """Return everything on this machine that belongs to the cluster."""
        owned = [name for name in namespace_names() if topology.owns(self.name, name)]
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        folders = [each for each in (self.directory.path, self.disk) if each.exists()]
        mounted = [each for each in mounts if each.startswith(str(self.disk))]
        return [*owned, *processes_inside(owned), *control_groups.left(self.name), *folders, *mounted]


@contextlib.contextmanager
def running(
    name: str,
    programs: ClusterPrograms,
    nodes: int,
    say: Callable[[str], None],
    families: str = IPV4,
    *,
    other_host_names: bool = False,
) -> Iterator[Cluster]:
    """Run a cluster that has no network of pods yet. Nothing is left afterwards."""
    cluster = Cluster(name, programs, nodes, say, Families(families), other_host_names=other_host_names)
    LABS.mkdir(parents=True, exist_ok=True)
    lock = DISK / f"narthex-{name}.lock"
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise LabError(f"another process runs the cluster {name}: end it, or choose another name") from None
    cluster.remove()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()
        lock.unlink()
        os.close(handle)
        if found := cluster.left():
            raise LabError(f"the cluster has left {found}")


def await_true(condition: Callable[[], Any], what: str, patience: float = 120.0) -> Any:
    """Wait until something is true, and return it. Raises LabError after `patience` seconds."""
    end = time.monotonic() + patience
    while not (found := condition()):
        if time.monotonic() > end:
            raise LabError(f"{what} did not come within {patience:g} s")
        time.sleep(0.2)
    return found
