"""A node's process: `narthex node`, forked from a process that has loaded all of it already."""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import socket
import sys
import threading
from collections.abc import Sequence

import msgspec

from narthex.lab.containers import inside
from narthex.lab.containers.forks import ForkServer, ProcessExit
from narthex.linux import processes
from narthex.linux.processes import ProcessIdentity, identify
from narthex.linux.run import with_package

NODE = "node"
"""Name of the job."""

_PRELOADED = (
    "narthex.cli.node",
    "narthex.node.process",
    "narthex.kube.decoders",
    "narthex.cni.program.agent",
    "narthex.dns.program.node_local",
    "narthex.kube.origin",
    "narthex.kube.access",
    "narthex.kube.chunks",
    "narthex.kube.session",
    "narthex.kube.transport",
    "narthex.proxy.backends.nftables.backend",
    "narthex.proxy.kernel.nftables",
    "narthex.model.documents",
    "lightkube.config.client_adapter",
    "lightkube.config.kubeconfig",
    "httpx2",
    "h11",
    "prometheus_client.core",
    "yaml",
    "ssl",
    "asyncio",
    "concurrent.futures.thread",
    "encodings.idna",
)
"""What every node loads sooner or later."""


class NodeStartRequest(msgspec.Struct, frozen=True):
    """What a node's process is told."""

    namespace: str
    """Its network namespace."""
    log: str
    """The file for its log."""
    arguments: tuple[str, ...]
    """Of `narthex node`."""


class _StartedMessage(msgspec.Struct, frozen=True):
    pid: int


def preload() -> None:
    """Load what nodes need. Before the first one is forked."""
    for module in _PRELOADED:
        importlib.import_module(module)
    importlib.import_module("narthex.kube.decoders").prepare_decoders()


def run_node(control: socket.socket, message: bytes, files: Sequence[int]) -> None:
    """Be `narthex node`: a job of `ForkServer`."""
    del files
    request = msgspec.json.decode(message, type=NodeStartRequest)
    control.sendall(msgspec.json.encode(_StartedMessage(os.getpid())) + b"\n")
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for handle, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(handle, number)
    inside.join_network(request.namespace)
    os.chdir("/")
    # A node that takes over another configuration starts itself anew by these.
    sys.argv = ["narthex", "node", *request.arguments]
    sys.orig_argv = [sys.executable, "-P", "-m", *sys.argv]
    os.environ.update(with_package(os.environ))
    # What was loaded before belongs to all of them; a process of its own looks after what it makes itself.
    gc.unfreeze()
    # As `python -m narthex` does: it is a program of its own, which this one does not know.
    runpy.run_module("narthex", run_name="__main__")


class NodeProcess:
    """One of them, seen from the lab's process."""

    def __init__(self, forks: ForkServer, message: NodeStartRequest) -> None:
        """Start it. Raises OSError."""
        self._control = forks.start(NODE, msgspec.json.encode(message))
        self._lock = threading.Lock()
        self._status: int | None = None
        line = b""
        while not line.endswith(b"\n") and (part := self._control.recv(1)):
            line += part
        self.identity: ProcessIdentity | None = None
        try:
            self.identity = identify(msgspec.json.decode(line, type=_StartedMessage).pid)
        except msgspec.DecodeError:
            # It has ended before it could say anything.
            self._status = _status(line)

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        with self._lock:
            if self._status is None:
                try:
                    line = self._control.recv(4096, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                except ConnectionError:
                    line = b""
                self._status = _status(line)
            return self._status

    def kill(self) -> None:
        """End it at once, as a crash would; returns when it has ended."""
        if self.identity is not None:
            processes.kill([self.identity])


def _status(line: bytes) -> int:
    """How it ended. Nothing is said when whoever forked it has ended with it."""
    return os.waitstatus_to_exitcode(msgspec.json.decode(line, type=ProcessExit).ended) if line else -9
