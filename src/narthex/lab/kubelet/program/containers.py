"""What pods are made with, and how one of their containers is started: as a program of the machine, or by the echo server."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from narthex.lab.cluster import DNS_PORT
from narthex.lab.containers.container import Containers, ContainerStartError, RunningContainer
from narthex.lab.containers.inside import find
from narthex.lab.containers.program import ProgramSpec
from narthex.lab.kubelet.environment import command_line, environment, hostname
from narthex.lab.kubelet.probes import ProbeState, probes_of
from narthex.lab.kubelet.program.echo import EchoServer
from narthex.lab.kubelet.program.prober import Prober
from narthex.lab.kubelet.program.volumes import PodFiles
from narthex.lab.program.network import PodNetwork
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.model.names import NamespacedName

Object = Mapping[str, Any]


class RecordEvent(Protocol):
    """Takes what is to become an Event."""

    def __call__(self, about: Mapping[str, Any], reason: str, message: str, *, warning: bool = False) -> None:
        """`about`: the pod; the rest as Events have it."""


class IsReleased(Protocol):
    """Says whether nobody is sent to a pod any more."""

    def __call__(self, key: NamespacedName, since: float) -> bool:
        """`since`: when its end was wished, in seconds since 1970."""


class PodDependencies(NamedTuple):
    """What pods are made with."""

    registry: SharedRegistry
    network: PodNetwork
    files: PodFiles
    echo: EchoServer
    containers: Containers
    record_event: RecordEvent
    is_released: IsReleased
    prober: Prober


class ContainerRun:
    """One container of a pod, from start to end."""

    def __init__(self, container: RunningContainer | None, spec: Object, environment: dict[str, str]) -> None:
        self.container = container
        """None: the echo server does its work."""
        self.environment = environment
        self.began = time.monotonic()
        self.probes = ProbeState(probes_of(spec), datetime.now(UTC))
        self.check_scheduled = False
        """It is going to be judged again."""
        self.failed = False
        """It is being ended for a probe."""


def echo_name(pod: Object, container: str) -> str:
    """What the echo server knows a container by."""
    return f"{pod['metadata']['uid']}/{container}"


def start_echo(pod: Object, spec: Object, deps: PodDependencies) -> ContainerRun:
    """Let the echo server stand for a container. Raises OSError."""
    ports = _ports(spec)
    node = pod["spec"]["nodeName"]
    if pod["spec"].get("hostNetwork") and any(number == DNS_PORT for _, number in ports):
        raise OSError(errno.EADDRINUSE, f"Address already in use: port {DNS_PORT} of {node} is the lab's DNS's")
    says = f"{pod['metadata']['name']} on {node}"
    deps.echo.add(echo_name(pod, spec["name"]), says, deps.network.namespace(pod), ports)
    return ContainerRun(None, spec, {})


def start_program(
    pod: Object,
    spec: Object,
    image: str,
    restarts: int,
    deps: PodDependencies,
    ended: Callable[[RunningContainer], None],
) -> ContainerRun:
    """Run a container's program; `image` is what stands behind its image. `ended` is called by another thread. Raises
    ConfigFault, StartError, OSError."""
    known = environment_of(pod, spec, deps.registry)
    argv = command_line(spec, image, known)
    directory = spec.get("workingDir") or "/"
    try:
        executable = find(argv[0], known, directory)
    except OSError as error:
        raise ContainerStartError(str(error.strerror), missing=True) from error
    security = {**(pod["spec"].get("securityContext") or {}), **(spec.get("securityContext") or {})}
    program = ProgramSpec(
        argv=argv,
        executable=executable,
        environment=known,
        directory=directory,
        network_namespace=deps.network.namespace(pod),
        hostname="" if pod["spec"].get("hostNetwork") else hostname(pod),
        shows=tuple(deps.files.shows(pod, spec)),
        user=security.get("runAsUser"),
        group=security.get("runAsGroup"),
        log=str(deps.files.log(pod, spec["name"], restarts)),
    )
    return ContainerRun(deps.containers.run(program, ended=ended), spec, known)


def environment_of(pod: Object, spec: Object, shared: SharedRegistry) -> dict[str, str]:
    """The variables of a container. From any thread. Raises ConfigFault."""
    home = pod["metadata"]["namespace"]
    with shared.held() as registry:
        services = [*registry.list("Service", "default"), *registry.list("Service", home)]
        return environment(pod, spec, services, lambda kind, name: registry.get(kind, home, name))


def _ports(spec: Object) -> list[tuple[str, int]]:
    """What a container declares, each once."""
    declared = ((str(port.get("protocol") or "TCP"), int(port["containerPort"])) for port in spec.get("ports") or ())
    return list(dict.fromkeys(declared))


ECHO = "echo"
"""The image that always is the lab's own server, although machines have a command of that name."""


class ContainerImage(NamedTuple):
    """What stands behind an image."""

    program: str = ""
    """Absolute path of a program of this machine; empty: the echo server stands for it."""
    missing: str = ""
    """Why it cannot be had."""


def image_of(container: Mapping[str, Any]) -> ContainerImage:
    """A path (`/opt/shop/serve`) or a command (`redis-server`) of this machine is that program; everything else is the echo
    server, on the ports that the container declares."""
    name = str(container.get("image") or "")
    if name.startswith("/"):
        if Path(name).is_file() and os.access(name, os.X_OK):
            return ContainerImage(name)
        return ContainerImage(missing=f"{name} is no program on this machine")
    if not name or name == ECHO or "/" in name or ":" in name:
        return ContainerImage()
    return ContainerImage(shutil.which(name) or "")
