"""A control plane of the official programs: etcd, kube-apiserver, kube-controller-manager, and kube-scheduler.

They run in the fabric's network namespace. The API server listens where the lab's own would; certificates, keys, and the token are
the lab's, the data directory of etcd is below /run/narthex/lab/NAME/api.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from narthex.lab import topology
from narthex.lab.cluster import DOMAIN
from narthex.lab.controllers.node_lifecycle import EXTERNAL_NODE_GRACE_SECONDS
from narthex.lab.program.api_server import LOOPBACK, NAMES, write_kubeconfigs
from narthex.lab.program.state import LabError, StateDirectory, write_secret
from narthex.lab.server import certificate
from narthex.lab.topology import API_ADDRESS, API_PORT, LabNode
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import StartedProgram, run, start_program
from narthex.model.backoff import Backoff

ETCD, API_SERVER = "etcd", "kube-apiserver"
CONTROLLER_MANAGER, SCHEDULER = "kube-controller-manager", "kube-scheduler"
PROGRAMS = (ETCD, API_SERVER, CONTROLLER_MANAGER, SCHEDULER)
"""In start order."""
_HEALTH = {
    API_SERVER: f"https://{API_ADDRESS}:{API_PORT}/readyz",
    CONTROLLER_MANAGER: "https://127.0.0.1:10257/healthz",
    SCHEDULER: "https://127.0.0.1:10259/healthz",
}
_ETCD_URL = "http://127.0.0.1:2379"
_READY_SECONDS = 300.0
"""The programs start within 5 s, on a machine with ten times its load within a minute."""
_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 5.0
_RESTART = Backoff(1.0, 30.0)
"""Between the end of a program and its next start, as a kubelet restarts static pods."""
_STEADY_SECONDS = 60.0
"""A run of this duration resets the backoff."""
_WATCH_SECONDS = 0.5
_PIECE = 64 * 1024
_LOG_LINES = 10


def check_programs(directory: Path) -> None:
    """Raise LabError, which names each missing program, unless a directory has all four."""
    if not directory.is_dir():
        raise LabError(f"there is no directory {str(directory)!r} with the programs of a control plane")
    missing = [name for name in PROGRAMS if not os.access(directory / name, os.X_OK) or (directory / name).is_dir()]
    if missing:
        raise LabError(
            f"{directory} has no executable {', '.join(missing)}: put the programs of an official release there "
            f"({', '.join(PROGRAMS)})"
        )


class ControlPlane:
    """The programs of one lab. One thread calls `start` and then `run`; any thread may call the others."""

    def __init__(
        self,
        directory: StateDirectory,
        programs: Path,
        nodes: Sequence[LabNode],
        connect: Callable[[], object],
        progress: Callable[[str], object],
    ) -> None:
        """Prepare the programs.

        Args:
            directory: The lab's files.
            programs: The directory with the four programs.
            nodes: The nodes, whose kubelets have the same certificate as the API server.
            connect: Called once the API server is ready.
            progress: Called with sentences that tell how far the start is.
        """
        self._directory = directory
        self._programs = programs
        self._nodes = nodes
        self._connect = connect
        self._progress = progress
        self._namespace = topology.fabric_namespace(directory.name)
        self._token = os.urandom(24).hex()
        self._lock = threading.Lock()
        """Held while a program starts or ends on request."""
        self._running: dict[str, StartedProgram[bytes]] = {}
        self._paused = False
        self.problems: tuple[str, ...] = ()
        """Programs that do not run, as sentences."""

    def make_certificate(self) -> None:
        """Create certificates, keys, and the token. Raises CommandError or OSError."""
        files = self._directory.control_plane
        for folder in (self._directory.certificate.parent, files.path, files.etcd, files.generated):
            folder.mkdir(mode=0o700, exist_ok=True)
        made = certificate.make([*NAMES, *(address for node in self._nodes for address in node.addresses)])
        self._directory.certificate.write_text(made.certificate)
        write_secret(self._directory.key, made.key)
        client = certificate.make(["kube-apiserver-kubelet-client"], "clientAuth")
        files.kubelet_client.write_text(client.certificate)
        write_secret(files.kubelet_client_key, client.key)
        files.accounts_key.touch(mode=0o600)
        run(["openssl", *["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"], str(files.accounts_key)])
        write_secret(self._directory.token, self._token)
        write_secret(files.tokens, f"{self._token},narthex-lab,narthex-lab,system:masters\n")

    def start(self, port: int = 0) -> str:
        """Start the programs, wait until they are ready, and return the URL on loopback. Raises LabError or OSError."""
        begun = time.monotonic()
        self._progress(f"{ETCD} and {API_SERVER} start")
        self._start(ETCD)
        self._start(API_SERVER)
        self._await(API_SERVER)
        self._progress(f"{API_SERVER} is ready after {time.monotonic() - begun:.0f} s; the controllers start")
        port = forward_to_api(self._namespace, port)
        url = write_kubeconfigs(self._directory, port, self._token)
        self._start(CONTROLLER_MANAGER)
        self._start(SCHEDULER)
        self._connect()
        for name in (CONTROLLER_MANAGER, SCHEDULER):
            self._await(name)
        self._progress(f"the control plane is ready after {time.monotonic() - begun:.0f} s; nodes and pods start")
        return url

    def run(self) -> None:
        """Restart programs that end, until the process ends."""
        failures = dict.fromkeys(PROGRAMS, 0)
        since = dict.fromkeys(PROGRAMS, time.monotonic())
        again: dict[str, float] = {}
        while True:
            time.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            with self._lock:
                for name in self._ended():
                    if name not in again:
                        failures[name] = 1 if now - since[name] >= _STEADY_SECONDS else failures[name] + 1
                        again[name] = now + _RESTART.delay(failures[name])
                    elif now >= again[name]:
                        del again[name]
                        since[name] = now
                        with contextlib.suppress(OSError):
                            self._start(name)
                self.problems = tuple(
                    f"{name} has ended; the lab starts it again: see {self._log(name)}" for name in self._ended()
                )

    def pause(self) -> None:
        """Kill the API server. What etcd has stays."""
        with self._lock:
            self._paused = True
            self._running[API_SERVER].kill()
            self._running[API_SERVER].wait()

    def resume(self) -> None:
        """Start the API server again and wait until it is ready. Raises LabError or OSError."""
        with self._lock:
            self._start(API_SERVER)
            self._paused = False
        self._await(API_SERVER)

    def _ended(self) -> list[str]:
        paused = (API_SERVER,) if self._paused else ()
        return [name for name, program in self._running.items() if name not in paused and program.poll() is not None]

    def _start(self, name: str) -> None:
        argv = [str(self._programs / name), *self._arguments(name)]
        output = os.open(self._log(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._running[name] = start_program(argv, namespace=self._namespace, output=output)
        finally:
            os.close(output)

    def _log(self, name: str) -> Path:
        return self._directory.logs / f"{name}.log"

    def _await(self, name: str) -> None:
        """Wait until a program and those before it are ready. Raises LabError if one ends or takes too long."""
        begun = time.monotonic()
        reported = begun
        context = ssl._create_unverified_context()
        while True:
            for other, program in self._running.items():
                status = program.poll()
                if status is not None:
                    raise LabError(f"{other} ended with status {status}:\n{self._last_lines(other)}")
            if is_well(self._namespace, _HEALTH[name], context, self._token):
                return
            now = time.monotonic()
            if now > begun + _READY_SECONDS:
                raise LabError(f"{name} is not ready after {_READY_SECONDS:.0f} s:\n{self._last_lines(name)}")
            if now > reported + _PROGRESS_SECONDS:
                self._progress(f"{name} is not ready yet, after {now - begun:.0f} s")
                reported = now
            time.sleep(_POLL_SECONDS)

    def _last_lines(self, name: str) -> str:
        log = self._log(name).read_text(errors="replace")
        return "\n".join(log.splitlines()[-_LOG_LINES:]) or "(its log is empty)"

    def _arguments(self, name: str) -> Iterable[str]:
        directory, files = self._directory, self._directory.control_plane
        if name == ETCD:
            return (
                f"--data-dir={files.etcd}",
                f"--listen-client-urls={_ETCD_URL}",
                f"--advertise-client-urls={_ETCD_URL}",
                "--listen-peer-urls=http://127.0.0.1:2380",
            )
        if name == API_SERVER:
            return (
                f"--etcd-servers={_ETCD_URL}",
                f"--bind-address={API_ADDRESS}",
                f"--advertise-address={API_ADDRESS}",
                f"--secure-port={API_PORT}",
                f"--cert-dir={files.generated}",
                f"--tls-cert-file={directory.certificate}",
                f"--tls-private-key-file={directory.key}",
                f"--token-auth-file={files.tokens}",
                "--authorization-mode=Node,RBAC",
                "--allow-privileged=true",
                f"--service-cluster-ip-range={','.join(topology.SERVICE_CIDRS)}",
                f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
                f"--service-account-key-file={files.accounts_key}",
                f"--service-account-signing-key-file={files.accounts_key}",
                f"--kubelet-certificate-authority={directory.certificate}",
                f"--kubelet-client-certificate={files.kubelet_client}",
                f"--kubelet-client-key={files.kubelet_client_key}",
                "--kubelet-preferred-address-types=InternalIP",
                # The fabric has no routes to cluster IPs, so that webhooks are called at their endpoints.
                "--enable-aggregator-routing=true",
            )
        common = (f"--kubeconfig={directory.node_kubeconfig}", "--bind-address=127.0.0.1", "--leader-elect=false")
        if name == SCHEDULER:
            return common
        return (
            *common,
            f"--root-ca-file={directory.certificate}",
            f"--service-account-private-key-file={files.accounts_key}",
            f"--node-monitor-grace-period={EXTERNAL_NODE_GRACE_SECONDS:.0f}s",
            "--node-monitor-period=1s",
        )


def is_well(namespace: str, url: str, context: ssl.SSLContext, token: str = "") -> bool:
    """Return True if a URL of a network namespace answers with status 200."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with in_namespace(namespace), opener.open(request, timeout=2.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def forward_to_api(namespace: str, port: int) -> int:
    """Forward connections from a port on this machine's loopback (0: a free one) to the API server of a namespace. Return the port."""
    sock = socket.create_server((LOOPBACK, port), backlog=512)
    number = int(sock.getsockname()[1])

    def forward() -> None:
        """Forward connections until the process ends."""
        # Sockets of this thread are in the namespace, the listener is not.
        with in_namespace(namespace):
            asyncio.run(_forward(sock))

    threading.Thread(target=forward, name="api-forward", daemon=True).start()
    return number


async def _forward(sock: socket.socket) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy both directions of a connection; reset it if the API server cannot be reached."""
        try:
            far_reader, far_writer = await asyncio.open_connection(API_ADDRESS, API_PORT)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    server = await asyncio.start_server(carry, sock=sock)
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection; its end ends the other direction, too."""
    try:
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
        # TLS ends by a message; what follows would be of no use.
        writer.close()
    except OSError:
        writer.transport.abort()
