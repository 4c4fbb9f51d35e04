"""Commands in a lab: in the network of a node or of the outside client, or in a pod next to its program."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from narthex.lab import topology
from narthex.lab.containers.cgroups import join_cgroup
from narthex.lab.containers.program import (
    NEW_PROCESSES,
    ExecSpec,
    ProgramSpec,
    become_exec,
    enter_namespaces,
    find_program,
    join_network,
    join_process,
    unshare,
)
from narthex.lab.containers.root import BindMount, is_private
from narthex.lab.program.node_cgroups import node_cgroup
from narthex.lab.program.state import LabError, LabState, PodRecord, StateDirectory

_RESOLVER = "timeout:1 attempts:1"
"""Nodes do not reach the machine's DNS servers. Programs such as `iptables -L` would wait 5 s for the name of each address."""


class ExecTarget(NamedTuple):
    """Where a command runs."""

    network_namespace: str
    pod: PodRecord | None = None
    """None for nodes and `outside`: only the network differs from the machine's."""
    cgroup: str = ""
    """Directory of the control group; empty: that of the caller."""


def find_target(state: LabState, target: str) -> ExecTarget:
    """Return the target for a node, `outside`, or a pod (`name` or `namespace/name`). Raises LabError."""
    if target == topology.OUTSIDE:
        return ExecTarget(state.outside)
    for node in state.nodes:
        if node.name == target:
            return ExecTarget(node.namespace, None, _cgroup(state, node.name))
    pods = [pod for pod in state.pods if target in (pod.name, f"{pod.namespace}/{pod.name}") and pod.network_namespace]
    if len(pods) > 1:
        choices = ", ".join(f"{pod.namespace}/{pod.name}" for pod in pods)
        raise LabError(f"there are several pods {target!r}: {choices}")
    if not pods:
        known = [topology.OUTSIDE, *(node.name for node in state.nodes), *(pod.name for pod in state.pods)]
        raise LabError(f"lab {state.name!r} has no {target!r}; there are: {', '.join(known)}")
    (pod,) = pods
    return ExecTarget(pod.network_namespace, pod, _cgroup(state, pod.node))


def _cgroup(state: LabState, node: str) -> str:
    return str(node_cgroup(state.name, node)) if state.socket_load_balancing else ""


def container_pid(pod: PodRecord, container: str) -> int:
    """Return the PID of a container's program, 0 if the echo server replaces it. Raises LabError.

    An empty `container` selects the first that runs.
    """
    running = pod.containers
    if not container:
        return next(iter(running.values()), 0)
    if container not in running:
        known = ", ".join(running) or "none"
        raise LabError(f"pod {pod.namespace}/{pod.name} runs no container {container!r}; it runs: {known}")
    return running[container]


def pod_file_mounts(lab: str, pod: PodRecord) -> tuple[BindMount, ...]:
    """Return the files that a pod mounts over the machine's."""
    target = StateDirectory(lab).pods / pod.uid
    files = [("resolv.conf", "/etc/resolv.conf")]
    if pod.hostname:
        files += [("hosts", "/etc/hosts"), ("hostname", "/etc/hostname")]
    return tuple(
        BindMount(str(target / name), at) for name, at in files if (target / name).exists() and Path(at).exists()
    )


def _working_directory(directory: str) -> tuple[BindMount, ...]:
    """Return the mount of the caller's directory, if the pod would not see it."""
    return (BindMount(directory, directory, read_only=True),) if is_private(directory) else ()


def run(state: LabState, target: ExecTarget, argv: Sequence[str], container: str = "") -> NoReturn:
    """Run a command with this process's terminal and files, and exit with its status. Raises LabError."""
    try:
        join_cgroup(target.cgroup)
    except OSError as error:
        raise LabError(f"control group {target.cgroup} cannot be entered: {error.strerror}") from error
    if target.pod is None:
        os.environ.setdefault("RES_OPTIONS", _RESOLVER)
        # `ip netns exec` also puts the namespace's own view of /sys in place.
        os.execvp("ip", ["ip", "netns", "exec", target.network_namespace, *argv])
    target_pid = container_pid(target.pod, container)
    directory = "/" if target_pid else str(Path.cwd())
    try:
        executable = find_program(argv[0], os.environ, directory)
    except OSError as error:
        raise LabError(str(error.strerror)) from error
    program = ProgramSpec(
        argv=tuple(argv),
        executable=executable,
        environment=dict(os.environ),
        directory=directory,
        network_namespace=target.network_namespace,
        hostname=target.pod.hostname,
        shows=(*pod_file_mounts(state.name, target.pod), *_working_directory(directory)),
    )

    def run_in_new_namespaces() -> NoReturn:
        """Enter the namespaces of a pod without a program of its own, and replace this process."""
        enter_namespaces(program)
        # PID 1 of a namespace would not receive SIGINT.
        _run_and_wait(lambda: become_exec(program, executable))

    def run_next_to_program() -> NoReturn:
        """Replace this process, in the namespaces of the pod's running program."""
        entry = ExecSpec(target_pid=target_pid, argv=program.argv, environment=program.environment)
        become_exec(entry, executable)

    try:
        if target_pid:
            join_process(target_pid)
            _run_and_wait(run_next_to_program)
        join_network(target.network_namespace)
        unshare(NEW_PROCESSES)
    except OSError as error:
        raise LabError(f"pod {target.pod.namespace}/{target.pod.name} cannot be entered: {error}") from error
    _run_and_wait(run_in_new_namespaces)


def _run_and_wait(command: Callable[[], NoReturn]) -> NoReturn:
    child = os.fork()
    if child == 0:
        try:
            command()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(2, f"Error: {error.strerror or error}\n".encode(errors="replace"))
        os._exit(127)
    for number in (signal.SIGINT, signal.SIGQUIT):
        # The terminal sends these to the command as well.
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    while True:
        try:
            _, status = os.waitpid(child, 0)
        except InterruptedError:
            continue
        code = os.waitstatus_to_exitcode(status)
        os._exit(128 - code if code < 0 else code)
