"""Operations on labs from outside: up, down, status, scale, kill.

A lab runs in its own process (`lab_process.py`), which `up` forks (`control_socket.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from narthex.lab import topology
from narthex.lab.program import daemon, node_cgroups
from narthex.lab.program.node_client import healthy as is_node_healthy
from narthex.lab.program.options import LabOptions
from narthex.lab.program.state import LABS, PROGRAMS, LabError, LabState, StateDirectory, existing, remaining
from narthex.linux.namespaces import delete_namespace, namespace_names
from narthex.linux.processes import ProcessIdentity, is_alive, kill_processes, processes_inside

if TYPE_CHECKING:
    from narthex.kube.access import Access

DEFAULT_NAME = "default"
_NEEDED = {"ip": "iproute2", "nft": "nftables", "openssl": "openssl"}
_REQUEST_SECONDS = 60.0
_LOCK_SECONDS = 5.0
_CLOSE_SECONDS = 10.0


class LabNodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a node's process."""

    node: str
    running: bool
    healthy: bool
    """All parts of the process report that they work, and the node is ready."""
    killed: bool = False
    """By `lab kill`."""
    ready: bool = True
    """The condition Ready of its Node object is True."""


class LabStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a lab."""

    running: bool
    """The lab's own process runs."""
    healthy: bool
    """Everything runs, and every node is healthy."""
    nodes: tuple[LabNodeStatus, ...]
    state: LabState


class StartedLab(NamedTuple):
    """The result of `up`."""

    state: LabState
    seconds: float
    cleared: bool
    """The remains of a crashed lab of this name were removed first."""


def open_lab(name: str) -> LabState:
    """Return the state of the running lab of this name. Raises LabError if there is none."""
    state = read(name)
    if not state.running or not is_running(state):
        raise LabError(f"lab {name!r} is not running; `narthex lab down --name {name}` removes its remains")
    return state


def access_of(lab: LabState) -> Access:
    """Return the access to the lab's API."""
    from narthex.kube.access import access_to

    return access_to(str(lab.kubeconfig))


def read(name: str) -> LabState:
    """Return the state of a lab, running or crashed. Raises LabError if there is none."""
    state = StateDirectory(name).read()
    if state is None:
        others = ", ".join(existing())
        raise LabError(
            f"there is no lab {name!r}; " + (f"there are: {others}" if others else "`narthex lab up` starts one")
        )
    return state


def is_running(state: LabState) -> bool:
    """Return True if the lab's own process runs."""
    return is_alive(state.controller)


def inspect_lab(name: str) -> LabStatus:
    """Return the current status of a lab. Raises LabError if there is none."""
    state = read(name)
    recorded = {each.node: each.process for each in state.processes}
    nodes = []
    for node in state.nodes:
        running = node.name in recorded and is_alive(recorded[node.name])
        healthy = running and is_node_healthy(node.namespace, kube_proxy=bool(state.kube_proxy))
        killed, ready = node.name in state.killed, node.name not in state.not_ready
        nodes.append(
            LabNodeStatus(node=node.name, running=running, healthy=healthy and ready, killed=killed, ready=ready)
        )
    runs = is_running(state)
    return LabStatus(
        running=runs, healthy=runs and all(node.healthy for node in nodes), nodes=tuple(nodes), state=state
    )


def inspect_all() -> list[LabStatus]:
    """Return the status of all labs on this machine."""
    return [inspect_lab(name) for name in existing() if StateDirectory(name).read() is not None]


def all_names() -> list[str]:
    """Return the names of all labs, including those of which only namespaces or files are left."""
    left = (topology.lab_of(namespace) for namespace in namespace_names())
    return sorted({*remaining(), *(name for name in left if name is not None)})


