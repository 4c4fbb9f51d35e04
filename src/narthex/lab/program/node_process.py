"""A node's process: `narthex node`, forked from a process that has preloaded it."""

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

from narthex.lab.containers.forks import PROCESS_EXITS, ForkServer
from narthex.lab.containers.program import join_network
from narthex.linux.processes import ProcessIdentity, identify_process, kill_processes
from narthex.linux.run import with_package

NODE, PROGRAM = "node", "node-program"
"""Names of the jobs: `narthex node`, and another program of a node."""

_PRELOADED = (
    "narthex.cli.node",
    "narthex.node.process",
    "narthex.kube.messages",
    "narthex.cni.program.agent",
    "narthex.dns.program.node_local",
    "narthex.kube.access",
    "narthex.kube.source",
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
"""Modules that every node loads."""


class NodeStartRequest(msgspec.Struct, frozen=True):
    """Parameters of a node's process."""

    namespace: str
    """Network namespace."""
    log: str
    """Path of the log file."""
    arguments: tuple[str, ...]
    """Arguments of `narthex node`, or the program and its arguments."""


class _StartedMessage(msgspec.Struct, frozen=True):
    pid: int


_START_REQUESTS, _STARTED = msgspec.json.Decoder(NodeStartRequest), msgspec.json.Decoder(_StartedMessage)


def preload() -> None:
    """Import what nodes need, before the first one is forked."""
    for module in _PRELOADED:
        importlib.import_module(module)
    importlib.import_module("narthex.kube.messages").prepare_decoders()


def run_node(control: socket.socket, message: bytes, files: Sequence[int]) -> None:
    """Run `narthex node` in a forked process (a job of `ForkServer`)."""
    del files
    request = _begin(control, message)
    # A node restarts itself with these arguments when its configuration changes.
    sys.argv = ["narthex", "node", *request.arguments]
    sys.orig_argv = [sys.executable, "-P", "-m", *sys.argv]
    os.environ.update(with_package(os.environ))
    # Preloaded objects were frozen to be shared; this process collects its own garbage again.
    gc.unfreeze()
    # Run as `python -m narthex`, since this module must not depend on the CLI.
    runpy.run_module("narthex", run_name="__main__")


def run_program(control: socket.socket, message: bytes, files: Sequence[int]) -> None:
    """Replace a forked process by a program in a node's network (a job of `ForkServer`). It ends with the server."""
    del files
    argv = _begin(control, message).arguments
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(126)


def _begin(control: socket.socket, message: bytes) -> NodeStartRequest:
    """Report the process, and enter the node."""
    request = _START_REQUESTS.decode(message)
    control.sendall(msgspec.json.encode(_StartedMessage(os.getpid())) + b"\n")
    redirect_to_log(request.log)
    join_network(request.namespace)
    os.chdir("/")
    return request


def redirect_to_log(path: str | os.PathLike[str]) -> None:
    """Append this process's output to a log file; its input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for handle, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(handle, number)
    for handle in {null, log} - {0, 1, 2}:
        os.close(handle)


class NodeProcess:
    """A node's process, seen from the lab's process."""

    def __init__(self, forks: ForkServer, message: NodeStartRequest, job: str = NODE) -> None:
        """Start the process. Raises OSError."""
        self._control = forks.start(job, msgspec.json.encode(message))
        self._lock = threading.Lock()
        self._status: int | None = None
        line = b""
        while not line.endswith(b"\n") and (part := self._control.recv(1)):
            line += part
        self.identity: ProcessIdentity | None = None
        try:
            self.identity = identify_process(_STARTED.decode(line).pid)
        except msgspec.DecodeError:
            # The process ended before it sent the message.
            self._status = _status(line)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
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
        """Kill the process and wait for its end."""
        if self.identity is not None:
            kill_processes([self.identity])


def _status(line: bytes) -> int:
    """Return the exit status. The line is empty if the fork server has ended, too."""
    return os.waitstatus_to_exitcode(PROCESS_EXITS.decode(line).ended) if line else -9
