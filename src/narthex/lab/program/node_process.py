"""A node's process: `narthex node`, forked from a process that has preloaded it."""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Sequence

import msgspec

from narthex.lab.containers.cgroups import join_cgroup
from narthex.lab.containers.container import JOBS
from narthex.lab.containers.program import join_network
from narthex.linux import module_process
from narthex.linux.forks import ForkedProcess, ForkServer, report_start
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
_WORKERS = ("narthex.dns.program.worker", "narthex.proxy.relay.process")
"""Modules that nodes start as processes of their own."""


class NodeStartRequest(msgspec.Struct, frozen=True):
    """Parameters of a node's process."""

    namespace: str
    """Network namespace."""
    log: str
    """Path of the log file."""
    arguments: tuple[str, ...]
    """Arguments of `narthex node`, or the program and its arguments."""
    cgroup: str = ""
    """Directory of the node's control group. Empty: that of the lab."""


_START_REQUESTS = msgspec.json.Decoder(NodeStartRequest)


def create_fork_server() -> ForkServer:
    """Create the server that forks containers and the programs of nodes. The caller has one thread."""
    return ForkServer({**JOBS, NODE: run_node, PROGRAM: run_program}, _preload)


def _preload() -> None:
    """Import what nodes need, before the first one is forked."""
    for module in (*_PRELOADED, *_WORKERS):
        importlib.import_module(module)
    importlib.import_module("narthex.kube.messages").prepare_decoders()


def run_node(control: socket.socket, message: bytes, files: Sequence[int]) -> None:
    """Run `narthex node` in a forked process (a job of `ForkServer`)."""
    del files
    request = _begin(control, message)
    module_process.preload(*_WORKERS)
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
    report_start(control)
    redirect_to_log(request.log)
    join_network(request.namespace)
    join_cgroup(request.cgroup)
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


class NodeProcess(ForkedProcess):
    """A node's process, seen from the lab's process."""

    def __init__(self, forks: ForkServer, request: NodeStartRequest, job: str = NODE) -> None:
        """Start the process. Raises OSError."""
        super().__init__(forks, job, msgspec.json.encode(request))