def up(
    name: str, options: LabOptions, *, keep: bool = False, progress: Callable[[str], object] = lambda _: None
) -> StartedLab:
    """Start a lab; return when every node has completed its first sync. After any error or interrupt nothing is left.

    Args:
        name: Name of the lab.
        options: What the lab is to be.
        keep: Keep the API's objects for the next lab of this name.
        progress: Called with sentences that tell how far a long start is.

    Raises:
        LabError: The lab cannot start.
    """
    started = time.monotonic()
    _check_machine(options.mode)
    directory = StateDirectory(name)
    _check_programs(directory, options, keep=keep)
    _check_values(name, options)
    lock = None
    try:
        with daemon.block_interrupts():
            lock, cleared = _acquire_name(directory)
        _make_directories(directory, keep=keep)
        make = partial(daemon.create_lab_process, directory, options.resolved())
        reply = daemon.start_process(directory, make, _remove, progress)
    except BaseException:
        if lock is not None:
            os.close(lock)
            down(name)
        raise
    os.close(lock)
    if reply != b"ready":
        down(name)
        raise LabError(reply.decode() or f"the process of lab {name!r} was killed while it started")
    return StartedLab(read(name), time.monotonic() - started, cleared)


def send_command(directory: StateDirectory, command: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send a command (`control_socket.py`) to the lab's process and return the response. Raises LabError."""
    name = directory.name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            sock.connect(str(directory.control))
            sock.sendall(msgspec.json.encode(command) + b"\n")
            with sock.makefile("rb") as stream:
                line = stream.readline()
    except TimeoutError:
        raise LabError(f"lab {name!r} did not answer within {timeout:.0f} s; see {directory.logs}") from None
    except OSError as error:
        raise LabError(
            f"the process of lab {name!r} does not answer ({error.strerror}); "
            f"`narthex lab down --name {name}` removes its remains"
        ) from None
    if not line:
        raise LabError(f"the process of lab {name!r} ended during the command; see {directory.logs}")
    response: dict[str, Any] = msgspec.json.decode(line)
    if "error" in response:
        raise LabError(response["error"])
    return response


def request(name: str, command: dict[str, Any]) -> dict[str, Any]:
    """Send a command to the process of a lab, and return the response. Raises LabError."""
    return send_command(StateDirectory(read(name).name), command, _REQUEST_SECONDS)


def scale(name: str, namespace: str, deployment: str, replicas: int) -> LabState:
    """Scale a Deployment; return when its pods run and all proxies have synced. Raises LabError."""
    if not 0 <= replicas <= topology.MAX_NODES * topology.MAX_PODS_PER_NODE:
        raise LabError(f"{replicas} is not a valid number of replicas")
    request(name, {"scale": {"namespace": namespace, "name": deployment, "replicas": replicas}})
    return read(name)


def kill(name: str, node: str) -> LabState:
    """Kill a node: its process and its link. Returns at once. Raises LabError."""
    request(name, {"kill": {"node": node}})
    return read(name)


def settle(name: str) -> LabState:
    """Wait until the current manifests are applied and all proxies have synced. Raises LabError."""
    request(name, {"settle": True})
    return read(name)


def down(name: str, *, forget: bool = False) -> bool:
    """Remove a lab, running or crashed; return False if there was none. Raises LabError.

    Kept objects stay unless `forget`. A process belongs to the lab if it is recorded as such, or lives in one of its namespaces.
    """
    _check_root()
    directory = StateDirectory(name)
    state = directory.read()
    if state is not None:
        if state.kept and not forget and is_running(state):
            # It may have pending writes.
            with contextlib.suppress(LabError):
                send_command(directory, {"close": True}, _CLOSE_SECONDS)
        kill_processes(_recorded_processes(state))
    namespaces = [each for each in namespace_names() if topology.owns(name, each)]
    has_files = directory.programs.is_dir() and (forget or name in remaining())
    if state is None and not namespaces and not directory.path.is_dir() and not has_files:
        return False
    lock = _wait_for_lock(directory)
    try:
        _remove(directory, forget=forget)
    finally:
        if lock is not None:
            os.close(lock)
    return True


def _recorded_processes(state: LabState) -> list[ProcessIdentity]:
    """Return the processes that live in no namespace of the lab."""
    return [each for each in (state.controller, state.forks) if each is not None]


def _wait_for_lock(directory: StateDirectory) -> int | None:
    """Lock the lab; None if it has no directory. Its process may have been forked but not recorded yet."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while directory.path.is_dir():
        lock = directory.lock()
        if lock is not None:
            return lock
        state = directory.read()
        if state is not None:
            kill_processes(_recorded_processes(state))
        if time.monotonic() > deadline:
            raise LabError(f"another command holds lab {directory.name!r}; wait for it or end it, then try again")
        time.sleep(0.01)
    return None


def _remove(directory: StateDirectory, *, forget: bool = False) -> None:
    """Remove processes, namespaces, and files. The caller holds the lock, so no new ones appear."""
    while True:
        # List again each time: a process may have created a namespace just before it was killed.
        namespaces = [name for name in namespace_names() if topology.owns(directory.name, name)]
        inside = processes_inside(namespaces)
        if not inside:
            break
        kill_processes(inside)
    node_cgroups.remove(directory.name, namespaces)
    for namespace in namespaces:
        delete_namespace(namespace)
    shutil.rmtree(directory.path, ignore_errors=True)
    for entry in directory.programs.iterdir() if directory.programs.is_dir() else ():
        if forget or entry != directory.kept:
            shutil.rmtree(entry, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.programs.rmdir()
    if not remaining():
        for parent in (LABS, LABS.parent, PROGRAMS, PROGRAMS.parent):
            try:
                parent.rmdir()
            except OSError:
                continue


def _acquire_name(directory: StateDirectory) -> tuple[int, bool]:
    """Lock the name; return the lock, and True if remains of a crashed lab were removed. Raises LabError if it is in use."""
    cleared = any(topology.owns(directory.name, name) for name in namespace_names())
    try:
        LABS.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.path.mkdir(mode=0o700, exist_ok=True)
        lock = directory.lock()
    except FileNotFoundError:
        # A concurrent `down` removed the directory.
        return _acquire_name(directory)
    except OSError as error:
        raise LabError(f"cannot use {directory.path}: {error.strerror}") from None
    if lock is None:
        raise LabError(
            f"a lab {directory.name!r} already exists; `narthex lab down --name {directory.name}` removes it, "
            f"or choose another --name"
        )
    if any(directory.path.iterdir()) or cleared:
        os.close(lock)
        down(directory.name)
        return _acquire_name(directory)[0], True
    return lock, False


def _make_directories(directory: StateDirectory, *, keep: bool) -> None:
    """Create the lab's directories."""
    directory.logs.mkdir(mode=0o700)
    directory.programs.mkdir(mode=0o755, parents=True, exist_ok=True)
    if keep:
        directory.kept.mkdir(exist_ok=True)
    directory.input.mkdir(mode=0o700, exist_ok=True)


def _check_programs(directory: StateDirectory, options: LabOptions, *, keep: bool) -> None:
    """Raise LabError unless a lab can use the programs of the options in the place of its own parts."""
    if options.control_plane is not None:
        from narthex.lab.program.control_plane import check_programs

        if keep or directory.kept.is_dir():
            raise LabError("the objects of an external control plane are not kept: use another --name, without --keep")
        check_programs(options.control_plane)
    kube_proxy = options.kube_proxy
    if options.socket_load_balancing:
        node_cgroups.check(options.mode, kube_proxy=kube_proxy is not None)
    if kube_proxy is not None and not (kube_proxy.is_file() and os.access(kube_proxy, os.X_OK)):
        raise LabError(f"{kube_proxy} is not a program: name an executable kube-proxy of an official release")


def _check_values(name: str, options: LabOptions) -> None:
    """Raise LabError unless the manifests' directory, the number of nodes, the pools, and the images are valid."""
    if options.source is not None and not options.source.exists():
        raise LabError(f"there is no directory {str(options.source)!r} to read manifests from")
    try:
        members = topology.nodes(name, options.nodes)
        if options.pools:
            from narthex.lab.program import load_balancer_addresses as balancers

            balancers.pools_of(options.pools, members)
        if options.images:
            from narthex.lab.kubelet.program.images import Images

            Images(options.images)
    except ValueError as error:
        raise LabError(str(error)) from None


def _check_machine(mode: str) -> None:
    from narthex.proxy.program.dataplane import refusal

    _check_root()
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            raise LabError(f"the program {program!r} is missing; install the package {package}")
    why_not = refusal(mode)
    if why_not:
        raise LabError(why_not)


def _check_root() -> None:
    if os.geteuid() != 0:
        raise LabError("a lab needs network namespaces, which only root can create; run it with sudo")
