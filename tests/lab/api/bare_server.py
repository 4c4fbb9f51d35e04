"""The lab's API alone, over TLS as kubectl wants it, with pods that are programs of this machine."""

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from narthex.lab.api.admission import admit
from narthex.lab.api.api import ApiHandler
from narthex.lab.api.errors import StatusError
from narthex.lab.api.registry import Registry
from narthex.lab.api.requests import LogRequest
from narthex.lab.controllers.service.admission import ServiceAllocator
from narthex.lab.program.api_server import kubeconfig
from narthex.lab.server import certificate
from narthex.lab.server.server import ApiServer

TOKEN = "a-token-of-the-lab"


class Program:
    """A process of this machine, as one of a pod."""

    def __init__(self, argv: Sequence[str], stdin: bool) -> None:
        feed = subprocess.PIPE if stdin else subprocess.DEVNULL
        self._process = subprocess.Popen(argv, stdin=feed, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr

    def resize(self, rows: int, columns: int) -> None:
        """There is no terminal."""

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self.stdout, self.stderr):
            if end is not None:
                end.close()


class Pods:
    """What containers write, and programs beside them."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.more = threading.Event()
        self.ports: dict[Any, int] = {}
        """Ports of this machine that stand for (node, host, port)."""
        self.files: dict[str, Path] = {}
        """Log files of the first node."""

    def dial(self, node: str, host: str, port: int) -> socket.socket:
        if (node, host, port) not in self.ports:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        made = socket.create_connection(("127.0.0.1", self.ports[node, host, port]), 30)
        made.setblocking(False)
        return made

    def connect(self, namespace: str, pod: str, port: int) -> socket.socket:
        return self.dial(namespace, pod, port)

    def attach(self, namespace: str, pod: str, container: str, stdin: bool, stdout: bool, stderr: bool) -> Any:
        self.asked.append((namespace, pod, container, stdin, stdout, stderr))
        return Program(["sh", "-c", "cat; echo over"], stdin)

    def node_logs(self, node: str) -> dict[str, Path]:
        return self.files if node == "node-1" else {}

    def logs(self, request: LogRequest) -> Iterator[bytes]:
        where = (request.namespace, request.pod, request.container)
        options = (request.tail, request.follow, request.since is not None, request.previous, request.timestamps)
        self.asked.append((*where, *options))
        yield b"first line\n"
        while request.follow and not self.more.is_set():
            yield b""
            time.sleep(0.01)
        yield b"second line\n"

    def exec(self, namespace: str, pod: str, container: str, argv: Sequence[str], stdin: bool, tty: bool) -> Any:
        self.asked.append((namespace, pod, container, tuple(argv), stdin, tty))
        try:
            return Program(argv, stdin)
        except OSError as error:
            raise StatusError(
                500, "InternalError", f"{argv[0]} cannot be started in pod {pod}: {error.strerror}"
            ) from None


class Bare:
    """A server, its registry, and a kubeconfig."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.RLock()
        allocation = ServiceAllocator()

        def admission(registry: Any, kind: Any, held: Any, new: Any, subresource: str) -> Any:
            return allocation.admit(registry, kind, held, admit(registry, kind, held, new, subresource), subresource)

        self.registry = Registry(lambda: datetime.now(UTC), os.urandom, admit=admission)
        for name in ("default", "kube-system"):
            self.registry.create("Namespace", {"metadata": {"name": name}})
        self.registry.create("ServiceCIDR", {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16"]}})
        self.pods = Pods()
        self.server = ApiServer(ApiHandler(self.registry), self.lock, token=TOKEN, pods=self.pods)
        made = certificate.make(["127.0.0.1", "localhost"])
        (folder / "certificate.pem").write_text(made.certificate)
        self.server.start()
        port = self.server.listen(("127.0.0.1", 0), made.context())
        self.url, self.certificate = f"https://127.0.0.1:{port}", folder / "certificate.pem"
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(kubeconfig("bare", self.url, self.certificate, TOKEN))

    def create(self, kind: str, raw: dict[str, Any]) -> Any:
        """Make an object as controllers do."""
        with self.lock:
            made = self.registry.create(kind, raw)
        self.server.wake()
        return made

    def update(self, kind: str, raw: dict[str, Any], **how: Any) -> Any:
        """Write one as controllers do."""
        with self.lock:
            made = self.registry.update(kind, raw, **how)
        self.server.wake()
        return made


@contextmanager
def bare(folder: Path) -> Iterator["Bare"]:
    """A server that runs."""
    server = Bare(folder)
    try:
        yield server
    finally:
        server.pods.more.set()
        server.server.stop()
        server.server.close()
