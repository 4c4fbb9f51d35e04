"""The lab's API on the machine: on loopback for people, and in the network between the nodes for nodes and pods."""

from __future__ import annotations

import base64
import os
import socket
from pathlib import Path

from narthex.lab import topology
from narthex.lab.api.api import ApiHandler
from narthex.lab.cluster import API_SERVICE_ADDRESS
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import StateDirectory
from narthex.lab.server import certificate
from narthex.lab.server.pods import PodRuntime
from narthex.lab.server.server import ApiServer
from narthex.lab.topology import API_ADDRESS
from narthex.linux import namespaces as netns

_BACKLOG = 512
_GATHER_SECONDS = 0.005
"""What changes within so short a time is told to watchers together."""
_LOOPBACK = "127.0.0.1"


class LabApiServer:
    """The server, and what is needed to reach it."""

    def __init__(self, directory: StateDirectory, registry: SharedRegistry, api: ApiHandler, pods: PodRuntime) -> None:
        self._directory = directory
        self._token = os.urandom(24).hex()
        self._port = 0
        self.server = ApiServer(
            api, registry.lock, token=self._token, pods=pods, changed=registry.notify, gather=_GATHER_SECONDS
        )
        registry.listen(self.server.wake)

    def make_certificate(self) -> None:
        """Make what TLS needs, and the token. Raises CommandError, OSError."""
        self._directory.certificate.parent.mkdir(mode=0o700, exist_ok=True)
        made = certificate.make(NAMES)
        self._directory.certificate.write_text(made.certificate)
        write_secret(self._directory.key, made.key)
        write_secret(self._directory.token, self._token)

    def start(self, port: int = 0) -> str:
        """Listen, and write the kubeconfigs; the URL for this machine. `port` on loopback, 0: any. Raises OSError."""
        made = certificate.Certificate(self._directory.certificate.read_text(), self._directory.key.read_text())
        context = made.context()
        with netns.entered(topology.fabric_namespace(self._directory.name)):
            fabric = socket.create_server((topology.API_ADDRESS, topology.API_PORT), backlog=_BACKLOG)
        loopback = socket.create_server((_LOOPBACK, port), backlog=_BACKLOG)
        self.server.start()
        self.server.listen(fabric, context)
        self._port = self.server.listen(loopback, context)
        url = f"https://{_LOOPBACK}:{self._port}"
        within = f"https://{topology.API_ADDRESS}:{topology.API_PORT}"
        for path, where in ((self._directory.kubeconfig, url), (self._directory.node_kubeconfig, within)):
            text = kubeconfig(self._directory.name, where, self._directory.certificate, self._token)
            write_secret(path, text)
        return url

    def pause(self) -> None:
        """Break all connections and take no new ones. The caller does not hold the objects' lock."""
        self.server.stop()

    def resume(self) -> None:
        """Listen again where it was. Raises OSError."""
        self.start(self._port)


NAMES = (
    "127.0.0.1",
    "::1",
    "localhost",
    API_ADDRESS,
    API_SERVICE_ADDRESS,
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)
"""What the API server's certificate is for."""


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner reads."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)


def kubeconfig(lab: str, server: str, certificate: Path, token: str) -> str:
    """A kubeconfig, whole in itself. All that is put in is of our own making."""
    authority = base64.b64encode(certificate.read_bytes()).decode()
    name = f"narthex-{lab}"
    return (
        "apiVersion: v1\nkind: Config\n"
        f"current-context: {name}\n"
        f"clusters:\n- name: {name}\n  cluster:\n    server: {server}\n    certificate-authority-data: {authority}\n"
        f"users:\n- name: {name}\n  user:\n    token: {token}\n"
        f"contexts:\n- name: {name}\n  context:\n    cluster: {name}\n    user: {name}\n"
    )
